"""Stores hashes of the pairs that trained an encoder in its folder, so that an evaluation can recognise them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from soft_trainer.data.columns import row_texts, text_column, text_ids
from soft_trainer.data.split import CODE_COLUMNS, QUERY_COLUMNS, Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.files import TRAINED_ROWS, written_aside
from soft_trainer.terminal import print_on_main

_KEY = "pairs"


def pair_hashes(split: Split, profile: EncoderProfile) -> np.ndarray:
    """Hashes the texts of each pair of a split, ignoring white space. Returns uint64[P]."""
    pairs = split.to_pairs()
    query = text_column(pairs, (*QUERY_COLUMNS, *profile.query_columns), "query")
    code = text_column(pairs, (*CODE_COLUMNS, *profile.code_columns), "code")
    texts = []
    for asked, answer in zip(row_texts(pairs, query), row_texts(pairs, code), strict=True):
        texts.append(f"{' '.join(asked.split())}\0{' '.join(answer.split())}")
    return text_ids(texts)


def write_trained_rows(folder: str | Path, split: Split, profile: EncoderProfile) -> None:
    """Writes the hashes of the pairs that trained the encoder in `folder`."""
    with written_aside(Path(folder) / TRAINED_ROWS) as aside:
        save_file({_KEY: np.unique(pair_hashes(split, profile))}, aside)


def warn_of_trained_pairs(sets: Mapping[str, Split], encoder: str, profile: EncoderProfile) -> None:
    """Warns about each evaluation set with pairs that trained the encoder, if its folder lists these."""
    path = Path(encoder) / TRAINED_ROWS
    if not path.is_file():
        return
    trained = load_file(path)[_KEY]
    for name, split in sets.items():
        known = int(np.isin(pair_hashes(split, profile), trained).sum())
        if known:
            pairs = len(split.judgments.pairs())
            print_on_main(
                f"warning: {name}: the encoder was trained on {known:,} of these {pairs:,} pairs, so its figures are "
                "higher than on new queries"
            )
