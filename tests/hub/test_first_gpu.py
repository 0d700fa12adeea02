"""The benchmark script for a first GPU runs with tiny encoders that have the names of the real ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from codesearchnet import NAME, ON_BRANCH, SCRIPT, parquet_files, publish
from conftest import ROOT
from huggingface_hub import HfApi
from server import WRITE_TOKEN

from soft_trainer.data.layouts.published import PARQUET_BRANCH
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile

REPO = "ann/first"
OPTIONS = {
    "use_cpu": True, "bf16": False, "max_steps": 4, "per_device_train_batch_size": 8, "query_length": 16,
    "code_length": 32,
}  # fmt: skip


def ruby_rows(number: int) -> list[dict]:
    """Returns rows that GraphCodeBERT's filters do not drop."""
    verbs = ("select", "reject", "count", "double", "print", "store", "load", "merge")
    nouns = ("numbers", "words", "users", "files", "orders", "prices", "colours", "events", "tokens", "lines", "keys")
    rows = []
    for place in range(number):
        verb = verbs[place % len(verbs)]
        noun = nouns[place % len(nouns)]
        code = f"def {verb}_{noun}({noun}, factor)\n  {noun}.{verb} do |each|\n    each * factor + {place}\n  end\nend"
        query = f"Will {verb} the {noun} that are given times a factor plus {place}"
        rows.append(
            {
                "repo": f"ann/{noun}",
                "path": f"lib/{verb}.rb",
                "func_name": f"{verb}_{noun}",
                "original_string": code,
                "code": code,
                "code_tokens": code.split(),
                "docstring": query,
                "docstring_tokens": query.split(),
                "url": f"https://example.org/{place}.rb#L1",
            }
        )
    return rows


@pytest.fixture
def there(here, encoder_of, tmp_path):
    """Publishes rows with a loading script, and tiny encoders, under the names that the script loads."""
    rows = ruby_rows(120)
    publish(here.url, SCRIPT)
    publish(here.url, parquet_files((rows[:80], rows[80:100], rows[100:]), ON_BRANCH, "ruby"), PARQUET_BRANCH)
    mean = EncoderProfile(query_length=16, code_length=16, score_function="dot", query_columns=("docstring",))
    encoders = {
        "microsoft/unixcoder-base": PROFILES["unixcoder"],
        "sentence-transformers/msmarco-distilbert-dot-v5": mean,
    }
    for name, profile in encoders.items():
        encoder = encoder_of(profile)
        folder = export_encoder(encoder.model, encoder.tokenizer, profile, tmp_path / "encoders" / name)
        (folder / "soft_trainer.json").unlink()  # nobody else's encoder has it
        api = HfApi(here.url, token=WRITE_TOKEN)
        api.create_repo(name)
        api.upload_folder(repo_id=name, folder_path=folder)
    return here


@pytest.mark.rehearsal
def test_every_step_runs_and_the_page_has_its_figures(there, tmp_path):
    options = [f"{name}={value}" for name, value in OPTIONS.items()]
    environment = there.environment(WRITE_TOKEN) | {"SIMCSE_STEPS": "2", "SIMCSE_BATCH": "16"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [shutil.which("bash"), ROOT / "benchmarks/first_gpu.sh", REPO, *options]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.run(command, env=environment, cwd=tmp_path, stdout=log, stderr=log, timeout=3600)
    assert run.returncode == 0, (tmp_path / "log").read_text()[-5000:]
    page = (tmp_path / "outputs/first-gpu/page.md").read_text()
    for words in (
        "| infonce ",
        "| bm25 ",
        "| trained_model ",
        "| simcse ",
        "0.740",
        "0.753",
        "ann/first, private",
        ": none",
    ):
        assert words in page, page
    resumed = json.loads((tmp_path / "outputs/first-gpu/resume.json").read_text())
    assert resumed["code"] == 143 and 20 <= resumed["step"] < 200 and resumed["difference"] == 0
    pushed = json.loads((tmp_path / "outputs/first-gpu/pushed.json").read_text())
    assert pushed["difference"] < 1e-6 and pushed["leaked"] == [] and pushed["private"]
    assert len(list((tmp_path / "outputs/first-gpu/runs").glob("*/*/run.json"))) == 12
    assert there.requests("HEAD /datasets/" + NAME)
