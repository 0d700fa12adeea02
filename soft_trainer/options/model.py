"""Declares the encoder's options: its name, how it is loaded and how it reads texts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from soft_trainer.encoders.profiles import DTYPES, POOLINGS, PROFILES, SCORE_FUNCTIONS
from soft_trainer.errors import UserError
from soft_trainer.options.declared import ReadIf, check_values, option, unset
from soft_trainer.options.removed import RefusesRemoved

# None means the value in the encoder's profile. `soft-trainer evaluate` has these options too.
of_profile = functools.partial(unset, evaluation=True)
FROM_SCRATCH = ReadIf(lambda o: o.from_scratch is not None, "only from_scratch reads it")
PRETRAINED = ReadIf(lambda o: o.from_scratch is None, "from_scratch loads no encoder")


@dataclass
class ModelArguments(RefusesRemoved):
    """Options for the encoder, how it reads texts, and a LoRA adapter to train instead of all its weights.

    A profile setting that is None is taken from the encoder's profile.

    Raises:
        UserError: a value is invalid, or another LoRA option is given without `lora_r`.
    """

    trust_remote_code: bool = option(
        False, "Run an encoder's own code, --estimator_model's too.", results=False, evaluation=True, mteb=True
    )
    attn_implementation: str | None = unset(
        "Attention of the encoder: eager, sdpa or flash_attention_2. Default: transformers chooses.",
        results=False,
        evaluation=True,
    )
    dtype: str | None = unset(
        f"Precision of the weights: {', '.join(DTYPES)}. Default: float32.", choices=DTYPES, evaluation=True
    )
    lora_r: int | None = unset(
        "Train a LoRA adapter of this rank, 16 for example, instead of all weights. It needs a larger learning rate, "
        "about 1e-4.",
        least=1,
        group="model",
        common=True,
    )
    lora_alpha: int | None = unset("LoRA's factor alpha / r. Default: 2 x lora_r.", least=1)
    lora_dropout: float | None = unset("Dropout before LoRA. Default: 0.05.", least=0, below=1)
    lora_target_modules: str | None = unset(
        "Modules that get LoRA: comma-separated names, or all-linear. Default: peft's choice for the "
        "architecture, else all-linear."
    )
    model_name_or_path: str | None = unset(
        "Encoder to train: Hub name or folder. Default: microsoft/unixcoder-base.",
        aliases=("model",),
        group="model",
        common=True,
    )
    model_revision: str | None = unset(
        "Branch, tag or commit of the encoder on the Hub.", read_if=PRETRAINED, evaluation=True, mteb=True
    )
    from_scratch: str | None = unset(
        "HIDDENxLAYERS, for example 256x4: start a small RoBERTa with a tokenizer trained on the training rows.",
        group="model",
        common=True,
    )
    vocabulary_size: int = option(
        16384,
        "Tokens of the tokenizer that --from_scratch trains.",
        least=300,  # the 256 bytes and the special tokens
        read_if=FROM_SCRATCH,
    )
    profile: str | None = of_profile(f"Encoder profile: {', '.join(PROFILES)}. Default: known from the model.")
    pooling: str | None = of_profile(f"One embedding from token vectors: {', '.join(POOLINGS)}.")
    query_prompt: str | None = of_profile("Text before every query, after special tokens that the encoder needs.")
    code_prompt: str | None = of_profile("Text before every code, after special tokens that the encoder needs.")
    include_prompt: bool | None = of_profile("Pool the tokens of prompts and prefixes too. Default: yes.")
    query_length: int | None = of_profile(
        "Maximum tokens of a query, special tokens included.", group="model", common=True
    )
    code_length: int | None = of_profile(
        "Maximum tokens of a code, special tokens included.", group="model", common=True
    )
    data_flow_length: int | None = of_profile("Data-flow nodes after the code tokens (GraphCodeBERT).")
    score_function: str | None = of_profile(f"Score of two embeddings: {', '.join(SCORE_FUNCTIONS)}.")
    score_scale: float | None = of_profile("Factor on every score; 20 is usual with cosine.")
    query_columns: str | None = of_profile(
        "Columns that may hold the query, comma-separated; the first there is read."
    )
    code_columns: str | None = of_profile("Columns that may hold the code, comma-separated; the first there is read.")

    def __post_init__(self):
        check_values(self)
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if self.lora_r is None and getattr(self, name) is not None:
                raise UserError(f"{name}: has no meaning without --lora_r, 16 for example")
