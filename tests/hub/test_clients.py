"""The official clients and `load_encoder` load pushed repositories from the loopback Hub, in separate processes."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from refusals import refused
from server import READ_TOKEN, WRITE_TOKEN

import soft_trainer
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.hub.push import Repository
from soft_trainer.system.files import write_rows

REPO = "ann/encoder"
TEXTS = ["read a file line by line", "def f(x): return x", "much too long " * 30]
# Every library loads the repository, and the code snippets of its card run as printed.
EVERY_LIBRARY = """
import json, re, sys
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from transformers import AutoModel
from soft_trainer import load_encoder

texts, repo = json.loads(sys.argv[1]), sys.argv[2]
_, report = AutoModel.from_pretrained(repo, add_pooling_layer=False, output_loading_info=True)
ours, theirs = load_encoder(repo, device="cpu"), SentenceTransformer(repo, device="cpu")
print(json.dumps({
    "missing": sorted(report["missing_keys"]),
    "queries": [encode(texts).tolist() for encode in (ours.encode_queries, theirs.encode_query)],
    "codes": [encode(texts).tolist() for encode in (ours.encode_codes, theirs.encode_document)],
}))
for snippet in re.findall(r"```python\\n(.*?)```", ModelCard.load(repo).text, re.S):
    exec(snippet, {})
"""
ROWS_AND_METRIC = """
import datasets
import evaluate

for split, rows in datasets.load_dataset("ann/rows").items():
    print(split, len(rows), rows.column_names == list(rows.features), rows["url"][0], rows["docstring_tokens"][0])
print(evaluate.load("ann/mrr").compute(predictions=[1, 2], references=[9, 9]))
"""


@pytest.fixture
def encoder(encoder_of):
    return encoder_of(PROFILES["unixcoder"].replace(query_length=12, code_length=20))


@pytest.fixture
def folder(encoder, tmp_path):
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "encoder")


def close(left, right) -> bool:
    return torch.allclose(torch.tensor(left), torch.tensor(right), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_as_a_process_pushes_what_every_library_loads(hub, data_dir, tmp_path):
    options = {"push_to_hub": True, "hub_model_id": REPO, "hub_strategy": "every_save", "save_total_limit": 1}
    where = {"data_dir": data_dir, "output_dir": tmp_path / "out"}
    done = hub.train(WRITE_TOKEN, **where, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path for folder in (tmp_path / "out", hub.home) for path in folder.rglob("*") if path.is_file()]
    assert files and not [path for path in files if WRITE_TOKEN.encode() in path.read_bytes()]
    assert not hub.holding(WRITE_TOKEN) and WRITE_TOKEN not in done.stdout + done.stderr

    here = load_encoder(tmp_path / "out", device="cpu")
    expected = here.encode_queries(TEXTS).tolist()
    hub.fault(cut_download=1)
    loaded = hub.run("-c", EVERY_LIBRARY, json.dumps(TEXTS), REPO)
    there = json.loads(loaded.stdout.splitlines()[0]) if loaded.returncode == 0 else pytest.fail(loaded.stderr)
    assert there["missing"] == [] and loaded.stdout.count("tensor(") == 3
    assert there["queries"][0] == expected and close(there["queries"][1], expected)
    assert all(close(codes, here.encode_codes(TEXTS).tolist()) for codes in there["codes"])


@pytest.mark.slow
def test_a_private_encoder_needs_a_token_once_and_loads_from_the_cache_when_the_hub_is_down(
    here, encoder, folder, monkeypatch
):
    Repository(REPO, WRITE_TOKEN, private=True).push(folder)
    with refused("HF_TOKEN"):
        load_encoder(REPO)
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    load_encoder(REPO)
    files = [path for path in here.home.rglob("*") if path.is_file()]
    assert files and not [path for path in files if READ_TOKEN.encode() in path.read_bytes()]
    here.stop()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert torch.equal(load_encoder(REPO, device="cpu").encode_queries(TEXTS), encoder.encode_queries(TEXTS))
        with refused("ann/other: "):
            load_encoder("ann/other")


@pytest.mark.slow
def test_datasets_and_evaluate_load_what_is_pushed(here, data_dir, rows, tmp_path):
    """Mined codebases have empty lists of tokens. A reader cannot infer a type from an empty list."""
    data = load_folder(data_dir)
    blank, features = {"docstring": "", "docstring_tokens": []}, data["codebase"].features
    data["codebase"] = data["codebase"].map(lambda row: blank, features=features)
    write_rows(data, tmp_path / "rows")
    Repository("ann/rows", WRITE_TOKEN, repo_type="dataset").push(tmp_path / "rows")
    Repository("ann/mrr", WRITE_TOKEN, repo_type="space").push(Path(soft_trainer.__file__).parent / "metrics/mrr")
    process = here.run("-c", ROWS_AND_METRIC)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    splits = (("train", 16, 0), ("validation", 4, 16), ("test", 4, 20))  # `datasets` knows no codebase
    for line, (split, count, first) in zip(lines, splits, strict=False):
        assert line == f"{split} {count} True {rows[first]['url']} {rows[first]['docstring_tokens']}"
    assert lines[-1] == "{'mrr': 0.75, 'queries': 2, 'pool_size': 9}"
