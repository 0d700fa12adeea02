"""Runs of the script that push to the loopback Hub."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "hf_loopbackWriteTokenOfAnn"
OPTIONS = {
    "language": "python", "from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32,
    "per_device_train_batch_size": 8, "num_train_epochs": 3, "use_cpu": "true", "disable_tqdm": "true",
    "push_to_hub": "true", "hub_model_id": "ann/tiny", "lexical": "false",
}  # fmt: skip


@pytest.fixture
def train(hub, data_dir, tmp_path):
    """Runs the script against the loopback Hub; returns the finished process and its output folder."""

    def run(token=TOKEN, **options):
        chosen = OPTIONS | {"data_dir": data_dir, "output_dir": tmp_path / "out"} | options
        words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
        return hub.run(ROOT / "run_codesearch.py", *words, token=token, OMP_NUM_THREADS="1"), tmp_path / "out"

    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_a_run_pushes_an_encoder_that_loads_by_name(train, hub, strategy):
    done, folder = train(hub_strategy=strategy)
    assert done.returncode == 0, done.stderr[-2000:]
    files = {entry["path"] for entry in hub.request("GET", "/api/models/ann/tiny/tree/main?recursive=true")}
    assert {"model.safetensors", "README.md", "modules.json", "soft_trainer.json", "tokenizer.json"} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert any(name.startswith(("last-checkpoint", "checkpoint-")) for name in files) == ("checkpoint" in strategy)
    code = "from soft_trainer import load_encoder; print(load_encoder('ann/tiny').encode_queries(['a']).shape)"
    assert "torch.Size([1, 32])" in hub.run("-c", code, token=TOKEN).stdout
    everything = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*everything, done.stderr.encode(), done.stdout.encode()])


@pytest.mark.slow
def test_a_push_that_fails_for_good_leaves_the_folder_and_says_how_to_push_later(train, hub):
    hub.fault(commit=-1)
    done, folder = train(hub_strategy="end")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and "python -m soft_trainer.hub.push" in line
    assert json.loads((folder / "all_results.json").read_text())["results"]["test"]["trained"]
    hub.fault(commit=0)
    later = hub.run("-m", "soft_trainer.hub.push", folder, "ann/tiny", token=TOKEN)
    assert later.returncode == 0, later.stderr


@pytest.mark.slow
def test_a_wrong_token_stops_the_run_before_it_trains(train):
    done, folder = train(token="hf_wrong")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: cannot push to ann/tiny")
    assert not list(folder.rglob("model.safetensors"))
