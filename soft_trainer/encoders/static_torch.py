"""Defines static encoders, which have one vector per token. A text's embedding is the normalised mean of the vectors.

A static encoder's folder loads in `AutoModel`, sentence-transformers, model2vec and `load_encoder`. Embeddings are
equal if the profile has `token_weights="count"`; the other libraries do not know "log". `AutoModel` loads an XLNet
without layers, which returns the token vectors of a text of any length.

Unknown tokens are excluded from the mean, as in model2vec, and their vector is 0, so that it makes no difference where
a library includes them. The embedding of a text without a known token is 0.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from soft_trainer.encoders.encoding import UNKNOWN_TOKEN, Encoder, at_least_float32, embed, tokenize
from soft_trainer.encoders.pooling import SMALLEST_WEIGHT
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.encoders.static_numpy import NO_LENGTH
from soft_trainer.errors import UserError

MODEL2VEC_TENSOR = "embeddings"  # the name by which model2vec and sentence-transformers find the vectors
WORD_BORDER = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+"  # between words in camelCase and snake_case
BETWEEN_WORDS = WORD_BORDER.replace("_+", r"[\W_]+")  # also punctuation and white space
SIF = 1e-3  # the weight of a word is SIF / (SIF + its frequency)
LONGEST_WORD = 100  # characters; WordPiece treats a longer word as unknown
PADDING = "[PAD]"
UNKNOWN = "[UNK]"
SPECIAL = (PADDING, UNKNOWN)
PIECE = 128  # tokens; `embedding_bag` adds one vector after the other, which is exact to 1e-5 for 5,000 tokens
CHARACTERS = string.ascii_lowercase + string.digits


class StaticModel(XLNetModel):
    """An XLNet without layers, which looks up token vectors and ignores attention masks and positions."""

    # In training, `encode` passes `mean_over`, which saves the memory for the vectors of all tokens and padding.
    # Otherwise it computes the mean itself.
    takes_means = True
    _keys_to_ignore_on_load_unexpected = [MODEL2VEC_TENSOR]

    def __init__(self, config: XLNetConfig):
        super().__init__(config)
        # Only the vectors of tokens affect an embedding. Unlike a parameter, a buffer is never trained.
        del self.mask_emb
        self.register_buffer("mask_emb", torch.zeros(1, 1, config.d_model))

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *options, **named):
        """Loads the tensors of a checkpoint, except model2vec's copy of the vectors."""
        own = {name: tensor for name, tensor in state_dict.items() if name != MODEL2VEC_TENSOR}
        return super().load_state_dict(own, *options, **named)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, mean_over: Tensor | None = None, **kwargs
    ) -> BaseModelOutputWithPooling:
        """Returns the token vectors as `last_hidden_state`, Tensor[B, L, d].

        Args:
            mean_over: the tokens to average, BoolTensor or LongTensor[B, L], or their weights, FloatTensor[B, L]. If
                set, only each text's mean is returned, as `pooler_output`, Tensor[B, d]. The mean is 0 for a text
                without tokens.
        """
        if mean_over is None:
            return BaseModelOutputWithPooling(last_hidden_state=self.word_embedding(input_ids))
        vectors = at_least_float32(self.word_embedding.weight)
        shares = mean_over.to(vectors) / mean_over.sum(1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
        size = min(PIECE, input_ids.shape[1])
        spare = -input_ids.shape[1] % size
        pieces = [F.pad(each, (0, spare)).view(-1, size) for each in (input_ids, shares)]
        tokens, shares, starts = bags(*pieces)
        sums = F.embedding_bag(tokens, vectors, starts, mode="sum", per_sample_weights=shares)[: len(pieces[0])]
        return BaseModelOutputWithPooling(pooler_output=sums.view(len(input_ids), -1, sums.shape[1]).sum(1))


def bags(input_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens with a weight, in order, their weights, and where each text's tokens start.

    On a CPU or a Mac, there are only these tokens. The host cannot know their number without waiting for a GPU, so on
    a GPU all other tokens follow, as the last of B + 1 texts.

    Args:
        weights: the weight of each token, Tensor[B, L], 0 for a token to drop.
    """
    mask = weights.bool()
    lengths = mask.sum(1)
    ends = lengths.cumsum(0)
    if mask.device.type in ("cpu", "mps"):
        return input_ids[mask], weights[mask], ends - lengths
    order = mask.flatten().byte().argsort(descending=True, stable=True)
    return input_ids.flatten()[order], weights.flatten()[order], torch.cat([ends.new_zeros(1), ends])


def is_static(config: PretrainedConfig) -> bool:
    """Returns True if this is a static encoder's configuration."""
    return config.model_type == "xlnet" and config.n_layer == 0


def exclude_unknown_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Excludes a static encoder's unknown token from embeddings and training. Other encoders stay unchanged.

    A normalised mean of zeros would have a gradient of 1e12, and clipping would scale all other gradients to 0.
    """
    unknown = tokenizer.unk_token_id
    if not is_static(model.config) or unknown is None or getattr(model, UNKNOWN_TOKEN, None) == unknown:
        return
    setattr(model, UNKNOWN_TOKEN, unknown)
    with torch.no_grad():
        model.get_input_embeddings().weight[unknown] = 0


def static_model(vocabulary_size: int, dimensions: int, pad_token_id: int) -> StaticModel:
    """Creates a static encoder with random vectors for `vocabulary_size` tokens."""
    config = XLNetConfig(
        vocab_size=vocabulary_size,
        d_model=dimensions,
        n_layer=0,
        n_head=1,
        d_inner=1,
        dropout=0.0,
        pad_token_id=pad_token_id,
    )
    return StaticModel(config)


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
    model = static_model(len(entries), dimensions, tokenizer.pad_token_id)
    with torch.no_grad():
        model.word_embedding.weight.copy_(torch.from_numpy(reduced * weights[:, None]))
    exclude_unknown_token(model, tokenizer)
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


def saved_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors to save: the model's tensors, and a copy of the vectors under model2vec's name."""
    return {**state_dict, MODEL2VEC_TENSOR: state_dict["word_embedding.weight"].detach().clone()}


def saved_config(config: PretrainedConfig, profile: EncoderProfile) -> dict:
    """Returns the configuration to save, with the settings that model2vec reads."""
    length = max(profile.query_length, profile.code_length)
    settings = {
        "architectures": ["XLNetModel"],
        "normalize": profile.normalize,
        "max_length": length if length < NO_LENGTH else None,
    }
    return config.to_diff_dict() | settings
