"""Matryoshka embeddings: the first dimensions of an embedding are a shorter embedding."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError


def parse_dims(value: str | Sequence[int] | None) -> tuple[int, ...]:
    """Parses dimensions such as "768,256,64", or numbers; returns them largest first, () for None.

    Raises:
        UserError: they are not distinct whole numbers above 0.
    """
    words = [] if value is None else value.split(",") if isinstance(value, str) else value
    try:
        dims = [int(word) if isinstance(word, str) else operator.index(word) for word in words]
    except (TypeError, ValueError):
        dims = [0]
    if min(dims, default=1) < 1 or len(set(dims)) < len(dims):
        raise UserError(
            f"matryoshka_dims={value}: must be different whole numbers above 0, by comma, such as 768,256,64"
        )
    return tuple(sorted(dims, reverse=True))


def check_dims(dims: Sequence[int], hidden_size: int, option: str = "matryoshka_dims") -> None:
    """Refuses dimensions that an embedding of `hidden_size` does not have; the message names `option`.

    Raises:
        UserError: names the smallest and largest valid number.
    """
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= hidden_size:
            raise UserError(
                f"{option}={dim!r}: must be a whole number from 1 to {hidden_size}, the encoder's dimensions"
            )


def shorten(profile: EncoderProfile, embeddings: Tensor, dim: int | None) -> Tensor:
    """Truncates embeddings Tensor[n, d] to their first `dim` dimensions, and normalises them if the profile does.

    None keeps all dimensions. Cosine scores normalise by definition.
    """
    if dim is None or dim >= embeddings.shape[-1]:
        return embeddings
    embeddings = embeddings[..., :dim]
    return F.normalize(embeddings, dim=-1) if profile.normalize else embeddings
