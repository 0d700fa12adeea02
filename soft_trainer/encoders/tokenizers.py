"""Prepares tokenizers for training: special tokens of prefixes, a padding token, truncation that keeps the prompt."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.errors import UserError


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, profile: EncoderProfile) -> None:
    """Adapts a tokenizer to `profile`: prefix tokens, padding token, side of padding and truncation; adds no id.

    Raises:
        UserError: the vocabulary lacks a prefix token, there is no token to pad with, or a prompt fills the length.
    """
    register_prefix_tokens(tokenizer, profile)
    add_padding_token(tokenizer)
    # Absolute positions count the padding on the left too. The saved tokenizer pads on the right in every library.
    tokenizer.padding_side = "right"
    for side in ("query", "code"):
        prefix, length = getattr(profile, f"{side}_prefix"), getattr(profile, f"{side}_length")
        if not prefix:
            continue
        # Truncation on the left would remove the prompt. The saved tokenizer also truncates on the right.
        tokenizer.truncation_side = "right"
        tokens = len(tokenizer(prefix, verbose=False)["input_ids"])
        if tokens >= length:
            raise UserError(
                f"{side}_prompt: its {tokens} tokens (special tokens included) leave no room for a {side} in "
                f"{side}_length={length}: shorten it, or set {side}_length higher"
            )


def add_padding_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer without a padding token another one to pad with, usually the end token.

    Every model gets an attention mask, so padding has no effect on embeddings, and the vocabulary keeps its size.

    Raises:
        UserError: the tokenizer has no special tokens.
    """
    if tokenizer.pad_token_id is not None:
        return
    token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token or tokenizer.bos_token
    if token is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: no padding token, and no special token to take in its "
            "place; set tokenizer.pad_token to an entry of its vocabulary"
        )
    tokenizer.pad_token = token


def register_prefix_tokens(tokenizer: PreTrainedTokenizerBase, profile: EncoderProfile) -> None:
    """Makes every `<token>` of the profile's prefixes a special token, with the id that the vocabulary gives it.

    A tag that the vocabulary lacks stays text, unless the named profile needs it.

    UniXcoder's `<encoder-only>` is an ordinary entry of its vocabulary, which byte-level BPE never reaches from text.
    No id is added, so the model keeps its size.

    Raises:
        UserError: the vocabulary lacks an entry that the named profile needs.
    """
    needed = PROFILES[profile.name].prefix_tokens if profile.name in PROFILES else ()
    for token in profile.prefix_tokens:
        if token in tokenizer.all_special_tokens:
            continue
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            if token not in needed:
                continue
            raise UserError(
                f"the prefix of profile {profile.name!r} has {token}, which the vocabulary of "
                f"{tokenizer.name_or_path or 'this tokenizer'} lacks: choose the profile that fits the encoder"
            )
        tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)
