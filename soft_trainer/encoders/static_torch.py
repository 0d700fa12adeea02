"""Defines static encoders, which have one vector per token. A text's embedding is the sum of its tokens' vectors.

`static_numpy.token_weights` gives each token's weight in the sum, which is scaled to unit length. The embedding of a
text without a known token is 0. Importing this module registers the model with `AutoModel`.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from soft_trainer.encoders.encoding import Encoder, at_least_float32, embed, tokenize
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.static_numpy import MODEL_TYPE, token_weights
from soft_trainer.errors import UserError

WORD_BORDER = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+"  # between words in camelCase and snake_case
BETWEEN_WORDS = WORD_BORDER.replace("_+", r"[\W_]+")  # also punctuation and white space
SIF = 1e-3  # the weight of a word is SIF / (SIF + its frequency)
LONGEST_WORD = 100  # characters; WordPiece treats a longer word as unknown
PADDING = "[PAD]"
UNKNOWN = "[UNK]"
SPECIAL = (PADDING, UNKNOWN)
CHARACTERS = string.ascii_lowercase + string.digits


class StaticConfig(PretrainedConfig):
    """The configuration of a static encoder.

    Args:
        prompt_length: the number of known tokens in the prompt before each function.
    """

    model_type = MODEL_TYPE
    vocab_size: int = 0
    hidden_size: int = 0
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    prompt_length: int = 0


@dataclass(frozen=True)
class Weighing:
    """Weighs the tokens of texts. Data workers get a pickled copy.

    Args:
        size: the number of tokens in the vocabulary.
        unknown: the id of the unknown token, which is not counted, or None.
        prompt_length: the number of known tokens in the prompt before each function.
    """

    size: int
    unknown: int | None
    prompt_length: int

    def after(self, tokenizer: PreTrainedTokenizerBase, prefix: str) -> Weighing:
        """Returns a copy that weighs functions after a prompt."""
        prompt = tokenizer(prefix, add_special_tokens=False)["input_ids"]
        return replace(self, prompt_length=sum(token != self.unknown for token in prompt))

    def __call__(self, rows: Sequence[Sequence[int]], side: str) -> dict[str, Tensor]:
        """Returns inputs of `StaticModel`: the tokens and weights of all texts, T each, and where each text starts.

        Args:
            rows: the token ids of each text.
            side: "query" or "code".
        """
        weights = token_weights(rows, self.size, side, self.unknown, self.prompt_length)
        return {
            "input_ids": torch.from_numpy(weights.indices.astype(np.int64)),
            "weights": torch.from_numpy(weights.data),
            "starts": torch.from_numpy(weights.indptr[:-1].astype(np.int64)),
        }

    def padded(self, rows: Sequence[Sequence[int]], side: str) -> dict[str, Tensor]:
        """Returns the tokens and weights as Tensor[B, L], so that a batch can be divided. Padding has weight 0."""
        inputs = self(rows, side)
        lengths = np.diff(inputs.pop("starts"), append=len(inputs["weights"])).tolist()
        return {name: pad_sequence(each.split(lengths), batch_first=True) for name, each in inputs.items()}


class StaticModel(PreTrainedModel):
    """Looks up token vectors, and returns their weighted sum, scaled to unit length, as `pooler_output`."""

    config_class = StaticConfig

    def __init__(self, config: StaticConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.weigh = Weighing(config.vocab_size, config.unk_token_id, config.prompt_length)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the token vectors."""
        return self.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        weights: Tensor | None = None,
        starts: Tensor | None = None,
        side: str = "query",
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """Embeds texts. Returns `pooler_output`, Tensor[B, d] in float32 or higher.

        Args:
            input_ids: a tokenizer's result, LongTensor[B, L], or with `weights` that of `weigh` or `weigh.padded`.
            side: "query" or "code"; see `token_weights`. Not used with `weights`.
        """
        if weights is None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            rows = [ids[kept.bool()].tolist() for ids, kept in zip(input_ids.cpu(), mask.cpu(), strict=True)]
            bags = {name: each.to(input_ids.device) for name, each in self.weigh(rows, side).items()}
            return self(**bags)
        vectors = at_least_float32(self.embeddings.weight)
        sums = F.embedding_bag(input_ids, vectors, starts, mode="sum", per_sample_weights=weights.to(vectors))
        return BaseModelOutputWithPooling(pooler_output=F.normalize(sums, dim=-1))


