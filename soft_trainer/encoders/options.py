"""Options of a pretrained encoder: the code, the attention and the precision that it is loaded with."""

from __future__ import annotations

from dataclasses import dataclass, field

from soft_trainer.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class PretrainedOptions:
    """The way in which a pretrained encoder is loaded.

    Raises:
        UserError: a value that is none of those named here.
    """

    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code that comes with an encoder, of --estimator_model too."}
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention of the encoder: eager, sdpa or flash_attention_2. Default: transformers chooses."
        },
    )
    dtype: str | None = field(
        default=None,
        metadata={"help": f"Precision of the weights: {', '.join(DTYPES)}. Default: float32, see --bf16 for speed."},
    )

    def __post_init__(self):
        check_dtype(self.dtype)


def check_dtype(dtype: str | None) -> None:
    """Refuses a precision that weights cannot have.

    Raises:
        UserError: names those that they can have.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
