"""Nearest documents by shared terms."""

import numpy as np
import pytest
from scipy import sparse

from soft_trainer.data.split import RelevantCodes
from soft_trainer.estimators import term_neighbours
from soft_trainer.estimators.neighbours import Excluded, recall_of
from soft_trainer.estimators.term_neighbours import nearest_by_terms


def excluding_copies(texts: np.ndarray) -> Excluded:
    """Excludes each query's positive, and other codes with the same text."""
    own = sparse.eye_array(len(texts), dtype=np.float32, format="csr")
    return Excluded(np.arange(len(texts)), RelevantCodes(own, np.arange(len(texts)), texts))


@pytest.fixture
def counts():
    """Term counts of 3,000 texts with 8 words each, Zipf-distributed. One text in five repeats an earlier text."""
    generator = np.random.default_rng(0)
    chances = 1 / np.arange(1, 2001)
    words = generator.choice(2000, (3000, 8), p=chances / chances.sum())
    words[::5] = words[generator.integers(0, 3000, 600)]
    rows = np.repeat(np.arange(3000), 8)
    matrix = sparse.csr_matrix((np.ones(24000), (rows, words.reshape(-1))), shape=(3000, 2000))
    idf = np.log(3000 / np.maximum(matrix.getnnz(0), 1))
    texts = np.unique(words, axis=0, return_inverse=True)[1].reshape(-1)
    return matrix, (matrix @ sparse.diags_array(idf)).tocsr(), texts


@pytest.mark.parametrize("common", [0.0, 0.02, 0.2, 1.0])
def test_few_rows_compare_all_products(counts, monkeypatch, common):
    monkeypatch.setattr(term_neighbours, "COMMON", common)
    monkeypatch.setattr(term_neighbours, "ENTRIES", 10_000)
    queries, documents, texts = (part[:600] for part in counts)
    scores = (queries @ documents.T).toarray()
    found = nearest_by_terms(queries, documents, 6, excluding_copies(texts))
    np.testing.assert_allclose(found.own, scores.diagonal(), rtol=1e-5)
    scores[texts[:, None] == texts] = 0
    expected = -np.sort(-scores, axis=1)[:, :6]
    known = found.rows >= 0
    np.testing.assert_array_equal(known, expected > 0)
    np.testing.assert_allclose(found.scores[known], expected[known], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, found.rows, 1)[known], expected[known], rtol=1e-5)


@pytest.mark.slow
def test_many_rows_visit_only_the_rarest_terms(counts, capsys, monkeypatch):
    monkeypatch.setattr(term_neighbours, "VISITED", 64)
    queries, documents, texts = counts
    exact = nearest_by_terms(queries, documents, 10, excluding_copies(texts))
    found = nearest_by_terms(queries, documents, 10, excluding_copies(texts), exact_up_to=0)
    recall = recall_of(found.rows, exact.rows)
    assert 0.85 < recall < 1
    printed = float(capsys.readouterr().err.split("recall@10 ")[1].split()[0])
    assert printed >= 0.9 and abs(printed - recall) < 0.03
    assert np.allclose(found.own, exact.own, rtol=1e-5)
    assert (texts[found.rows] != texts[:, None])[found.rows >= 0].all()
    both = found.rows[:, 0] == exact.rows[:, 0]
    assert np.allclose(found.scores[both, 0], exact.scores[both, 0], rtol=1e-5)


def test_a_row_without_terms_in_common_has_no_neighbours():
    matrix = sparse.csr_matrix(np.eye(4, dtype=np.float32))
    for limit in (100, 0):
        assert (nearest_by_terms(matrix, matrix, 2, Excluded(np.arange(4)), exact_up_to=limit).rows == -1).all()
