"""What differs between encoders: one row of a table each, no subclasses."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError

POOLINGS = ("mean", "cls", "pooler")
SCORE_FUNCTIONS = ("dot", "cosine")
PROFILE_FILE = "soft_trainer.json"


@dataclass(frozen=True)
class EncoderProfile:
    """How texts become token ids, token vectors one embedding, and two embeddings a score.

    Args:
        name: a key of `PROFILES`, or "auto" for any other encoder.
        pooling: "mean" over the tokens, "cls" (first token) or "pooler" (the model's `pooler_output`).
        normalize: scale embeddings to length one.
        query_prefix, code_prefix: text put before every query or code, special tokens included.
        query_length, code_length: tokens kept on each side, special tokens included.
        data_flow_length: data-flow nodes that follow the code tokens (GraphCodeBERT), 0 for none.
        score_function: "dot" or "cosine".
        score_scale: factor on every score (the inverse of a softmax temperature).
        query_columns, code_columns: columns to read the text from, the first that a data set has; a list of tokens
            is joined by one space.

    Raises:
        UserError: a value outside those named here.
    """

    name: str = "auto"
    pooling: str = "mean"
    normalize: bool = False
    query_prefix: str = ""
    code_prefix: str = ""
    query_length: int = 128
    code_length: int = 256
    data_flow_length: int = 0
    score_function: str = "dot"
    score_scale: float = 1.0
    query_columns: tuple[str, ...] = ("docstring_tokens", "docstring")
    code_columns: tuple[str, ...] = ("code_tokens", "code")

    def __post_init__(self):
        for field, allowed in (("pooling", POOLINGS), ("score_function", SCORE_FUNCTIONS)):
            if getattr(self, field) not in allowed:
                raise UserError(f"{field}={getattr(self, field)!r}: use one of {', '.join(allowed)}")
        if min(self.query_length, self.code_length) < 3 or self.data_flow_length < 0:
            raise UserError(
                f"query_length={self.query_length}, code_length={self.code_length}, "
                f"data_flow_length={self.data_flow_length}: lengths are at least 3 tokens, data flow at least 0"
            )
        if not self.score_scale > 0:
            raise UserError(f"score_scale={self.score_scale}: must be above 0")

    def replace(self, **changes) -> EncoderProfile:
        """A copy with the values in `changes` that are not None."""
        return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})

    def save(self, folder: str | Path) -> None:
        """Write the profile beside a model, for `EncoderProfile.load`."""
        path = Path(folder) / PROFILE_FILE
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        aside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> EncoderProfile:
        """Read the profile that `save` wrote at `path` (the file, not the folder)."""
        values = json.loads(Path(path).read_text())
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


PROFILES = {
    "codebert": EncoderProfile("codebert", pooling="pooler", query_length=200, code_length=200),
    "graphcodebert": EncoderProfile(
        "graphcodebert", pooling="pooler", data_flow_length=64, code_columns=("original_string", "code")
    ),
    "unixcoder": EncoderProfile(
        "unixcoder", pooling="mean", query_prefix="<encoder-only></s>", code_prefix="<encoder-only></s>"
    ),
    "auto": EncoderProfile(),
}
