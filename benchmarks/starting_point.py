"""Prepares the start of the training benchmarks: rows, their texts, and a folder with the encoder."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from measuring import numbers
from transformers import AutoConfig, AutoModel

from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.tokens import SIDES, encoder_texts
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.scratch import random_model, train_tokenizer

# Shapes of published encoders by name; "NAMExLAYERS" is such an encoder with random weights. For these, every text is
# repeated until it has the maximum length.
BIDIRECTIONAL = {"hidden_size": 768, "num_attention_heads": 12}
SHAPES = {
    "bert": ("bert", BIDIRECTIONAL | {"intermediate_size": 3072}),
    "modernbert": ("modernbert", BIDIRECTIONAL | {"intermediate_size": 1152}),
    "window": ("modernbert", BIDIRECTIONAL | {"intermediate_size": 1152}),
    "qwen3": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}


@dataclass(frozen=True)
class StartingPoint:
    """Rows in CodeSearchNet's columns, their texts (columns `query` and `code`), and an encoder in a folder."""

    rows: Dataset
    texts: Dataset
    profile: EncoderProfile
    folder: Path
    device: str

    def settings(self, dtype: str = "float32") -> dict:
        """Returns the training arguments that all ways share."""
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
    parser.add_argument(
        "--size",
        default="256x4",
        help=f"hidden size x layers of a RoBERTa with random weights, or one of {', '.join(SHAPES)} x layers",
    )
    parser.add_argument("--lengths", default=lengths, help="tokens of a query and of a function")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def label(arguments: argparse.Namespace) -> str:
    """Formats the encoder and its lengths, for a title."""
    name = Path(arguments.model).name if arguments.model else f"random weights {arguments.size}"
    return f"{name}, query and code {arguments.lengths.replace(',', ' and ')} tokens"


def begin(arguments: argparse.Namespace, folder: str | Path, max_rows: int | None = None) -> StartingPoint:
    """Reads the first `max_rows` rows (default: all), and writes the encoder to `folder` unless it has one."""
    rows = load_folder(arguments.data_dir, ("train",))["train"]
    rows = rows.select(range(min(max_rows or len(rows), len(rows))))
    cosine = EncoderProfile(score_function="cosine", score_scale=20.0)
    query_length, code_length = numbers(arguments.lengths)
    profile = resolve_profile(arguments.model) if arguments.model else cosine
    profile = profile.replace(query_length=query_length, code_length=code_length)
    filled = not arguments.model and arguments.size.split("x")[0] in SHAPES
    if filled:
        rows = rows.select(range(min(len(rows), 64))).map(partial(_filled, tokens=max(query_length, code_length)))
    both = {side: list(encoder_texts(rows, side, profile)) for side in SIDES}
    if (Path(folder) / "modules.json").exists():
        return StartingPoint(rows, Dataset.from_dict(both), profile, Path(folder), arguments.device)
    torch.manual_seed(0)
    if arguments.model:
        tokenizer, model = load_tokenizer(arguments.model, profile), load_model(arguments.model, profile)
    else:
        tokenizer = train_tokenizer((text for side in SIDES for text in both[side]), profile)
        if filled:
            model = _shaped(arguments.size, tokenizer, profile)
        else:
            model = random_model(arguments.size, tokenizer, profile)
    export_encoder(model, tokenizer, profile, folder)
    return StartingPoint(rows, Dataset.from_dict(both), profile, Path(folder), arguments.device)


def _filled(row: dict, tokens: int) -> dict:
    """Repeats the texts of a row until each has at least so many tokens."""
    repeated = {}
    for name in ("docstring", "code"):
        repeated[name] = f"{row[name]}\n" * -(-8 * tokens // max(len(row[name]), 1))
    for name in ("docstring_tokens", "code_tokens"):
        repeated[name] = list(row[name]) * -(-tokens // max(len(row[name]), 1))
    return repeated


def _shaped(size: str, tokenizer, profile: EncoderProfile):
    """Makes an encoder of a published shape with random weights."""
    shape, layers = size.split("x")
    layers = int(layers)
    kind, settings = SHAPES[shape]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")}
    longest = max(profile.query_length, profile.code_length)
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": layers, "max_position_embeddings": longest}
    if shape == "window":  # no layer sees the whole text
        sizes["layer_types"] = ["sliding_attention"] * layers
    config = AutoConfig.for_model(kind, **settings, **sizes, **ids)
    return AutoModel.from_config(config)
