"""Defines a tiny model with random weights for every family of encoders. `FAMILIES` has one entry per family."""

import copy
from dataclasses import dataclass

import pytest
import torch
import transformers
from tiny import SIZE, T5, tiny_model

from soft_trainer.encoders.loading import load_encoder

DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
DECODER = SIZE | {"num_key_value_heads": 1, "head_dim": 8}
# name -> configuration class and model class, settings of the configuration, pooling. One family of each attention.
FAMILIES = {
    "roberta": ("Roberta", SIZE, "pooler"),
    "mpnet": ("MPNet", SIZE, "mean"),
    "distilbert": ("DistilBert", DISTILBERT, "mean"),
    "deberta-v2": ("DebertaV2", SIZE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "mean"),
    "modernbert": ("ModernBert", SIZE | {"local_attention": 8}, "cls"),
    "nomic": ("NomicBert", SIZE, "cls"),
    "qwen3": ("Qwen3", DECODER, "last_token"),
    "gemma2": ("Gemma2", DECODER, "mean"),
    "t5": ("T5", T5, "mean"),
}
FAST = ("modernbert", "qwen3", "t5")  # an encoder, a decoder, half of both; the others are tried with the slow tests


@dataclass(frozen=True)
class Family:
    """A family of encoders, such as BERT.

    Args:
        model: a tiny model with random weights and without dropout. Tests must copy it before they change it.
        pooling: a usual pooling for the family.
    """

    name: str
    model: transformers.PreTrainedModel
    pooling: str

    def copy(self) -> transformers.PreTrainedModel:
        return copy.deepcopy(self.model)


def make_family(name: str, tokenizer) -> Family:
    kind, settings, pooling = FAMILIES[name]
    ids = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("pad", "bos", "eos")}
    pooler = {"add_pooling_layer": pooling == "pooler"} if kind in ("Bert", "Roberta", "MPNet", "NomicBert") else {}
    return Family(name, tiny_model(kind, settings | ids | {"vocab_size": len(tokenizer)}, 40, **pooler), pooling)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def family(request, tokenizer) -> Family:
    return make_family(request.param, tokenizer)


@pytest.fixture
def same_everywhere():
    """Checks that `load_encoder` and `SentenceTransformer` give equal embeddings, and returns the `Encoder`."""

    def check(folder, texts, **options):
        from sentence_transformers import SentenceTransformer

        ours = load_encoder(folder, device="cpu", **options)
        theirs = SentenceTransformer(str(folder), device="cpu", **options)
        for embeddings, expected in (
            (theirs.encode_query(texts), ours.encode_queries(texts)),
            (theirs.encode_document(texts), ours.encode_codes(texts)),
        ):
            torch.testing.assert_close(torch.tensor(embeddings), expected, atol=1e-5, rtol=0)
        return ours

    return check
