"""Nearest codes: exact search against brute force, an index and its recall, and the cache on disk."""

import sys

import numpy as np
import pytest
import torch
from refusals import refused
from scipy import sparse

from soft_trainer.data.split import RelevantCodes
from soft_trainer.estimators import neighbours as module
from soft_trainer.estimators.neighbours import Excluded, cached_neighbours, exact_neighbours, recall_of


@pytest.fixture(autouse=True)
def _small_index(monkeypatch):
    """Lowers the limit so that a few hundred codes use the index."""
    monkeypatch.setattr(module, "SMALLEST_INDEX", 200)


def clustered(rows: int, width: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Makes unit vectors like an encoder's: nested topics, few dimensions, queries apart from codes."""
    generator = np.random.default_rng(seed)
    basis = generator.normal(size=(24, width)) / 24**0.5
    topics = generator.normal(size=(max(rows // 200, 4), 24))
    kinds = topics[generator.integers(0, len(topics), rows // 10)] + 0.8 * generator.normal(size=(rows // 10, 24))
    meaning = kinds[generator.integers(0, len(kinds), rows)] + 0.5 * generator.normal(size=(rows, 24))
    sides = []
    for _ in range(2):
        side = (meaning + 0.3 * generator.normal(size=(rows, 24))) @ basis + generator.normal(size=width) / width**0.5
        sides.append((side / np.linalg.norm(side, axis=1, keepdims=True)).astype(np.float32))
    return sides[0], sides[1]


def nearest_rows(queries, codes, k: int, answers: RelevantCodes | None = None, **options) -> module.Neighbours:
    """Finds neighbours if query i's positive is code i."""
    return module.nearest_rows(queries, codes, k, Excluded(np.arange(len(queries)), answers), **options)


def answers_of(query_texts: np.ndarray, code_texts: np.ndarray) -> RelevantCodes:
    """Makes the look-up of relevant codes if query i's positive is code i."""
    own = sparse.eye_array(len(query_texts), len(code_texts), dtype=np.float32, format="csr")
    return RelevantCodes(own, query_texts, code_texts)


def brute_force(scores: np.ndarray, k: int, answers: RelevantCodes | None = None) -> np.ndarray:
    """Returns the k codes with the highest scores for each query, except relevant codes, by sorting."""
    scores = scores.astype(np.float64).copy()
    np.fill_diagonal(scores, -np.inf)
    if answers is not None:
        scores[answers.among(np.arange(len(scores)), np.arange(scores.shape[1])).numpy()] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize(
    "device, free, entries",
    [
        ("cpu", 0, module.ENTRIES),
        ("mps", 0, module.ENTRIES),
        ("cuda:1", 1 << 20, module.ENTRIES),
        ("cuda:1", 16 << 30, 1 << 30),
        ("cuda:1", 8 << 30, 1 << 29),
        ("cuda:1", 1 << 40, module.MOST_ENTRIES),
    ],
)
def test_a_gpu_with_more_memory_compares_more_at_once(monkeypatch, device, free, entries):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 41))
    assert module.entries_on(device) == entries


def test_threads_at_the_same_time_use_one_core_each():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with module.threads(3) as pool:
            assert set(pool.map(lambda _: torch.get_num_threads(), range(9))) == {1}
        with pytest.raises(ZeroDivisionError), module.threads(3) as pool:
            list(pool.map(lambda _: 1 / 0, range(2)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows, group", [(300, 64), (300, 7), (1000, 64)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_exact_neighbours_are_those_of_brute_force(monkeypatch, rows, group, dtype):
    monkeypatch.setattr(module, "GROUP", group)
    queries, codes = (side.astype(dtype) for side in clustered(rows))
    scores = queries.astype(np.float32) @ codes.astype(np.float32).T
    found = nearest_rows(queries, codes, 7)
    np.testing.assert_array_equal(found.rows, brute_force(scores, 7))
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, found.rows, 1), rtol=1e-5)
    np.testing.assert_allclose(found.own, scores.diagonal(), rtol=1e-5)
    assert found.rows.dtype == np.int64 and found.scores.dtype == found.own.dtype == np.float32
    everything = np.arange(rows)
    by_call = exact_neighbours(
        lambda block: torch.from_numpy(scores[block]), everything, rows, 7, Excluded(everything)
    )
    np.testing.assert_array_equal(by_call.rows, found.rows)


@pytest.mark.parametrize("exact_up_to", [10**6, 0], ids=["exact", "index"])
def test_positives_are_not_neighbours_and_codes_may_outnumber_queries(exact_up_to):
    queries, codes = clustered(400)
    queries, generator = queries[:350], np.random.default_rng(0)
    answers = answers_of(generator.integers(0, 200, 350), generator.integers(0, 200, 400))
    found = nearest_rows(queries, codes, 5, answers, exact_up_to=exact_up_to)
    everything = np.arange(350)
    right = answers.among(everything, np.arange(400)).numpy()
    assert right.sum() > 1000 and right.sum(1).max() > 5
    assert not np.take_along_axis(right, found.rows, 1)[found.rows >= 0].any()
    assert found.rows.max() >= 350 and (found.rows != everything[:, None]).all()
    assert recall_of(found.rows, brute_force(queries @ codes.T, 5, answers)) >= (1 if exact_up_to else 0.9)
    np.testing.assert_allclose(found.own, (queries * codes[:350]).sum(1), rtol=1e-5)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    queries, codes = clustered(300)
    assert module.nearest_rows(queries, codes, 5, Excluded(np.arange(300))).rows.shape == (300, 5)
    with refused("among 300 functions on a CPU", "-e '.[faiss]'"):
        module.nearest_rows(queries, codes, 5, Excluded(np.arange(300)), exact_up_to=0)


def test_the_own_code_of_a_query_may_be_any():
    queries, codes = clustered(300)
    own = np.random.default_rng(0).permutation(300)
    expected = module.nearest_rows(queries, codes, 5, Excluded(np.arange(300)))
    found = module.nearest_rows(queries, codes[own], 5, Excluded(np.argsort(own)))
    np.testing.assert_array_equal(own[found.rows], expected.rows)
    np.testing.assert_allclose(found.own, expected.own, rtol=1e-5)


@pytest.mark.parametrize("exact_up_to", [10**6, 0], ids=["exact", "index"])
def test_fewer_codes_than_asked_for(exact_up_to):
    queries, codes = clustered(40)
    found = nearest_rows(queries, codes, 60, exact_up_to=exact_up_to)
    assert found.rows.shape == (40, 60)
    assert (found.rows[:, 39:] == -1).all() and (found.scores[:, 39:] == -np.inf).all()
    if exact_up_to:
        assert [sorted(row[:39]) for row in found.rows.tolist()] == [[*range(i), *range(i + 1, 40)] for i in range(40)]
    alone = nearest_rows(queries[:1], codes[:1], 3, exact_up_to=exact_up_to)
    assert alone.rows.tolist() == [[-1] * 3]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exact_up_to", [10**6, 0], ids=["exact", "index"])
def test_vectors_may_lie_in_a_file(tmp_path, exact_up_to):
    sides, mapped = clustered(300), []
    for number, side in enumerate(sides):
        np.save(tmp_path / f"{number}.npy", side)
        mapped.append(np.load(tmp_path / f"{number}.npy", mmap_mode="r"))
    found = nearest_rows(*mapped, 5, exact_up_to=exact_up_to)
    np.testing.assert_array_equal(found.rows, nearest_rows(*sides, 5, exact_up_to=exact_up_to).rows)


@pytest.mark.parametrize(
    "rows, width, lengths",
    [(1_200, 48, (1, 1)), (1_200, 32, (0.5, 3)), pytest.param(20_000, 128, (1, 1), marks=pytest.mark.slow)],
)
def test_the_index_finds_nine_in_ten_neighbours(rows, width, lengths):
    queries, codes = clustered(rows, width)
    codes = codes * np.random.default_rng(1).uniform(*lengths, (rows, 1)).astype(np.float32)
    found = nearest_rows(queries, codes, 10, exact_up_to=0)
    exact = nearest_rows(queries, codes, 10)
    assert recall_of(found.rows, exact.rows) >= 0.9
    np.testing.assert_allclose(found.scores, (queries[:, None] * codes[found.rows]).sum(2), atol=1e-5)
    np.testing.assert_array_equal(found.rows, nearest_rows(queries, codes, 10, exact_up_to=0).rows)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 10 for row in found.rows.tolist())


def test_more_codes_are_fetched_where_many_have_the_texts_of_the_row():
    queries, codes = clustered(400)
    codes[:250] = codes[0] + 1e-4 * codes[:250]
    texts = np.where(np.arange(400) < 250, 0, np.arange(400)).astype(np.uint64)
    found = nearest_rows(queries, codes, 5, answers_of(texts, np.arange(400)), exact_up_to=0)
    assert (found.rows[:250] >= 250).all()


def test_kept_on_disk_and_made_once(tmp_path):
    queries, codes = clustered(60)
    made = []

    def build():
        made.append(1)
        return nearest_rows(queries, codes, 4)

    first = cached_neighbours(tmp_path, [], 4, build)
    again = cached_neighbours(tmp_path, [], 4, build)
    assert len(made) == 1 and isinstance(again.rows, np.memmap)
    for field in ("rows", "scores", "own"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    cached_neighbours(None, [], 4, build)
    assert len(made) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


TWO_PROCESSES = """
import sys

import numpy as np
from accelerate import PartialState
from soft_trainer.system import distributed
from soft_trainer.estimators.neighbours import Excluded, cached_neighbours, nearest_rows
from soft_trainer.errors import UserError

state = PartialState(cpu=True)
vectors = np.load(sys.argv[1] + "/vectors.npy")

def build():
    assert state.process_index == 0
    return nearest_rows(vectors, vectors, 4, Excluded(np.arange(len(vectors))))

def refuse():
    raise UserError("no vectors")

for folder in (None, sys.argv[1], sys.argv[1]):
    found = cached_neighbours(folder, [], 4, build)
    assert isinstance(found.rows, np.memmap) == (folder is not None)
    np.save(f"{sys.argv[1]}/rows-{state.process_index}-{folder is None}.npy", found.rows)
try:
    cached_neighbours(None, [], 4, refuse)
except UserError as error:
    print("refused:", error)
distributed.close()
"""


@pytest.mark.slow
def test_two_processes_have_the_same_neighbours_and_the_same_refusal(launch, tmp_path):
    queries, _ = clustered(60)
    np.save(tmp_path / "vectors.npy", queries)
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    said = launch([tmp_path / "script.py", tmp_path], 2, 60)
    assert ["refused: no vectors" in words for words in said] == [True, True]
    expected = nearest_rows(queries, queries, 4).rows
    kept = sorted(tmp_path.glob("rows-*.npy"))
    assert len(kept) == 4
    for path in kept:
        np.testing.assert_array_equal(np.load(path), expected)
