"""Declares the encoder's options: which encoder to load, how to load it, and how it encodes texts."""

from __future__ import annotations

from dataclasses import dataclass

from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.encoders.profiles import DTYPES, PROFILES, SCORE_FUNCTIONS
from soft_trainer.errors import UserError
from soft_trainer.options.spec import check_values, documented, option, unset


def of_profile(help: str, **declared):
    """Declares an option of `train` and `evaluate` whose default comes from the encoder's profile."""
    if "Default:" not in help:
        help += " Default: the encoder's."
    return unset(help, **declared)


@documented
@dataclass
class ModelArguments:
    """Options for the encoder, for the texts that it encodes, and for LoRA.

    A profile setting that is None here keeps the value in the encoder's profile.

    Args:
    OPTIONS

    Raises:
        UserError: a value is invalid, or a LoRA option is set without `lora_r`.
    """

    trust_remote_code: bool = option(
        False,
        "Run code that comes with an encoder or with --estimator_model.",
        results=False,
    )
    attn_implementation: str | None = unset(
        "Attention implementation: eager, sdpa or flash_attention_2. Default: chosen by transformers.",
        results=False,
    )
    dtype: str | None = unset(
        f"Precision of the weights: {', '.join(DTYPES)}. Default: float32.",
        choices=DTYPES,
    )
    lora_r: int | None = unset(
        "Train a LoRA adapter of this rank, such as 16, instead of all weights. Its default learning rate is 1e-4.",
        least=1,
        group="model",
        common=True,
    )
    lora_alpha: int | None = unset("LoRA's alpha. LoRA's output is scaled by alpha / r. Default: 2 x lora_r.", least=1)
    lora_dropout: float | None = unset("Dropout before LoRA. Default: 0.05.", least=0, below=1)
    lora_target_modules: str | None = unset(
        "Modules that get LoRA: comma-separated names, or all-linear. Default: peft's choice for the "
        "architecture, else all-linear."
    )
    model_name_or_path: str | None = unset(
        "Encoder to train: a Hub name, a folder, or 'base' (in the package). Default: microsoft/unixcoder-base.",
        aliases=("model",),
        group="model",
        refers_to="encoder",
        common=True,
    )
    model_revision: str | None = unset("Branch, tag or commit of the encoder on the Hub.")
    from_scratch: str | None = unset(
        "Start from a small RoBERTa of size HIDDENxLAYERS, such as 256x4, and train its tokenizer on the rows.",
        group="model",
        common=True,
    )
    vocabulary_size: int = option(
        16384,
        "Vocabulary size of the tokenizer that --from_scratch trains.",
        least=300,  # the 256 bytes and the special tokens
    )
    profile: str | None = of_profile(f"Encoder profile: {', '.join(PROFILES)}. Default: inferred from the model.")
    pooling: str | None = of_profile(f"How token vectors become one embedding: {', '.join(POOLINGS)}.")
    query_prompt: str | None = of_profile("Text to put before each query, after the encoder's special tokens.")
    code_prompt: str | None = of_profile("Text to put before each function, after the encoder's special tokens.")
    include_prompt: bool | None = of_profile("Include the tokens of prompts and prefixes in pooling. Default: yes.")
    query_length: int | None = of_profile(
        "Maximum number of tokens in a query, including special tokens.", group="model", common=True
    )
    code_length: int | None = of_profile(
        "Maximum number of tokens in a function, including special tokens.", group="model", common=True
    )
    data_flow_length: int | None = of_profile("Number of data-flow nodes after the code tokens (GraphCodeBERT).")
    score_function: str | None = of_profile(f"How two embeddings are scored: {', '.join(SCORE_FUNCTIONS)}.")
    score_scale: float | None = of_profile(
        "Factor for all scores in the loss. With cosine, 20 is common, which is a temperature of 0.05."
    )
    query_columns: str | None = of_profile(
        "Columns that may contain the query, comma-separated. The first one that exists is read."
    )
    code_columns: str | None = of_profile(
        "Columns that may contain the code, comma-separated. The first one that exists is read."
    )

    def __post_init__(self):
        check_values(self)
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if self.lora_r is None and getattr(self, name) is not None:
                raise UserError(f"{name}: has no effect without lora_r; set lora_r=16, for example")
        if not self.from_scratch:
            return
        if self.model_name_or_path:
            raise UserError("from_scratch and model_name_or_path: set only one of them")
        if self.dtype or self.attn_implementation:
            raise UserError("dtype and attn_implementation do not apply with from_scratch; drop them")
        if self.lora_r is not None:
            raise UserError("lora_r: an encoder from scratch has no trained weights to freeze; drop lora_r")
