"""The maximum number of tokens that a model reads."""

from __future__ import annotations

from collections.abc import Mapping

from soft_trainer.errors import UserError

# Models whose positions begin after the id of the padding token, as RoBERTa's do. MPNet's are fixed: they begin at 2.
_AFTER_PADDING = ("roberta", "camembert", "data2vec-text", "ibert", "longformer", "luke", "xmod")


def most_tokens(config: Mapping) -> int | None:
    """Returns the maximum number of tokens that a model reads, None if its configuration sets no limit.

    Args:
        config: the content of `config.json`.
    """
    positions, kind = config.get("max_position_embeddings"), config.get("model_type") or ""
    if not positions or positions < 0:
        return None
    positions = int(positions)
    if kind == "mpnet":
        return positions - 2
    return positions - (config.get("pad_token_id") or 0) - 1 if any(k in kind for k in _AFTER_PADDING) else positions


def check_lengths(config: Mapping, profile) -> None:
    """Refuses a profile whose texts are longer than the model's positions.

    Raises:
        UserError: names the length and the largest valid one.
    """
    most = most_tokens(config)
    for name, length in (
        ("query_length", profile.query_length),
        ("code_length", profile.code_length + profile.data_flow_length),
    ):
        if most is not None and length > most:
            raise UserError(f"{name}={length}: the model reads at most {most} tokens")
