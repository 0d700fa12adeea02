"""A search with a transformer runs on ONNX Runtime, without torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from soft_trainer.encoders.export import export_encoder
from soft_trainer.search import CodeIndex
from soft_trainer.search.index import onnx, vectors

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(model, tokenizer, profile, tmp_path):
    return export_encoder(model, tokenizer, profile.replace(score_function="cosine"), tmp_path / "encoder")


def test_an_index_exports_once_and_a_search_needs_no_torch(tree, folder, cache, capsys):
    index = CodeIndex.build(tree, model=folder)
    assert "exporting to ONNX, once" in capsys.readouterr().err
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
    before = onnx.open_onnx(str(folder)).identity
    CodeIndex.build(tree, model=folder)
    model.get_input_embeddings().weight.data += 0.1
    export_encoder(model, tokenizer, profile.replace(score_function="cosine"), folder)
    assert onnx.open_onnx(str(folder)).identity != before
    assert CodeIndex.build(tree).search("parse a date")


def test_embeddings_are_those_of_torch(folder):
    exported, own = onnx.open_onnx(str(folder), precision="float32"), vectors.SearchEncoder(str(folder))
    texts = ["parse a date", "def f(x): return x", "a " * 300]
    np.testing.assert_allclose(exported.queries(texts), own.queries(texts), atol=1e-4)
    np.testing.assert_allclose(exported.codes(texts, ["python"] * 3), own.codes(texts, ["python"] * 3), atol=1e-4)


@pytest.mark.parametrize("least, precision", [(-1.0, "int8"), (1.1, "float32")])
def test_int8_earns_its_place_and_the_index_keeps_the_choice(tree, folder, monkeypatch, least, precision):
    monkeypatch.setattr(onnx, "LEAST_COSINE", least)
    index = CodeIndex.build(tree, model=folder)
    assert index._precision == precision
    (tree / "new.py").write_text("def brand_new(): pass\n")
    monkeypatch.setattr(onnx, "LEAST_COSINE", -least)
    again = CodeIndex.build(tree)
    assert again._precision == precision and again.search("parse a date") and not again.notices


def test_without_the_extra_torch_runs_the_encoder_and_an_index_keeps_it(tree, folder, monkeypatch):
    monkeypatch.setattr(onnx, "has_onnxruntime", lambda: False)
    index = CodeIndex.build(tree, model=folder)
    assert index._precision == vectors.TORCH
    monkeypatch.undo()
    again = CodeIndex.build(tree)
    assert again._precision == vectors.TORCH and again.search("parse a date") and not again.notices
