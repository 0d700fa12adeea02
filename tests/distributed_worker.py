"""Trains the tiny encoder in float64 for some steps and writes its losses, weights and metrics: one of N processes.

torchrun --nproc_per_node N tests/distributed_worker.py OPTIONS.json OUTPUT.safetensors
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import PAIRS, make_row
from datasets import Dataset
from safetensors.torch import save_file

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    MixtureEstimator,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    TrainedModelEstimator,
    distributed,
)
from soft_trainer.encoders.loading import load_encoder


def main(options: dict, output: str) -> None:
    torch.set_num_threads(1)
    encoder = load_encoder(options.pop("encoder"), device="cpu")
    estimators = {
        "bm25": BM25Estimator,
        "trained_model": lambda: TrainedModelEstimator(options["folder"] + "/encoder", cache_dir=options["folder"]),
    }
    chosen = [estimators[name]() for name in options.pop("estimator").split("+")]
    estimator = chosen[0] if len(chosen) == 1 else MixtureEstimator(chosen)
    folder = options.pop("folder")
    # Two rows with one query make a duplicate; dropout is off so that every split of a batch computes the same.
    pairs = [*PAIRS, (PAIRS[0][0], "def another(xs): return sorted(xs)")]
    rows = Dataset.from_list([make_row(query, code, number) for number, (query, code) in enumerate(pairs)])
    for module in encoder.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    encoder.model.config._attn_implementation = "eager"
    encoder.model.config.attention_probs_dropout_prob = 0.0
    trainer = SoftInfoNCETrainer(
        model=encoder.model.double(),
        args=SoftInfoNCETrainingArguments(
            output_dir=folder, use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True, **options
        ),
        train_dataset=rows,
        eval_dataset=rows,
        codebase=rows,
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        callbacks=[EstimatorCallback(estimator)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    values = {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    values["losses"] = torch.tensor(losses, dtype=torch.float64)
    values["mrr"] = torch.tensor([metrics["eval_mrr"]], dtype=torch.float64)
    save_file(values, f"{output}.{distributed.world()[0]}")
    distributed.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
