"""Several processes against one on the joined batch: the same losses, the same weights, the same metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from soft_trainer import distributed

WORKER = Path(__file__).parent / "distributed_worker.py"
BASE = {"learning_rate": 1e-2, "max_steps": 5, "optim": "adamw_torch"}


@pytest.fixture(scope="module")
def train(_model, tokenizer, profile, tmp_path_factory):
    """Options and processes -> what each process wrote."""
    from soft_trainer.hub.export import export_encoder

    folder = tmp_path_factory.mktemp("processes")
    encoder = str(export_encoder(_model, tokenizer, profile, folder / "encoder"))

    def run(processes: int, joined: int, **options) -> list[dict[str, torch.Tensor]]:
        settings = BASE | {"encoder": encoder, "folder": str(folder), "estimator": "bm25"} | options
        settings["per_device_train_batch_size"] = joined // processes
        output = folder / f"out-{processes}"
        (folder / "options.json").write_text(json.dumps(settings))
        arguments = [str(WORKER), str(folder / "options.json"), str(output)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return [load_file(f"{output}.{rank}") for rank in range(processes)]

    return run


def check_equal(alone: dict, together: list[dict]) -> None:
    """Weights and losses to 1e-10 on every process, metrics to 1e-6."""
    for process in together:
        assert process["mrr"].item() == pytest.approx(alone["mrr"].item(), abs=1e-6)
        for name in alone:
            if name not in ("mrr", "losses"):
                torch.testing.assert_close(process[name], alone[name], atol=1e-10, rtol=0, msg=name)
    torch.testing.assert_close(together[0]["losses"], alone["losses"], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "soft_info_nce"},
        {"loss": "info_nce", "gradient_cache_chunk_size": 3},
        {"loss": "bce", "estimator": "bm25+trained_model"},
        {"loss": "weighted_info_nce", "gradient_accumulation_steps": 2, "estimator": "trained_model"},
        {"loss": "kl_regularization", "gradient_cache_chunk_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_two_processes_train_as_one_on_the_joined_batch(train, options):
    (alone,) = train(1, 12, **options)
    check_equal(alone, train(2, 12, **options))


@pytest.mark.slow
def test_a_short_last_batch_on_three_processes_neither_hangs_nor_skews(train):
    # 25 rows in batches of 9 leave 7 for three processes: 3, 2 and 2.
    options = {"dataloader_drop_last": False, "max_steps": 6}
    (alone,) = train(1, 9, **options)
    check_equal(alone, train(3, 9, **options))


@pytest.mark.slow
def test_local_negatives_are_those_of_the_process(train):
    (alone,) = train(1, 12)
    together = train(2, 12, gather_negatives=False)
    assert (together[0]["losses"] - alone["losses"]).abs().max() > 0.1
    for name in together[0]:
        if name != "losses":
            torch.testing.assert_close(together[0][name], together[1][name], msg=name)


@pytest.mark.parametrize("length, processes", [(10, 3), (7, 7), (2, 3), (12, 4)])
def test_parts_cover_everything_once_and_differ_by_at_most_one(length, processes):
    parts = [distributed.part(length, rank, processes) for rank in range(processes)]
    assert [i for part in parts for i in range(length)[part]] == list(range(length))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
