"""Exchanges data with other processes on a CPU, and counts the collectives. Usage: exchanging.py FOLDER"""

import contextlib
import faulthandler
import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    distributed,
    load_encoder,
)
from soft_trainer.estimators.neighbours import Excluded, cached_neighbours, nearest_rows

COLLECTIVES = (
    "all_gather all_gather_single all_gather_into_tensor all_gather_object all_reduce broadcast broadcast_object_list "
    "barrier gather gather_object reduce scatter send recv all_to_all"
).split()


class Counted:
    """Counts the collectives that run in `with` blocks."""

    def __init__(self):
        self.calls = Counter()
        self._on = False
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name, function):
        def call(*args, **kwargs):
            self.calls[name] += self._on
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def on(self):
        self._on, self.calls = True, Counter()
        yield
        self._on = False


def exchanges(counted: Counted, rank: int, processes: int) -> dict:
    """Gathers tensors and numbers of different lengths."""
    found = {}
    whole = torch.arange(2.0 * 11).view(11, 2)
    local = whole[distributed.shard(11, rank, processes)]
    with counted.on():
        found["gathered"] = distributed.gather(local).tolist()
    found["gathering"] = counted.calls
    sizes = [len(whole[distributed.shard(11, each, processes)]) for each in range(processes)]
    leaf = local.clone().requires_grad_()
    with counted.on():
        everything = distributed.gather_with_gradient(leaf, sizes)
        (everything * whole).sum().backward()
    found["gradient"] = leaf.grad.tolist()
    found["with gradient"] = counted.calls
    exchange = distributed.NumberExchange()
    found["numbers"] = []
    for number in (3, 3, 1, 5, 4):
        with counted.on():
            gathered = exchange.gather(torch.full((number - (rank == 0),), rank))
        found["numbers"].append(([each.tolist() for each in gathered], sum(counted.calls.values())))
    return found


def neighbours(folder: Path, rank: int) -> dict:
    """Finds neighbours together, and alone."""
    generator = np.random.default_rng(0)
    queries, codes = (generator.standard_normal((33, 8)).astype(np.float32) for _ in range(2))
    excluded = Excluded(np.arange(33))
    asked = []

    def build(rows=None):
        asked.append(rows)
        return nearest_rows(queries, codes, 4, excluded, rows=rows)

    found = {"alone": build().rows.tolist()}
    for name, cache in (("together", folder / "cache"), ("again", folder / "cache"), ("in memory", None)):
        asked.clear()
        nearest = cached_neighbours(cache, [queries, codes], 4, build, shared=33)
        found[name] = (nearest.rows.tolist(), sum(map(len, asked)))
    return found


def steps(folder: Path, counted: Counted) -> dict:
    """Trains a few steps, and counts the collectives of each."""
    rows = Dataset.from_list(json.loads((folder / "rows.json").read_text()))
    encoder = load_encoder(folder / "encoder", device="cpu")

    class Counting(SoftInfoNCETrainer):
        taken = []

        def training_step(self, *args, **kwargs):
            with counted.on():
                loss = super().training_step(*args, **kwargs)
            self.taken.append(dict(counted.calls))
            return loss

    args = SoftInfoNCETrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        alpha=0.5,
    )
    trainer = Counting(
        encoder.model,
        args,
        rows,
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        callbacks=[EstimatorCallback(BM25Estimator())],
    )
    trainer.train()
    return {"steps": trainer.taken}


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    counted = Counted()
    trained = steps(folder, counted)  # the trainer makes the process group
    found = exchanges(counted, rank, processes) | {"neighbours": neighbours(folder, rank), "trained": trained}
    (folder / f"{processes}-{rank}.json").write_text(json.dumps(found))
    distributed.close()


if __name__ == "__main__":
    main()
