"""Ranks equal the ranks of float64 scores, for every block size and for scores that nearly tie."""

import itertools

import pytest
import torch
from refusals import refused

from soft_trainer.errors import UserError
from soft_trainer.evaluation import ranking
from soft_trainer.evaluation.ranking import rank_codes, retrieval_metrics

QUERIES, CODES, DIM = 19, 80, 12


def float64_ranking(queries, codes, targets):
    """Ranks codes with a loop: float64 scores are computed pair by pair, so that identical codes tie."""
    scores = torch.stack([torch.stack([query @ code for code in codes.double()]) for query in queries.double()])
    ranks = (scores >= scores.gather(1, targets[:, None])).sum(1)
    return ranks, scores.argsort(dim=1, descending=True, stable=True)


def random(seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CODES, (QUERIES,), generator=generator)
    return torch.randn(QUERIES, DIM, generator=generator), torch.randn(CODES, DIM, generator=generator), targets


def changed(change):
    """Applies `change` to random embeddings of queries and codes. Returns both, and the targets."""
    queries, codes, targets = random()
    return *change(queries, codes), targets


def duplicates():
    queries, codes, targets = random()
    codes[::3] = codes[1]
    targets[::2] = 0
    return queries, codes, targets


def in_float64():
    queries, codes, targets = random()
    queries, codes = queries.double() + 1e4, codes.double() + 1e4
    codes[40:] = codes[:40] + 1e-11
    return queries, codes, targets


KINDS = {
    "random": random,
    "one direction": lambda: changed(lambda queries, codes: (1 + 1e-3 * queries, 1 + 1e-3 * codes)),
    "last bits": lambda: changed(lambda queries, codes: (queries, codes[:1] + 1e-7 * codes)),
    "duplicates": duplicates,
    "identical": lambda: changed(lambda queries, codes: (queries, codes[:1].repeat(CODES, 1))),
    "whole numbers": lambda: changed(lambda queries, codes: (queries.sign(), codes.round())),  # many vectors tie
    "float64": in_float64,
    "float16": lambda: changed(lambda queries, codes: (queries.half(), codes.half())),
    "bfloat16": lambda: changed(lambda queries, codes: (queries.bfloat16(), codes.bfloat16())),
    "huge": lambda: changed(lambda queries, codes: (queries * 5e37, codes * 5e37)),
    "tiny": lambda: changed(lambda queries, codes: (queries * 1e-38, codes * 1e-39)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_those_of_float64_for_every_block_size_and_for_a_corpus_in_parts(kind, monkeypatch):
    queries, codes, targets = KINDS[kind]()
    expected, _ = float64_ranking(queries, codes, targets)
    for block_size in (None, 5, 32, 33):
        assert rank_codes(queries, codes, targets, block_size=block_size).ranks.tolist() == expected.tolist()
    monkeypatch.setattr(ranking, "_CORPUS", 30 * DIM)
    monkeypatch.setattr(ranking, "_HASHED", 7 * DIM)
    corpus = ranking.Corpus(codes)
    assert [len(part) for part in corpus.parts] == [30, 30, 20]
    torch.testing.assert_close(corpus.longest, codes.double().norm(dim=1).max())
    assert rank_codes(queries, codes, targets, block_size=5).ranks.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("whole numbers", "huge", "tiny")])
def test_top_codes_are_best_first_and_ties_take_the_lower_row(kind):
    queries, codes, targets = KINDS[kind]()
    _, orders = float64_ranking(queries, codes, targets)
    for top_k, block_size in itertools.product((1, 5, CODES, CODES + 1), (None, 9)):
        ranked = rank_codes(queries, codes, targets, top_k=top_k, block_size=block_size)
        assert ranked.top_indices.tolist() == orders[:, :top_k].tolist()
        scores = (queries.double() @ codes.double().T).gather(1, ranked.top_indices)
        torch.testing.assert_close(ranked.top_scores.double(), scores, rtol=1e-6, atol=1e-6)


