"""Matryoshka embeddings: the first dimensions of an embedding are a shorter embedding."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError


def parse_dims(value: str | Sequence[int] | None) -> tuple[int, ...]:
    """Reads dimensions such as "768,256,64", or numbers; returns them with the largest first, () for None.

    Raises:
        UserError: not a whole number, a number below 1, or one that is there twice.
    """
    words = [] if value is None else value.split(",") if isinstance(value, str) else value
    try:
        dims = [_whole_number(word) for word in words]
    except (TypeError, ValueError):
        raise UserError(
            f"matryoshka_dims={value}: whole numbers separated by commas are expected, such as 768,256,64"
        ) from None
    for dim in dims:
        if dim < 1:
            raise UserError(f"matryoshka_dims={value}: {dim} is not a number of dimensions, which is 1 or more")
        if dims.count(dim) > 1:
            raise UserError(f"matryoshka_dims={value}: {dim} is there twice")
    return tuple(sorted(dims, reverse=True))


def _whole_number(value) -> int:
    """Reads a number or a word; a boolean or a fraction is no number of dimensions."""
    if isinstance(value, bool):
        raise TypeError(value)
    return int(value) if isinstance(value, str) else operator.index(value)


def check_dims(dims: Sequence[int], hidden_size: int, option: str = "matryoshka_dims") -> None:
    """Refuses dimensions that an embedding of `hidden_size` does not have; `option` names them.

    Raises:
        UserError: names the smallest and the largest that work.
    """
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise UserError(f"{option}={dim!r}: must be a whole number from 1 to {hidden_size}")
        if dim < 1:
            raise UserError(f"{option}={dim}: must be 1 or more")
        if dim > hidden_size:
            raise UserError(f"{option}={dim}: the embeddings of this encoder have {hidden_size} dimensions")


def shorten(profile: EncoderProfile, embeddings: Tensor, dim: int | None) -> Tensor:
    """Cuts embeddings Tensor[n, d] to their first `dim` dimensions, normalised anew if the profile normalises.

    None cuts nothing. Cosine scores normalise on their own.
    """
    if dim is None or dim >= embeddings.shape[-1]:
        return embeddings
    embeddings = embeddings[..., :dim]
    return F.normalize(embeddings, dim=-1) if profile.normalize else embeddings
