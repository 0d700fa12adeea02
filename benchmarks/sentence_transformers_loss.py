"""Compares training by a script of sentence-transformers, by that script with two changed lines, and by our trainer.

    python benchmarks/sentence_transformers_loss.py --data_dir DIR --model ENCODER --output_dir outputs/losses

All runs have the same batches (the rows shuffled once, then in order), no dropout, and texts of 64 tokens. The table
has the loss of every fifth step, then the time of a step. The last lines give the difference between our loss inside
sentence-transformers and our trainer. If matplotlib is installed, `curves.png` in the output folder shows the
losses.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from datasets import Dataset
from measuring import machine, parser_of, set_up
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    UserError,
    load_encoder,
)
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.files import write_json
from soft_trainer.sentence_transformers import SoftInfoNCELoss, with_rows
from soft_trainer.terminal import table

LENGTH = 64
EVERY = 5
COMMON = {
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "optim": "adamw_torch",
}
NAMES = {
    "mnrl": "MultipleNegativesRankingLoss",
    "loss": "SoftInfoNCELoss",
    "trainer": "SoftInfoNCETrainer",
}


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout to 0, so that two runs compute the same."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def in_order(dataset, batch_size: int, drop_last: bool, **others) -> BatchSampler:
    """The batches of a data set in its order."""
    return BatchSampler(SequentialSampler(dataset), batch_size, drop_last)


def script(arguments, train_dataset: Dataset, soft: bool) -> SentenceTransformerTrainer:
    """A script of sentence-transformers; with `soft` the two lines that make it Soft-InfoNCE."""
    model = SentenceTransformer(arguments.model, device="cpu")
    model.max_seq_length = LENGTH
    without_dropout(model)
    loss = MultipleNegativesRankingLoss(model)
    if soft:
        train_dataset = with_rows(train_dataset)
        loss = SoftInfoNCELoss(model, BM25Estimator(), train_dataset)
    options = COMMON | {"output_dir": str(arguments.output_dir / "run"), "max_steps": arguments.steps}
    args = SentenceTransformerTrainingArguments(batch_sampler=in_order, **options)
    return SentenceTransformerTrainer(model, args, train_dataset, loss=loss)


def our_trainer(arguments, train_dataset: Dataset) -> SoftInfoNCETrainer:
    """The same run by our trainer."""
    encoder = load_encoder(arguments.model, device="cpu")
    without_dropout(encoder.model)
    options = COMMON | {"output_dir": str(arguments.output_dir / "run"), "max_steps": arguments.steps}
    return SoftInfoNCETrainer(
        model=encoder.model,
        args=SoftInfoNCETrainingArguments(
            train_sampling_strategy="sequential", warmup_steps=0, eval_strategy="no", **options
        ),
        train_dataset=train_dataset.rename_columns({"anchor": "docstring", "positive": "code"}),
        processing_class=encoder.tokenizer,
        encoder=encoder.profile.replace(query_length=LENGTH, code_length=LENGTH),
        callbacks=[EstimatorCallback(BM25Estimator())],
    )


def curve(name: str, arguments, train_dataset: Dataset) -> dict:
    """The losses of a run and the seconds of a step, from the output folder if the run was made before."""
    path = arguments.output_dir / f"{name}.json"
    if not path.exists():
        trainer = (
            our_trainer(arguments, train_dataset)
            if name == "trainer"
            else script(arguments, train_dataset, soft=name == "loss")
        )
        start = time.process_time()
        trainer.train()
        seconds = (time.process_time() - start) / arguments.steps
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        write_json(path, {"losses": losses, "seconds": seconds})
    return json.loads(path.read_text())


def draw(curves: dict[str, dict], path: Path) -> None:
    """Draws the losses, unless matplotlib is missing."""
    try:
        figure = new_figure(6, 3.5)
    except UserError as error:
        print(error)
        return
    axes = figure.subplots()
    for name, color, style in zip(curves, COLORS, ("-", "-", ":"), strict=False):
        losses = curves[name]["losses"]
        axes.plot(range(1, len(losses) + 1), losses, style, color=color, label=NAMES[name], linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    save_png(figure, path)


def main() -> None:
    """Makes the runs and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="an encoder of sentence-transformers: a Hub name or a folder")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    rows = load_folder(arguments.data_dir, splits=("train",))["train"].shuffle(seed=1)
    train_dataset = Dataset.from_dict({"anchor": rows["docstring"][:], "positive": rows["code"][:]})
    curves = {name: curve(name, arguments, train_dataset) for name in NAMES}
    steps = range(EVERY - 1, arguments.steps, EVERY)
    lines = [[step + 1, *(curves[name]["losses"][step] for name in NAMES)] for step in steps]
    print(machine(), end="\n\n")
    print(table(["step", *NAMES.values()], lines, floats=".5f"), end="\n\n")
    seconds = ["CPU s per step", *(curves[name]["seconds"] for name in NAMES)]
    print(table(["", *NAMES.values()], [seconds], floats=".2f"))
    both = zip(curves["loss"]["losses"], curves["trainer"]["losses"], strict=True)
    differences = [abs(ours - trainers) for ours, trainers in both]
    print(f"\nSoftInfoNCELoss against SoftInfoNCETrainer: the first step differs by {differences[0]:.1e}, the")
    print(f"largest difference in {arguments.steps} steps is {max(differences):.1e}")
    draw(curves, arguments.output_dir / "curves.png")


if __name__ == "__main__":
    main()
