"""Several processes give the same losses, weights and metrics as one process on the global batch."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainings import check_weights

from soft_trainer.system import distributed

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "run_codesearch.py"
FSDP = ["--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp.yaml"), "--mixed_precision", "no"]
SHARDED = ["-m", "accelerate.commands.launch", *FSDP, str(ROOT / "tests" / "sharded.py")]
BASE = {
    "language": "python",
    "learning_rate": 1e-2,
    "max_steps": 5,
    "logging_steps": 1,
    "optim": "adamw_torch",
    "save_strategy": "no",
    "lexical": "false",
    "do_eval": "false",
    "model_card": "false",
    "estimator": "bm25",
    "use_cpu": "true",
    "overwrite": "true",
    "disable_tqdm": "true",
}


@pytest.fixture(scope="module")
def folder(_model, tokenizer, profile, data_dir, tmp_path_factory):
    """A folder with a tiny float64 encoder, and rows in which two queries are equal."""
    from soft_trainer.encoders.export import export_encoder

    folder = tmp_path_factory.mktemp("processes")
    model = copy.deepcopy(_model).double()
    # Without dropout, results do not depend on how a batch is divided.
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    export_encoder(model, tokenizer, profile, folder / "encoder")
    for split in ("train", "valid", "test", "codebase"):
        rows = [json.loads(line) for line in (data_dir / f"{split}.jsonl").read_text().splitlines()]
        if split == "train":
            again = [
                row | {"url": f"{row['url']}-again", "code_tokens": ["another", row["func_name"]]} for row in rows
            ]
            rows = [*rows, *again][:25]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start_sharded(words: list[str], environment: dict[str, str]) -> str:
    """Starts two processes with `accelerate launch`, and returns their output."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"} | environment
    command = [sys.executable, *SHARDED, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def train(folder, launch):
    """Returns a function that trains with several processes.

    The function returns weights, losses, test metrics and output.
    """

    def run(processes: int, joined: int, sharded: bool = False, **options) -> dict:
        output = folder / f"out-{processes}"
        options = BASE | {"model_name_or_path": folder / "encoder", "data_dir": folder, "output_dir": output} | options
        options |= {"per_device_train_batch_size": joined // processes, "estimator_cache_dir": folder / "rows"}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        cache = {"HF_DATASETS_CACHE": str(folder / "cache")}
        said = start_sharded(words, cache) if sharded else launch([SCRIPT, *words], processes, 300, **cache)
        log = json.loads((output / "trainer_state.json").read_text())["log_history"]
        return {
            "weights": load_file(output / "model.safetensors"),
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "metrics": json.loads((output / "run.json").read_text())["results"]["test"]["trained"],
            "said": "".join(said),
        }

    return run


def check_equal(alone: dict, together: dict) -> None:
    """Compares weights to 1e-10, losses (which `Trainer` sums in float32) to 1e-5, and metrics to 1e-6."""
    assert len(alone["losses"]) == len(together["losses"]) > 4
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert {weight.dtype for weight in alone["weights"].values()} == {torch.float64}
    check_weights(together["weights"], alone["weights"], atol=1e-10)
    for name in ("mrr", "recall@1", "recall@10", "pool_size"):
        assert together["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "soft_info_nce", "estimator": "simcse"},
        {"loss": "own_losses:hinge", "weighting": "own_losses:halves", "gradient_cache_chunk_size": 2},
        {"loss": "weighted_info_nce", "gradient_accumulation_steps": 2, "estimator": "trained_model"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_two_processes_train_as_one_on_the_joined_batch(train, folder, options, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)  # the user's module is in the current folder
    if options.get("estimator", "bm25") != "bm25":
        options = options | {"estimator_model": folder / "encoder"}
    check_equal(train(1, 12, **options), train(2, 12, **options))


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones(train):
    sharded = train(2, 12, sharded=True, save_strategy="steps", save_steps=4)
    assert "2 (FSDP)" in sharded["said"]
    check_equal(train(1, 12), sharded)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_step_has_one_gather_and_one_reduction_and_processes_share_what_they_can(
    folder, launch, tmp_path, processes
):
    shutil.copytree(folder / "encoder", tmp_path / "encoder")
    (tmp_path / "rows.json").write_text(json.dumps([json.loads(x) for x in (folder / "train.jsonl").open()]))
    launch([ROOT / "tests" / "exchanging.py", tmp_path], processes, 240, HF_DATASETS_CACHE=str(tmp_path / "datasets"))
    results = [json.loads((tmp_path / f"{processes}-{rank}.json").read_text()) for rank in range(processes)]
    whole = torch.arange(2.0 * 11).view(11, 2)
    for rank, found in enumerate(results):
        assert found["gathered"] == whole.tolist() and sum(found["gathering"].values()) == 2
        own = whole[distributed.shard(11, rank, processes)]
        assert found["gradient"] == (processes * own).tolist() and sum(found["with gradient"].values()) == 2
        expected = []
        for number in (3, 3, 1, 5, 4):
            expected.append([[each] * (number - (each == 0)) for each in range(processes)])
        assert [gathered for gathered, _ in found["numbers"]] == expected
        assert [collectives for _, collectives in found["numbers"]] == [2, 1, 1, 2, 1]
        near = found["neighbours"]
        share = distributed.shard(33, rank, processes)
        assert near["together"] == near["in memory"] == [near["alone"], share.stop - share.start]
        assert near["again"] == [near["alone"], 0]
        # The gradients of the weights are reduced by DDP, in C++, which is not counted.
        for step in found["trained"]["steps"]:
            gathers = sum(number for name, number in step.items() if name.startswith("all_gather"))
            assert (gathers, step.get("all_reduce"), len(step)) == (1, 1, 2)


@pytest.mark.parametrize(
    "allowed, processes, launched, threads",
    [(8, 1, True, 8), (8, 4, True, 2), (2, 8, True, 1), (8, 4, False, 1)],
)
def test_a_launched_process_uses_its_part_of_the_cores(monkeypatch, allowed, processes, launched, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    else:
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert distributed.cores() == max(allowed // processes, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        distributed.use_the_cores()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length, processes", [(10, 3), (7, 7), (2, 3), (12, 4)])
def test_parts_cover_everything_once_and_differ_by_at_most_one(length, processes):
    parts = [distributed.shard(length, rank, processes) for rank in range(processes)]
    assert [i for part in parts for i in range(length)[part]] == list(range(length))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
