"""The real clients, each in a process of its own with an empty home, against the loopback Hub."""

import json
import sys
from pathlib import Path

import pytest

from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.push import push_folder

sys.path.append(str(Path(__file__).parent))
from server import READ_TOKEN, WRITE_TOKEN

pytestmark = pytest.mark.slow

REPO = "ann/encoder"
TEXTS = ["read a file line by line", "def f(x): return x", "much too long " * 30]
LOAD = """
import json, sys
from soft_trainer import load_encoder
from soft_trainer.errors import SetupError

for repo, revision in json.loads(sys.argv[2]):
    try:
        encoder = load_encoder(repo, revision=revision, device="cpu")
        print(json.dumps({"queries": encoder.encode_queries(json.loads(sys.argv[1])).tolist()}))
    except SetupError as error:
        print(json.dumps({"error": str(error)}))
"""
OTHERS = """
import json, sys
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

texts, repo = json.loads(sys.argv[1]), sys.argv[2]
model, report = AutoModel.from_pretrained(repo, add_pooling_layer=False, output_loading_info=True)
encoder = SentenceTransformer(repo, device="cpu")
found = {"queries": encoder.encode_query(texts).tolist(), "codes": encoder.encode_document(texts).tolist()}
print(json.dumps(found | {"missing": sorted(report["missing_keys"])}))
"""
DATA_SET = """
import json
from datasets import load_dataset

print(json.dumps({split: rows["docstring"][:] for split, rows in load_dataset("ann/rows").items()}))
"""


@pytest.fixture
def encoder(encoder_of):
    return encoder_of(PROFILES["unixcoder"].replace(query_length=12, code_length=20))


@pytest.fixture
def folder(encoder, tmp_path):
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "encoder")


def loaded(hub, *wanted, **environment):
    """What `load_encoder` in a new process gives for these repositories and revisions, and what it logged."""
    process = hub.run("-c", LOAD, json.dumps(TEXTS), json.dumps(wanted), **environment)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()], process.stderr


def test_load_by_name_with_every_library(here, encoder, folder):
    push_folder(folder, REPO, WRITE_TOKEN)
    expected = encoder.encode_queries(TEXTS).tolist()
    assert loaded(here, (REPO, None))[0] == [{"queries": expected}]
    process = here.run("-c", OTHERS, json.dumps(TEXTS), REPO)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["missing"] == []
    for ours, theirs in ((expected, found["queries"]), (encoder.encode_codes(TEXTS).tolist(), found["codes"])):
        assert [pytest.approx(row, abs=1e-5) for row in ours] == theirs


def test_private_and_revision_and_missing(here, encoder, folder, encoder_of):
    push_folder(folder, REPO, WRITE_TOKEN, private=True)
    other = encoder_of(encoder.profile, seed=1)
    export_encoder(other.model, other.tokenizer, other.profile, folder)
    push_folder(folder, REPO, WRITE_TOKEN, revision="second")
    wanted = (REPO, None), (REPO, "second"), (REPO, "third"), ("ann/missing", None)
    (main, second, third, missing), log = loaded(here, *wanted, token=READ_TOKEN)
    assert main == {"queries": encoder.encode_queries(TEXTS).tolist()}
    assert second == {"queries": other.encode_queries(TEXTS).tolist()}
    assert third["error"] == "ann/encoder: no revision 'third' on the Hub"
    assert missing["error"].startswith("ann/missing: neither a folder here nor a repository")
    assert READ_TOKEN not in log
    files = [path for path in here.home.rglob("*") if path.is_file()]
    assert files and not [path for path in files if READ_TOKEN.encode() in path.read_bytes()]
    (hidden,), _ = loaded(here, (REPO, None), HF_HOME=str(here.home / "of another"))
    assert "HF_TOKEN" in hidden["error"]


def test_warm_cache_loads_offline_and_when_the_hub_is_down(here, encoder, folder):
    push_folder(folder, REPO, WRITE_TOKEN)
    expected = [{"queries": encoder.encode_queries(TEXTS).tolist()}]
    here.fault(cut_download=1)
    assert loaded(here, (REPO, None))[0] == expected
    (known, unknown), _ = loaded(here, (REPO, None), ("ann/other", None), HF_HUB_OFFLINE="1")
    assert [known] == expected and unknown["error"].startswith("ann/other: ")
    here.stop()
    assert loaded(here, (REPO, None))[0] == expected


def test_data_set_from_the_hub(here, tmp_path, rows):
    for split, chosen in {"train": rows[:8], "test": rows[8:]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    push_folder(tmp_path, "ann/rows", WRITE_TOKEN, repo_type="dataset")
    process = here.run("-c", DATA_SET)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "train": [row["docstring"] for row in rows[:8]],
        "test": [row["docstring"] for row in rows[8:]],
    }
