"""Defines static encoders, which have one vector per token. An embedding is the normalised mean of a text's vectors.

A static encoder's folder loads in `AutoModel`, sentence-transformers, model2vec and `load_encoder`, with equal
embeddings. In `AutoModel`, it is an XLNet without layers, which returns the vectors of tokens at any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedTokenizerFast, XLNetConfig, XLNetModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from soft_trainer.encoders.encoding import Encoder, at_least_float32, embed
from soft_trainer.encoders.profiles import NO_LENGTH, PROFILES, EncoderProfile
from soft_trainer.errors import UserError

MODEL2VEC_TENSOR = "embeddings"  # the name by which model2vec and sentence-transformers find the vectors
WORD_BORDER = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+"  # between words in camelCase and snake_case
SIF = 1e-4  # the weight of a token is SIF / (SIF + its frequency)
COUNTED_AT_ONCE = 1000  # texts


class StaticModel(XLNetModel):
    """An XLNet without layers. It looks up the vectors of tokens, and ignores attention masks and positions."""

    # In training, `encode` asks for the means, which saves the memory of a vector for every token and all padding.
    # Otherwise it computes the mean itself, which is exact to 1e-6 for 5,000 tokens; `embedding_bag` is exact to 1e-4.
    takes_means = True

    def __init__(self, config: XLNetConfig):
        super().__init__(config)
        # Only the vectors of tokens affect an embedding. Unlike a parameter, a buffer is never trained.
        del self.mask_emb
        self.register_buffer("mask_emb", torch.zeros(1, 1, config.d_model))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, mean_over: Tensor | None = None, **kwargs
    ) -> BaseModelOutputWithPooling:
        """Returns the vectors of the tokens as `last_hidden_state`, Tensor[B, L, d].

        Args:
            mean_over: BoolTensor or LongTensor[B, L], the tokens to average. If given, only their means are returned,
                as `pooler_output`, Tensor[B, d]. The mean of a text without tokens is 0.
        """
        if mean_over is None:
            return BaseModelOutputWithPooling(last_hidden_state=self.word_embedding(input_ids))
        lengths = mean_over.sum(1)
        starts = lengths.cumsum(0) - lengths
        tokens = input_ids[mean_over.bool()]
        vectors = at_least_float32(self.word_embedding.weight)
        means = F.embedding_bag(tokens, vectors, starts, mode="mean")
        return BaseModelOutputWithPooling(pooler_output=means)


def is_static(config: PretrainedConfig) -> bool:
    """Returns True if a configuration belongs to a static encoder."""
    return config.model_type == "xlnet" and config.n_layer == 0


def static_model(vocabulary_size: int, dimensions: int, pad_token_id: int) -> StaticModel:
    """Makes a static encoder with random vectors."""
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
    encoder: Encoder, dimensions: int = 256, texts: Iterable[str] | None = None, progress: bool = False
) -> Encoder:
    """Distils `encoder` into a static encoder, which has one vector per token of the vocabulary.

    The encoder embeds each token separately. PCA then reduces the embeddings, and rare tokens get a larger weight.

    Args:
        dimensions: the number of dimensions to keep, at most as many as the encoder has.
        texts: texts to count tokens in. By default, token frequencies follow Zipf's law in the vocabulary's order.

    Raises:
        UserError: the tokenizer is written in Python, or the encoder has fewer dimensions.
    """
    # scikit-learn is slow to import.
    from sklearn.decomposition import PCA

    available = encoder.model.config.hidden_size
    if not encoder.tokenizer.is_fast:
        raise UserError("distil: the encoder's tokenizer is written in Python; only fast tokenizers can be distilled")
    if not 1 <= dimensions <= available:
        raise UserError(f"dimensions={dimensions}: must be from 1 to {available}, the encoder's own")
    tokenizer = splitting_tokenizer(encoder.tokenizer)
    vectors = _vectors_of_tokens(encoder, progress).numpy(force=True)
    reduced = PCA(dimensions, random_state=0).fit_transform(vectors)
    weights = _token_weights(tokenizer, texts)
    weights[tokenizer.all_special_ids] = 0
    model = static_model(len(tokenizer), dimensions, tokenizer.pad_token_id)
    with torch.no_grad():
        model.word_embedding.weight.copy_(torch.from_numpy(reduced * weights[:, None]))
    return Encoder(model.eval(), tokenizer, PROFILES["static"])


def splitting_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Returns a copy that splits identifiers into words and adds no special tokens, which would only dilute a mean."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    steps = [normalizers.Replace(Regex(WORD_BORDER), " ")]
    if backend.normalizer is not None:
        steps.append(backend.normalizer)
    backend.normalizer = normalizers.Sequence(steps)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    padding = tokenizer.pad_token or tokenizer.eos_token
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=tokenizer.unk_token, pad_token=padding)


def _vectors_of_tokens(encoder: Encoder, progress: bool) -> Tensor:
    """Encodes each token of the vocabulary as a text, with special tokens, Tensor[V, d]."""
    tokenizer = encoder.tokenizer
    start, end = _special_ends(tokenizer)
    items = [[*start, token, *end] for token in range(len(tokenizer))]
    return embed(encoder, items, "code", 1024, "Encoding the vocabulary" if progress else None)


def _special_ends(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns the special tokens that the tokenizer puts before and after a text."""
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for place in range(len(ids)):
        if ids[place : place + len(plain)] == plain:
            return ids[:place], ids[place + len(plain) :]
    return [], []


def _token_weights(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str] | None) -> np.ndarray:
    """Returns each token's weight, float64[V]. Rare tokens weigh more than frequent ones.

    This is smooth inverse frequency: https://openreview.net/forum?id=SyK00v5xx.
    """
    if texts is None:
        counts = 1 / (np.arange(len(tokenizer)) + 2)  # a vocabulary begins with its most frequent tokens
    else:
        counts = np.zeros(len(tokenizer))
        remaining = iter(texts)
        while part := list(islice(remaining, COUNTED_AT_ONCE)):
            for encoding in tokenizer.backend_tokenizer.encode_batch_fast(part, add_special_tokens=False):
                np.add.at(counts, encoding.ids, 1)
    frequencies = counts / max(counts.sum(), 1)
    return SIF / (SIF + frequencies)


def saved_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors to save: those of the model, and a second copy of the vectors under model2vec's name."""
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
