"""Prepares the start of the training benchmarks: rows, their texts, and a folder with the encoder."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from measuring import numbers

from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.tokens import SIDES, side_texts
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.scratch import random_model, train_tokenizer


@dataclass(frozen=True)
class StartingPoint:
    """Rows in CodeSearchNet's columns, their texts (columns `query` and `code`), and an encoder in a folder."""

    rows: Dataset
    texts: Dataset
    profile: EncoderProfile
    folder: Path
    device: str

    def settings(self, dtype: str = "float32") -> dict:
        """The training arguments that all ways share."""
        return {
            "output_dir": str(self.folder / "out"),
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
            "use_cpu": self.device == "cpu",
            "disable_tqdm": True,
            "report_to": "none",
            "save_strategy": "no",
        }


def add_encoder_options(parser: argparse.ArgumentParser, lengths: str = "128,256") -> None:
    """Adds the options that `begin` reads."""
    parser.add_argument("--model", help="folder or Hub name of an encoder (default: random weights of --size)")
    parser.add_argument("--size", default="256x4", help="hidden size x layers of a RoBERTa with random weights")
    parser.add_argument("--lengths", default=lengths, help="tokens of a query and of a function")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def label(arguments: argparse.Namespace) -> str:
    """The encoder and its lengths, for a title."""
    name = Path(arguments.model).name if arguments.model else f"RoBERTa {arguments.size}"
    return f"{name}, query and code {arguments.lengths.replace(',', ' and ')} tokens"


def begin(arguments: argparse.Namespace, folder: str | Path, max_rows: int | None = None) -> StartingPoint:
    """Reads the first `max_rows` rows (default: all), and writes the encoder to `folder` unless it has one."""
    rows = load_folder(arguments.data_dir, ("train",))["train"]
    return begin_with(rows.select(range(min(max_rows or len(rows), len(rows)))), arguments, folder)


def begin_with(rows: Dataset, arguments: argparse.Namespace, folder: str | Path) -> StartingPoint:
    """Does the same with these rows."""
    cosine = EncoderProfile(score_function="cosine", score_scale=20.0)
    query_length, code_length = numbers(arguments.lengths)
    profile = resolve_profile(arguments.model) if arguments.model else cosine
    profile = profile.replace(query_length=query_length, code_length=code_length)
    both = {side: list(side_texts(rows, side, profile)) for side in SIDES}
    if (Path(folder) / "modules.json").exists():
        return StartingPoint(rows, Dataset.from_dict(both), profile, Path(folder), arguments.device)
    torch.manual_seed(0)
    if arguments.model:
        tokenizer, model = load_tokenizer(arguments.model, profile), load_model(arguments.model, profile)
    else:
        tokenizer = train_tokenizer((text for side in SIDES for text in both[side]), profile)
        model = random_model(arguments.size, tokenizer, profile)
    export_encoder(model, tokenizer, profile, folder)
    return StartingPoint(rows, Dataset.from_dict(both), profile, Path(folder), arguments.device)
