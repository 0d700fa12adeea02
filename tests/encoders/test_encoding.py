"""Turning texts into ids, token vectors into embeddings, embeddings into scores."""

from types import SimpleNamespace

import pytest
import torch

from soft_trainer.encoders.encoding import embed, encode, pad, tokenize
from soft_trainer.encoders.pooling import pool, score
from soft_trainer.encoders.profiles import EncoderProfile

TEXTS = ["sort a list with quick sort", "", "read", "def mean(numbers): return sum(numbers) / len(numbers) " * 4]


# ---- Texts to ids ----


def test_ids_have_special_tokens_and_are_cut_but_not_padded(tokenizer):
    ids = tokenize(tokenizer, TEXTS, max_length=12)
    for text, cut in zip(TEXTS, ids, strict=True):
        whole = tokenizer.encode(text)
        assert cut == (whole if len(whole) <= 12 else [*whole[:11], tokenizer.eos_token_id])
    assert ids[1] == [tokenizer.bos_token_id, tokenizer.eos_token_id]


# ---- Token vectors to embeddings ----

HIDDEN = torch.tensor([[[2.0, 0.0], [4.0, 8.0], [100.0, 100.0]], [[3.0, 4.0], [9.0, 9.0], [9.0, 9.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    "pooling, wanted",
    [("mean", [[3.0, 4.0], [3.0, 4.0]]), ("cls", [[2.0, 0.0], [3.0, 4.0]]), ("pooler", [[5.0, 12.0], [0.0, 1.0]])],
)
def test_pooling(pooling, wanted):
    outputs = SimpleNamespace(last_hidden_state=HIDDEN, pooler_output=torch.tensor([[5.0, 12.0], [0.0, 1.0]]))
    assert pool(EncoderProfile(pooling=pooling), outputs, MASK).tolist() == wanted
    lengths = pool(EncoderProfile(pooling=pooling, normalize=True), outputs, MASK).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(2))
    half = SimpleNamespace(last_hidden_state=HIDDEN.bfloat16(), pooler_output=HIDDEN[:, 0].bfloat16())
    assert pool(EncoderProfile(pooling=pooling), half, MASK).dtype == torch.float32


def test_the_mean_of_many_half_precision_vectors_is_taken_in_float32():
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    hidden[0, 0, 0] = 256.0
    outputs = SimpleNamespace(last_hidden_state=hidden)
    mean = pool(EncoderProfile(), outputs, torch.ones(1, 4096, dtype=torch.long))
    assert mean.item() == pytest.approx((256 + 4095) / 4096, rel=1e-6)


# ---- Embeddings to scores ----


def test_scores():
    queries, codes = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [6.0, 8.0], [0.0, -1.0]])
    dot = score(EncoderProfile(score_scale=2.0), queries, codes)
    assert dot.tolist() == [[6.0, 100.0, -8.0], [0.0, 32.0, -4.0]]
    cosine = score(EncoderProfile(score_function="cosine", score_scale=10.0), queries, codes)
    torch.testing.assert_close(cosine, torch.tensor([[6.0, 10.0, -8.0], [0.0, 8.0, -10.0]]))


def test_scores_are_not_rounded_by_autocast():
    torch.manual_seed(0)
    queries, codes = torch.randn(3, 64), torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(EncoderProfile(), queries, codes)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, queries @ codes.T)
    assert score(EncoderProfile(), queries.double(), codes.double()).dtype == torch.float64


# ---- Any number of texts ----


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_embed_gives_every_text_its_embedding_in_the_order_given(model, tokenizer, profile, rows, batch_size):
    ids = tokenize(tokenizer, [row["code"] for row in rows[:10]] + ["x"], max_length=32)
    embeddings = embed(model, profile, ids, tokenizer.pad_token_id, batch_size)
    model.eval()
    with torch.no_grad():
        expected = torch.cat([encode(model, profile, pad([row], tokenizer.pad_token_id)) for row in ids])
    torch.testing.assert_close(embeddings, expected, atol=1e-6, rtol=1e-5)
    assert not embeddings.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_embed_is_without_dropout_and_leaves_the_mode_as_it_was(model, tokenizer, profile, training):
    model.config.hidden_dropout_prob = 0.5
    model.train(training)
    ids = tokenize(tokenizer, TEXTS, max_length=32)
    first, second = (embed(model, profile, ids, tokenizer.pad_token_id) for _ in range(2))
    assert torch.equal(first, second)
    assert model.training is training
