"""Computes losses and gradients of a sentence-transformers model, in one process or in one of several.

Usage: st_worker.py FOLDER RESULTS. FOLDER contains the encoder, and the data set as tuples.json.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from soft_trainer import BM25Estimator
from soft_trainer.sentence_transformers import (
    CachedSoftInfoNCELoss,
    SentenceTransformerEstimator,
    SoftInfoNCELoss,
    with_rows,
)
from soft_trainer.system import distributed

ROWS = [3, 0, 22, 9, 1, 23, 14, 5]  # the duplicates are on different processes
DISTILLED = {"distill_weight": 0.5, "distill_temperature": 3.0}
CASES = {
    "plain": (SoftInfoNCELoss, 4, {}),
    "unequal": (SoftInfoNCELoss, 5, {"false_negatives": "positives"}),
    "distilled": (SoftInfoNCELoss, 5, DISTILLED),
    "cached_distilled": (CachedSoftInfoNCELoss, 4, DISTILLED | {"mini_batch_size": 3}),
    "cached": (CachedSoftInfoNCELoss, 4, {"mini_batch_size": 3, "weighting": "positive_aware"}),
}


def in_order(dataset, batch_size, drop_last, **others):
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def load(folder: Path) -> tuple[SentenceTransformer, Dataset]:
    """Loads the model without dropout, in float64, and the training rows."""
    model = SentenceTransformer(str(folder / "encoder"), device="cpu").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, with_rows(Dataset.from_list(json.loads((folder / "tuples.json").read_text())))


def step(folder: Path, name: str, rank: int, world_size: int) -> dict:
    """Computes this process's loss, and the gradients averaged over all processes."""
    kind, first, options = CASES[name]
    model, dataset = load(folder)
    if "distill_weight" in options:
        estimator = SentenceTransformerEstimator(batch_size=5)
    else:
        estimator = BM25Estimator(document_column="code_tokens")
    loss = kind(model, estimator, dataset, gather_across_devices=True, **options)
    rows = [ROWS, ROWS[:first], ROWS[first:]][0 if world_size == 1 else rank + 1]
    batch = dataset.select(rows)
    features = [model.preprocess(batch[column][:]) for column in batch.column_names if column != "label"]
    model.train()
    if world_size > 1:
        loss.model = DistributedDataParallel(model)
    value = loss(features, torch.tensor(batch["label"][:]))
    value.backward()
    gradients = {key: parameter.grad.flatten()[:50].tolist() for key, parameter in model.named_parameters()}
    return {"loss": value.item(), "gradients": gradients}


def run(folder: Path, output: Path, world_size: int) -> list[float]:
    """Trains with `SentenceTransformerTrainer` and weights from the initial model, and returns the logged losses."""
    model, dataset = load(folder)
    options = {"per_device_train_batch_size": 8 // world_size, "max_steps": 3, "logging_steps": 1, "use_cpu": True}
    options |= {"learning_rate": 1e-2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = SentenceTransformerTrainingArguments(output_dir=str(output), batch_sampler=in_order, **options)
    estimator = SentenceTransformerEstimator(batch_size=5)
    loss = SoftInfoNCELoss(model, estimator, dataset, gather_across_devices=True, weighting="positive_aware")
    trainer = SentenceTransformerTrainer(model, args, dataset, loss=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path, results: Path) -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # shows where a process hangs
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    found = {name: step(folder, name, rank, world_size) for name in CASES}
    found["trainer"] = run(folder, results / "run", world_size)
    (results / f"{world_size}-{rank}.json").write_text(json.dumps(found))
    distributed.close()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
