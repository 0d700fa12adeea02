"""A tokenizer and a small RoBERTa from nothing, for machines without the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer, Regex, normalizers
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import SetupError

SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
WORD_BORDER = Regex(r"(?<=[a-z0-9])(?=[A-Z])|_+")  # in camelCase and snake_case


def parse_size(from_scratch: str) -> tuple[int, int]:
    """`"256x4"` -> hidden size 256, 4 layers.

    Raises:
        SetupError: not of that form, or a size that no head divides.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", from_scratch)
    if not match or int(match[2]) < 1 or int(match[1]) < 32 or int(match[1]) % 32:
        raise SetupError(
            f"from_scratch={from_scratch!r}: write HIDDENxLAYERS, for example 256x4, with a multiple of 32 as HIDDEN"
        )
    return int(match[1]), int(match[2])


def train_tokenizer(
    texts: Iterable[str], profile: EncoderProfile, vocabulary_size: int = 16384
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`, with RoBERTa's special tokens and those of the prefixes.

    Identifiers are split into words and lower-cased first.
    """
    prefixed = re.findall(r"<[^<>\s]+>", profile.query_prefix + profile.code_prefix)
    special = list(dict.fromkeys([*SPECIAL.values(), *prefixed]))
    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    # `readLines`, `read_lines` and "Read lines" share their tokens: small data does not teach that they are one.
    bpe.normalizer = normalizers.Sequence([normalizers.Replace(WORD_BORDER, " "), normalizers.Lowercase()])
    bpe.train_from_iterator(texts, vocab_size=vocabulary_size, special_tokens=special, show_progress=False)
    tokenizer = bpe._tokenizer
    tokenizer.post_processor = RobertaProcessing(
        (SPECIAL["eos"], tokenizer.token_to_id(SPECIAL["eos"])),
        (SPECIAL["bos"], tokenizer.token_to_id(SPECIAL["bos"])),
    )
    names = {f"{name}_token": token for name, token in SPECIAL.items()}
    extra = [token for token in special if token not in SPECIAL.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **names,
        cls_token=SPECIAL["bos"],
        sep_token=SPECIAL["eos"],
        extra_special_tokens=extra,
        model_max_length=max(profile.query_length, profile.code_length),
    )


def small_roberta(from_scratch: str, tokenizer, profile: EncoderProfile) -> RobertaModel:
    """A RoBERTa with random weights of the size that `from_scratch` names, long enough for the profile."""
    hidden, layers = parse_size(from_scratch)
    longest = max(profile.query_length, profile.code_length + profile.data_flow_length)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // (64 if hidden % 64 == 0 else 32),
        intermediate_size=4 * hidden,
        # With RoBERTa's own 0.02 the first token of a small model says almost nothing of the others, and pooling on it
        # does not learn; a mean over the tokens finds more with it.
        initializer_range=0.02 if profile.pooling == "mean" else hidden**-0.5,
        max_position_embeddings=longest + tokenizer.pad_token_id + 1,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return RobertaModel(config, add_pooling_layer=profile.pooling == "pooler")
