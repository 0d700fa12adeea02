"""Trains tiny encoders, one case after another, in one process or in one of several.

Usage: worker.py FOLDER CASES.json SECONDS. The JSON file maps cases to options. A case that takes longer than SECONDS
ends the process.
"""

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import state
from datasets import Dataset
from transformers import TrainingArguments

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    distributed,
    load_encoder,
)
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.estimators.base import as_array
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.scores import ScoresEstimator
from soft_trainer.options.model import ModelArguments

COMMON = {
    "learning_rate": 1e-2,
    "max_steps": 3,
    "logging_steps": 1,
    "optim": "adamw_torch",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "per_device_eval_batch_size": 8,
}


class ExactInitialModel(InitialModelEstimator):
    """Computes similarities in float64. In float32, a product depends on the number of rows that a process has."""

    def similarity(self, query_rows, code_rows):
        sides = self._queries[as_array(query_rows)], self._codes[self._code_values.rows(code_rows)]
        queries, codes = (torch.from_numpy(np.asarray(side, dtype=np.float64)) for side in sides)
        return queries @ codes.T * self._scale


class RecordingTrainer(SoftInfoNCETrainer):
    """Records the training rows of every step, and sends SIGTERM to this process after `terminated_at` steps."""

    terminated_at = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.__dict__.setdefault("taken", []).append([int(row) for row in inputs.rows])
        if self.state.global_step == self.terminated_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(model, inputs, num_items_in_batch)


def with_scores(rows: Dataset) -> Dataset:
    """Adds three hard negatives to each row, one of which is the function of another row, and scores of most."""
    generator = np.random.default_rng(0)
    negatives = [
        [rows[(row + 5) % len(rows)]["url"], f"def f{row}(): pass", "def g(): pass"] for row in range(len(rows))
    ]
    scores = generator.normal(size=(len(rows), 4))
    scores[generator.random(scores.shape) < 0.2] = np.nan
    return rows.add_column("negatives", negatives).add_column("scores", scores.tolist())


def train(folder: Path, name: str, options: dict, results: Path) -> None:
    """Trains, and writes this process's rows, losses and metrics. The main process also writes the encoder."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    options = COMMON | {"output_dir": str(results / name)} | options
    plain, pool = options.pop("plain", False), options.pop("pool", None)
    terminated_at = options.pop("terminated_at", None)
    options["per_device_train_batch_size"] = options.pop("batch") // world_size
    rows = Dataset.from_list(json.loads((folder / "rows.json").read_text()))
    scored = options.pop("scores", False)
    if scored:
        rows = with_scores(rows)
    lora = options.pop("lora", None)
    estimator = ExactInitialModel(cache_dir=None) if options.pop("initial_model", False) else BM25Estimator()
    if scored:
        estimator = ScoresEstimator()
    encoder = load_encoder(folder / "encoder", device="cpu")
    if lora:
        torch.manual_seed(0)
        add_lora(encoder.model, ModelArguments(**lora))
    trainer = RecordingTrainer(
        model=encoder.model,
        args=(TrainingArguments if plain else SoftInfoNCETrainingArguments)(**options),
        train_dataset=rows,
        eval_dataset=rows.select(range(9)),
        codebase=rows.select(range(pool or len(rows))),
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        callbacks=[EstimatorCallback(estimator)],
    )
    if rank:
        trainer.terminated_at = terminated_at
    try:
        trainer.train()
    except SystemExit as end:
        found = {"code": end.code, "steps": trainer.state.global_step}
        (results / f"{name}-{rank}.json").write_text(json.dumps(found))
        return
    metrics = trainer.evaluate() if pool else {}
    trainer.save_model()
    found = {
        "rows": trainer.taken,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "false negatives": counted(trainer, "false_negatives_masked") + counted(trainer, "extra_positives"),
        "metrics": metrics,
        "type": trainer.accelerator.distributed_type.value,
    }
    (results / f"{name}-{rank}.json").write_text(json.dumps(found))


def counted(trainer, name: str) -> list[int]:
    """Returns the values of a number in a trainer's log."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def shard_on_cpus() -> None:
    """Makes `accelerate` use FSDP's plugin on CPUs; by default, it uses the plugin only on GPUs."""
    start = state.PartialState.__init__

    def start_as_on_gpus(self, *arguments, **options) -> None:
        start(self, *arguments, **options)
        if self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = start_as_on_gpus


def main() -> None:
    folder, cases, limit = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), float(sys.argv[3])
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_cpus()
    for name, options in cases.items():
        sys.stderr.write(f"case {name}\n")
        faulthandler.dump_traceback_later(limit, exit=True)
        train(folder, name, options, Path(sys.argv[2]).parent)
        faulthandler.cancel_dump_traceback_later()
    distributed.close()


if __name__ == "__main__":
    main()