AutoConfig.register(MODEL_TYPE, StaticConfig)
AutoModel.register(StaticConfig, StaticModel)


def static_model(tokenizer: PreTrainedTokenizerBase, dimensions: int) -> StaticModel:
    """Creates a static encoder with random vectors for the tokens of `tokenizer`."""
    special = {"pad_token_id": tokenizer.pad_token_id, "unk_token_id": tokenizer.unk_token_id}
    return StaticModel(StaticConfig(vocab_size=len(tokenizer), hidden_size=dimensions, **special))


def distilled(
    encoder: Encoder,
    words: Mapping[str, float],
    dimensions: int = 256,
    vocabulary_size: int = 32768,
    progress: bool = False,
) -> Encoder:
    """Distils `encoder` into a static encoder, which has one vector for each word.

    The encoder embeds each word separately. PCA then reduces the embeddings, and rare words get larger weights.

    Args:
        words: how often each word occurs. The vocabulary consists of the most frequent words, all letters and all
            digits.
        dimensions: the number of dimensions to keep, at most the encoder's.
        vocabulary_size: the maximum number of entries in the vocabulary.

    Raises:
        UserError: the encoder has fewer than `dimensions` dimensions, or the vocabulary is too small.
    """
    # scikit-learn is slow to import.
    from sklearn.decomposition import PCA

    available = encoder.dimensions
    if not 1 <= dimensions <= available:
        raise UserError(f"dimensions={dimensions}: must be from 1 to {available}, the encoder's dimensions")
    least = len(SPECIAL) + len(CHARACTERS)
    if vocabulary_size < least:
        raise UserError(f"vocabulary_size={vocabulary_size}: must be at least {least}")
    kept = [*CHARACTERS, *sorted(words.keys() - {*CHARACTERS}, key=lambda word: (-words[word], word))]
    kept = kept[: vocabulary_size - len(SPECIAL)]
    entries = [*SPECIAL, *sorted(kept, key=lambda word: (-words.get(word, 0), word))]
    if len(entries) < dimensions:
        raise UserError(f"dimensions={dimensions}: the vocabulary has only {len(entries)} entries; use more texts")
    tokenizer = word_tokenizer(entries)
    profile = encoder.profile
    items = tokenize(encoder.tokenizer, entries, profile.code_prefix, profile.code_length)
    label = "Encoding the vocabulary" if progress else None
    vectors = embed(encoder, items, "code", 1024, label).numpy(force=True)
    reduced = PCA(dimensions, random_state=0).fit_transform(vectors)
    counts = np.array([words.get(entry, 0) for entry in entries], dtype=np.float64)
    # Smooth inverse frequency: https://openreview.net/forum?id=SyK00v5xx
    weights = SIF / (SIF + counts / max(counts.sum(), 1))
    weights[: len(SPECIAL)] = 0
    model = static_model(tokenizer, dimensions)
    with torch.no_grad():
        model.embeddings.weight.copy_(torch.from_numpy(reduced * weights[:, None]))
    return Encoder(model.eval(), tokenizer, PROFILES["static"])


def word_tokenizer(entries: Sequence[str]) -> PreTrainedTokenizerFast:
    """Creates a tokenizer whose tokens are lower-case words: `parseURL(self)` becomes `parse url self`.

    A word outside the vocabulary is split from left to right into the longest entries that match. WordPiece does this
    if `continuing_subword_prefix` is empty.

    Args:
        entries: the vocabulary, which starts with the special tokens.
    """
    numbers = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(WordPiece(numbers, unk_token=UNKNOWN, continuing_subword_prefix=""))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex(BETWEEN_WORDS), " "), BertNormalizer()])
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, pad_token=PADDING)


def count_words(texts: Iterable[str]) -> dict[str, int]:
    """Counts the words in texts. Drops words that occur only once or are longer than `LONGEST_WORD` characters."""
    backend = word_tokenizer(SPECIAL).backend_tokenizer
    counts = Counter()
    for text in texts:
        counts.update(backend.normalizer.normalize_str(text).split())
    return {word: count for word, count in counts.items() if count > 1 and len(word) <= LONGEST_WORD}