@pytest.fixture
def precision():
    """The settings for the precision of matrix products, restored after the test."""
    switches = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    switches = [torch.backends, *switches] if hasattr(torch.backends, "fp32_precision") else []
    yield switches
    for switch in switches:
        switch.fp32_precision = "none"
    if not switches:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("value", ["tf32", "bf16"])
def test_no_setting_of_precision_changes_ranks(value, precision):
    generator = torch.Generator().manual_seed(0)
    queries, codes = 1 + 1e-2 * torch.randn(2, 100, 64, generator=generator)
    targets = torch.arange(100)
    expected = rank_codes(queries, codes, targets).ranks
    threads = torch.get_num_threads()
    for switch in precision:
        if value == "tf32" or switch is not torch.backends.cuda.matmul:
            switch.fp32_precision = value
    if not precision:
        torch.set_float32_matmul_precision("medium")
    try:
        torch.set_num_threads(3 - threads % 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert rank_codes(queries, codes, targets, block_size=7).ranks.tolist() == expected.tolist()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_copies_of_an_embedding_are_found(dtype):
    codes = torch.randn(200, DIM, generator=torch.Generator().manual_seed(0)).sign().to(dtype)  # bits differ little
    codes[7], codes[9] = 0.0, -0.0
    corpus = ranking.Corpus(codes)
    _, numbers = codes.unique(dim=0, return_inverse=True)
    assert torch.equal(numbers[corpus.copies], numbers[corpus.originals])
    assert len(corpus.copies) == len(codes) - len(numbers.unique())


def test_inputs_stay_as_they_were_and_score_scale_multiplies_scores_alone():
    for inputs in (random(), in_float64()):
        before = [tensor.clone() for tensor in inputs]
        plain, scaled = rank_codes(*inputs), rank_codes(*inputs, score_scale=20.0)
        assert torch.equal(plain.ranks, scaled.ranks)
        torch.testing.assert_close(scaled.top_scores, 20 * plain.top_scores)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_what_does_not_fit_is_refused():
    queries, codes, targets = random()
    for wrong, words in (
        ((queries[:, :-1], codes, targets), "Embeddings and targets must be"),
        ((queries, codes, targets[:-1]), "not [19, 12], [80, 12], [18]"),
        ((queries, codes, targets + CODES), "targets[0]"),
        ((queries, codes[:0], targets), "corpus is empty"),
    ):
        with refused(words):
            rank_codes(*wrong)
    for side, value in itertools.product((0, 1), (float("nan"), float("inf"), -float("inf"))):
        inputs = random()
        inputs[side][7, 3] = value
        with refused(f"{('query', 'code')[side]} embedding in row 7"):
            rank_codes(*inputs)


def test_a_share_without_queries_gives_an_empty_ranking():
    queries, codes, targets = random()
    ranked = rank_codes(queries[:0], codes, targets[:0], top_k=3)
    assert (ranked.ranks.shape, ranked.top_indices.shape, ranked.top_scores.shape) == ((0,), (0, 3), (0, 3))


def test_metrics_of_ranks():
    metrics = retrieval_metrics(torch.tensor([1, 2, 5, 10, 2000]), 3000)
    assert metrics["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 5 + 1 / 10 + 1 / 2000) / 5)
    assert [metrics[f"recall@{k}"] for k in (1, 5, 10)] == pytest.approx([0.2, 0.6, 0.8])
    assert (metrics["pool_size"], metrics["queries"]) == (3000, 5)
    cut = retrieval_metrics(torch.tensor([1, 2, 5, 10, 2000]), 3000, max_rank=2)
    assert cut["mrr"] == pytest.approx(1.5 / 5) and cut["recall@10"] == pytest.approx(0.4)
    with pytest.raises(UserError, match="empty"):
        retrieval_metrics(torch.tensor([]), 10)
