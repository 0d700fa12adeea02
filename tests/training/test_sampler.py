"""Global batches are the same on every process, differ in every epoch, and contain each row once."""

import numpy as np
import pytest

from soft_trainer.errors import UserError
from soft_trainer.options.fields import STRATEGIES
from soft_trainer.training.sampler import EpochDataLoader, GlobalBatchSampler


def batches(epoch: int = 0, **options) -> list[list[int]]:
    sampler = GlobalBatchSampler(**({"rows": 20, "batch_size": 6} | options))
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def test_each_row_is_used_once_and_the_last_short_batch_is_dropped():
    found = batches()
    assert [len(batch) for batch in found] == [6, 6, 6]
    rows = [row for batch in found for row in batch]
    assert len(set(rows)) == 18 and set(rows) <= set(range(20))
    assert rows != sorted(rows)
    # Each epoch drops different rows.
    assert {row for epoch in range(20) for batch in batches(epoch=epoch) for row in batch} == set(range(20))


def test_the_short_batch_where_it_is_asked_for():
    found = batches(drop_last=False)
    assert [len(batch) for batch in found] == [6, 6, 6, 2]
    assert sorted(row for batch in found for row in batch) == list(range(20))
    assert [len(batch) for batch in batches(rows=12, drop_last=False)] == [6, 6]
    assert [len(batch) for batch in batches(rows=4, drop_last=False)] == [4]


def test_seed_and_epoch_alone_decide():
    assert batches(epoch=3, seed=7) == batches(epoch=3, seed=7)
    assert batches(epoch=3, seed=7) != batches(epoch=4, seed=7)
    assert batches(epoch=3, seed=7) != batches(epoch=3, seed=8)
    in_order = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]
    assert batches(strategy="sequential") == batches(epoch=1, strategy="sequential") == in_order


def test_the_loader_passes_the_epoch_on():
    loader = EpochDataLoader(range(20), batch_sampler=GlobalBatchSampler(20, 6), collate_fn=list)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
    assert epochs[0] == epochs[2] == batches() and epochs[1] == batches(epoch=1)


FEW = {
    "no_duplicates": {"text_ids": [np.arange(5)]},
    "group_by_length": {"lengths": np.arange(5)},
    "one_language": {"languages": ["go"] * 5},
    "similar": {"similar": {"pairs": np.stack([np.arange(5)] * 2, axis=1), "neighbours": np.full((5, 1), -1)}},
}


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_rows_than_a_batch_are_one_batch(strategy, drop_last):
    (batch,) = batches(rows=5, strategy=strategy, drop_last=drop_last, **FEW.get(strategy, {}))
    assert sorted(batch) == [0, 1, 2, 3, 4]


def test_a_language_of_few_rows_is_one_batch():
    found = batches(rows=13, strategy="one_language", languages=["ruby"] * 8 + ["go"] * 5)
    assert sorted(map(len, found)) == [5, 6] and sorted(min(found, key=len)) == [8, 9, 10, 11, 12]


def test_one_language_needs_the_column():
    with pytest.raises(UserError, match="no column 'language'"):
        GlobalBatchSampler(13, 6, strategy="one_language")


@pytest.mark.parametrize("drop_last", [True, False])
def test_one_language_in_a_batch_and_all_languages_in_an_epoch(drop_last):
    languages = ["ruby"] * 14 + ["go"] * 7
    found = batches(rows=21, strategy="one_language", languages=languages, drop_last=drop_last)
    assert all(len({languages[row] for row in batch}) == 1 for batch in found)
    assert {languages[batch[0]] for batch in found} == {"ruby", "go"}
    assert sorted(map(len, found)) == ([6, 6, 6] if drop_last else [1, 2, 6, 6, 6])
    assert found != batches(epoch=1, rows=21, strategy="one_language", languages=languages, drop_last=drop_last)


def repeated(rows: int, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Draws text ids of queries and codes. A fraction `share` repeats the query or the code of an earlier row."""
    generator = np.random.default_rng(rows)
    sides = []
    for _ in range(2):
        ids = np.arange(rows)
        later = generator.choice(np.arange(1, rows), int(share * rows), replace=False)
        ids[later] = generator.integers(0, later)
        sides.append(ids.astype(np.uint64))
    return tuple(sides)


TEXTS = {
    "pairs": (np.arange(600) // 2, np.arange(600) % 300),
    "a tenth": repeated(600),
    "everything": repeated(600, 0.99),
    "a text in every batch": (np.where(np.arange(600) < 100, 0, np.arange(600)), np.arange(600)),
    "two texts in two rows of three": (np.arange(600) % 3 // 2 * np.arange(600), np.arange(600) % 7),
    "one text": (np.zeros(600, int), np.arange(600)),
}


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("texts", TEXTS)
def test_no_text_occurs_twice_in_a_batch(texts, drop_last):
    options = {"rows": 600, "strategy": "no_duplicates", "text_ids": TEXTS[texts], "drop_last": drop_last}
    found = batches(**options)
    rows = [row for batch in found for row in batch]
    assert len(set(rows)) == len(rows) and max(map(len, found)) <= 6
    for ids in TEXTS[texts]:
        assert all(len(set(ids[batch].tolist())) == len(batch) for batch in found)
    # A row is skipped only if every batch with room contains one of its texts.
    open_batches = [batch for batch in found if len(batch) < 6]
    for row in set(range(600)) - set(rows):
        assert all(any(ids[row] in ids[batch] for ids in TEXTS[texts]) for batch in open_batches)
    assert found == batches(**options) != batches(epoch=1, **options)


@pytest.mark.parametrize(
    "texts, placed", [("pairs", 600), ("a tenth", 600), ("a text in every batch", 600), ("one text", 100)]
)
def test_as_many_rows_as_possible_are_placed(texts, placed):
    assert sum(map(len, batches(rows=600, strategy="no_duplicates", text_ids=TEXTS[texts]))) == placed


def test_rows_of_like_length_meet():
    lengths = np.random.default_rng(0).integers(5, 500, 600)
    found = batches(rows=600, strategy="group_by_length", lengths=lengths)
    assert sorted(row for batch in found for row in batch) == list(range(600))
    spread = np.mean([np.ptp(lengths[batch]) for batch in found])
    assert spread < 0.1 * np.mean([np.ptp(lengths[batch]) for batch in batches(rows=600)])
    longest = [lengths[batch].max() for batch in found]
    assert longest != sorted(longest, reverse=True)
