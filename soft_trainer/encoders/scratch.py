"""Creates a tokenizer and a small encoder with random weights, without downloading anything."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from huggingface_hub.constants import HF_HOME
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import RobertaProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static_torch import WORD_BORDER, static_model
from soft_trainer.errors import UserError
from soft_trainer.system.files import write_text
from soft_trainer.system.fingerprints import fingerprint, keep_files, kept_files

SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
TOKENIZERS = Path(HF_HOME) / "soft_trainer" / "tokenizers"

logger = logging.getLogger(__name__)


def parse_size(from_scratch: str) -> tuple[int, int]:
    """Parses `"256x4"` as a hidden size of 256 and 4 layers.

    Raises:
        UserError: the format is wrong, or the hidden size is not a multiple of 32, the size of one head.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", from_scratch)
    hidden, layers = map(int, match.groups()) if match else (0, 0)
    if not hidden or hidden % 32:
        raise UserError(
            f"from_scratch={from_scratch!r}: expected HIDDENxLAYERS, such as 256x4, where HIDDEN is a multiple of 32"
        )
    return hidden, layers


def train_tokenizer(
    texts: Iterable[str], profile: EncoderProfile, vocabulary_size: int = 16384, ends: bool = True
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on `texts`, with RoBERTa's special tokens and the prefixes' special tokens.

    The tokenizer first splits identifiers into lower-case words.

    Args:
        ends: whether the tokenizer puts special tokens around each text.
    """
    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    # Little data would not teach a model that `readLines`, `read_lines` and "Read lines" are the same words.
    bpe.normalizer = normalizers.Sequence([normalizers.Replace(Regex(WORD_BORDER), " "), normalizers.Lowercase()])
    if not ends:  # a static encoder ignores word positions and white space
        words = Split(Regex(r"\w+|[^\w\s]"), behavior="removed", invert=True)
        bpe._tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=True)])
    special = _special_tokens(profile)
    bpe.train_from_iterator(texts, vocab_size=vocabulary_size, special_tokens=special, show_progress=False)
    tokenizer = bpe._tokenizer
    start, end = ((SPECIAL[name], tokenizer.token_to_id(SPECIAL[name])) for name in ("bos", "eos"))
    tokenizer.post_processor = RobertaProcessing(end, start) if ends else None
    return _wrapped(tokenizer, profile)


def kept_tokenizer(
    texts: Iterable[str], known: str, profile: EncoderProfile, vocabulary_size: int, ends: bool = True
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on texts and stores it in `TOKENIZERS`, or reads a tokenizer that an earlier run stored.

    If the tokenizer cannot be stored, a warning is printed, and the next run trains the tokenizer again.

    Args:
        texts: the texts, which are read only if no tokenizer is stored.
        known: the fingerprint of the texts.
    """
    settings = [vocabulary_size, ends, _special_tokens(profile), tokenizers.__version__]
    made_from = fingerprint(settings, known)
    record = TOKENIZERS / f"{made_from}.json"
    files = kept_files(record, made_from)
    if files is not None:
        return _wrapped(Tokenizer.from_file(str(files[0])), profile)
    tokenizer = train_tokenizer(texts, profile, vocabulary_size, ends)
    path = record.with_suffix(".tokenizer")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, tokenizer.backend_tokenizer.to_str())
        keep_files(record, made_from, [path])
    except OSError as error:
        logger.warning("cannot write %s (%s); the next run will train its tokenizer again", path, error.strerror)
    return tokenizer


def _special_tokens(profile: EncoderProfile) -> list[str]:
    """Returns RoBERTa's special tokens and the prefixes' special tokens."""
    return list(dict.fromkeys([*SPECIAL.values(), *profile.prefix_tokens]))


def _wrapped(tokenizer: Tokenizer, profile: EncoderProfile) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": token for name, token in SPECIAL.items()},
        cls_token=SPECIAL["bos"],
        sep_token=SPECIAL["eos"],
        extra_special_tokens=[token for token in _special_tokens(profile) if token not in SPECIAL.values()],
        model_max_length=max(profile.query_length, profile.code_length),
    )


def random_model(from_scratch: str, tokenizer, profile: EncoderProfile) -> PreTrainedModel:
    """Creates an encoder with random weights, of a size such as "256x4" (hidden size and layers).

    With 0 layers, the encoder is static. Otherwise, it is a RoBERTa with enough positions for the profile.
    """
    hidden, layers = parse_size(from_scratch)
    if not layers:
        return static_model(tokenizer, hidden)
    longest = max(profile.query_length, profile.code_length + profile.data_flow_length)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // (64 if hidden % 64 == 0 else 32),
        intermediate_size=4 * hidden,
        # With RoBERTa's 0.02, the first token of a small model depends little on the others, and pooling on it does
        # not learn. With a mean over the tokens, 0.02 gives a better encoder.
        initializer_range=0.02 if profile.pooling == "mean" else hidden**-0.5,
        max_position_embeddings=longest + tokenizer.pad_token_id + 1,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return RobertaModel(config, add_pooling_layer=profile.pooling == "pooler")
