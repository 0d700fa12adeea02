"""Computes text lengths and duplicates of each split, for the table at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soft_trainer.data.folders import SPLITS
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import SIDES, tokenized
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.system.terminal import table

PAPER_ROWS = {  # Table 6
    "ruby": (24_927, 1_400, 1_261, 4_360),
    "python": (251_820, 13_914, 14_918, 43_827),
    "java": (164_923, 5_183, 10_955, 40_347),
    "javascript": (58_025, 3_885, 3_291, 13_981),
    "php": (241_241, 12_982, 14_014, 52_660),
    "go": (167_288, 7_325, 8_122, 28_120),
}


def data_statistics(splits: Mapping[str, Split], profile: EncoderProfile, tokenizer) -> dict[str, dict]:
    """Computes text lengths, truncation and duplicates of the queries and functions in each split.

    Returns:
        `{split: {"rows": int, "query": {"mean", "p95", "cut", "duplicates"}, "code": {...}}}`. Valid and test have
        only "query", because their corpus is the split "codebase". Lengths are in tokens before truncation, including
        special tokens. `cut` is the fraction of truncated texts. `duplicates` is the number of texts that repeat an
        earlier text.
    """
    read = {}
    corpora = {}
    for name, split in splits.items():
        if name == "train":
            read[name] = dict.fromkeys(SIDES, split.to_pairs())
        else:
            read[name] = {"query": split.queries}
            corpora[split.corpus._fingerprint] = (name, split.corpus)
    for name, corpus in corpora.values():
        _, *part = name.split("-", 1)
        read["-".join(["codebase", *part])] = {"code": corpus}
    statistics: dict[str, dict] = {}
    for name, sides in read.items():
        for side, rows in sides.items():
            statistics.setdefault(name, {"rows": len(rows)})
            tokens = tokenized(rows, side, profile, tokenizer).with_format("numpy")
            lengths = np.asarray(tokens["length"][:])
            statistics[name][side] = {
                "mean": float(lengths.mean()),
                "p95": float(np.percentile(lengths, 95)),
                "cut": float((lengths > getattr(profile, f"{side}_length")).mean()),
                "duplicates": len(rows) - len(np.unique(tokens["text"][:])),
            }
    return statistics


def statistics_table(statistics: dict[str, dict], paper_language: str | None = None, complete: bool = True) -> str:
    """Formats the result of `data_statistics` as a Markdown table.

    Args:
        paper_language: a language of CodeSearchNet. The paper's row counts for this language become a column.
        complete: True if `statistics` covers all splits of the data. The table then also lists missing splits.
    """
    paper = {}
    if paper_language is not None:
        paper = dict(zip(SPLITS, PAPER_ROWS[paper_language], strict=True))
    headers = ["split", "rows", *(["rows in the paper"] if paper else [])]
    for side in SIDES:
        headers += [f"{side} tokens: mean", "95 %", "truncated", f"repeated {side}"]
    rows = []
    for split, values in statistics.items():
        row = [split, values["rows"], *([paper[split]] if paper else [])]
        for own in map(values.get, SIDES):
            shown = own and (f"{own['mean']:.0f}", f"{own['p95']:.0f}", f"{own['cut']:.1%}", own["duplicates"])
            row += shown or [None] * 4
        rows.append(row)
    for split in SPLITS[:3]:
        if complete and "train" in statistics and split not in statistics:
            rows.append([f"{split}: none"] + [None] * (len(headers) - 1))
    return table(headers, rows)
