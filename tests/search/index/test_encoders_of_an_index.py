"""An index runs its encoder on ONNX Runtime, without torch, if the encoder can be exported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from soft_trainer.encoders import text_encoder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.search import CodeIndex

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(model, tokenizer, profile, tmp_path):
    return export_encoder(model, tokenizer, profile.replace(score_function="cosine"), tmp_path / "encoder")


def test_an_index_exports_once_and_a_search_needs_no_torch(tree, folder, cache, capsys):
    index = CodeIndex.build(tree, model=folder)
    assert "exporting to ONNX (only once)" in capsys.readouterr().err
    code = (
        "import sys, json; from soft_trainer.search import CodeIndex; "
        f"index = CodeIndex.build({str(tree)!r}); found = index.search('parse a date'); "
        "print(json.dumps([len(found), index.notices, sorted({'torch', 'transformers'} & set(sys.modules))]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    count, notices, imported = json.loads(done.stdout)
    assert count and not notices and not imported
    CodeIndex.build(index.folder, index.index_dir.with_name("other"), model=folder)
    assert "exporting" not in capsys.readouterr().err


def test_new_weights_are_another_encoder(tree, folder, model, tokenizer, profile):
    before = open_encoder(folder).fingerprint
    CodeIndex.build(tree, model=folder)
    model.get_input_embeddings().weight.data += 0.1
    export_encoder(model, tokenizer, profile.replace(score_function="cosine"), folder)
    assert open_encoder(folder).fingerprint != before
    assert CodeIndex.build(tree).search("parse a date")


def test_embeddings_and_the_fingerprint_are_those_of_torch(folder):
    exported, own = open_encoder(folder), open_encoder(folder, light=False)
    assert (exported.runtime, own.runtime) == ("onnx", "torch")
    assert exported.fingerprint == own.fingerprint
    texts = ["parse a date", "def f(x): return x", "a " * 300, "a <mask> between </s> others <S>"]
    for side in ("query", "code"):
        np.testing.assert_allclose(exported.encode(texts, side), own.encode(texts, side), atol=1e-4)


def runtime_of(index):
    with index.snapshot() as snapshot:
        return snapshot.state["runtime"]


def test_without_the_extra_torch_runs_the_encoder_and_an_index_keeps_it(tree, folder, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(text_encoder, "has_onnxruntime", lambda: False)
        index = CodeIndex.build(tree, model=folder)
    assert runtime_of(index) == "torch"
    again = CodeIndex.build(tree)
    assert runtime_of(again) == "torch" and again.search("parse a date") and not again.notices


def test_an_index_by_onnx_is_searched_by_torch_where_onnx_is_missing(tree, folder, monkeypatch):
    index = CodeIndex.build(tree, model=folder)
    found = [result.path for result in index.search("parse a date")]
    monkeypatch.setattr(text_encoder, "has_onnxruntime", lambda: False)
    again = CodeIndex.open(index.index_dir)
    assert [result.path for result in again.search("parse a date")] == found and not again.notices


def test_the_cut_that_opens_an_encoder_first_is_not_that_of_others(folder):
    assert open_encoder(folder, 8).dimensions == 8
    assert open_encoder(folder).dimensions == 32
