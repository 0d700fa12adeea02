"""Training with hard negatives, either mined or from a column of the rows."""

import pytest
import torch
from datasets import Dataset
from trainings import OWN, SameLength, batches_of, bm25, check_plain, fitted, initial, known_positives

from soft_trainer import BM25Estimator
from soft_trainer.errors import UserError
from soft_trainer.run.record import setup_table
from soft_trainer.training.sampler import GlobalRows


def with_column(rows, values) -> Dataset:
    return Dataset.from_list([row | {"negatives": value} for row, value in zip(rows, values, strict=True)])


RAGGED = [0, 1, 3, 0, 2, 0, 4, 1]  # negatives of eight rows that no other row has
CASES = {
    "InfoNCE": {"loss": "info_nce"},
    "Eq. 4": {"loss": "soft_info_nce", "weighting": "linear", "alpha": 1.3, "beta": 0.7, "floor": 0.2},
    "top k": {"loss": "info_nce", "cancel": "top_k", "cancel_k": 3},
    "KL": {"loss": "info_nce", "distill_weight": 0.5, "distill_temperature": 2.0},
}


@pytest.mark.parametrize(
    "passes", ["packed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("cached", "padded"))]
)
@pytest.mark.parametrize("name", CASES)
def test_a_query_is_compared_with_the_negatives_of_all_rows(make_trainer, exact_model, rows, name, passes):
    named = [[f"def n{row}_{n}(): return {row * n}" for n in range(number)] for row, number in enumerate(RAGGED)]
    named[2] = [rows[8]["url"], rows[0]["url"]]  # the function of another query, and one that is in the batch already
    chosen = with_column(rows[:9], [*named, None])
    # Row 8 has row 5's query, so its function, which row 2 names, is no negative of row 5.
    chosen = chosen.map(
        lambda row, n: {"docstring_tokens": rows[5 if n == 8 else n]["docstring_tokens"]}, with_indices=True
    )
    options = {"packed": {}, "cached": {"gradient_cache_chunk_size": 3}, "padded": {"packing": "false"}}[passes]
    options |= {"train_sampling_strategy": "sequential", "negatives_per_query": 4}
    trainer = make_trainer(initial(), chosen, exact_model, **CASES[name], **options)
    batch = batches_of(trainer)[0]
    assert len(batch.code_rows) == 8 + 9 and batch.code_rows[:8].tolist() == list(range(8))
    column = batch.code_rows.tolist().index(8)
    assert known_positives(trainer, batch).nonzero().tolist() == [[5, column]] and batch.false_negatives == 1
    check_plain(trainer, batch)


# ---- Mined ----


def test_mined_negatives_are_similar_codes_below_the_ratio_of_some_query(make_trainer):
    trainer = fitted(make_trainer(initial(), negatives_per_query=2, negative_ratio=0.98))
    similarity = trainer.estimator.similarity(range(24), range(24))
    own = similarity.diagonal()[:, None]
    allowed = similarity <= own - 0.02 * own.abs()
    assert 0 < int(allowed.sum()) < 24 * 23
    added = 0
    for batch in batches_of(trainer):
        number = len(batch.rows)
        assert batch.code_rows[:number].tolist() == batch.rows.tolist()
        assert batch.targets.negatives is None  # this batch has no duplicates
        further = batch.code_rows[number:]
        assert len(set(further.tolist()) - set(batch.rows.tolist())) == len(further) <= 2 * number
        assert allowed[batch.rows][:, further].any(0).all()
        added += len(further)
    assert added > 0


def test_an_estimator_without_vectors_finds_neither_negatives_nor_clusters(make_trainer):
    with pytest.raises(UserError, match="SameLength cannot find similar rows"):
        make_trainer(SameLength(), train_sampling_strategy="similar")
    with pytest.raises(UserError, match="negatives_per_query: .* an estimator that finds similar functions"):
        make_trainer(SameLength(), **OWN)


def test_draws_change_with_the_epoch_alone_also_in_data_workers(make_trainer):
    drawn = []
    for workers in (0, 1):
        trainer = fitted(make_trainer(initial(), **OWN, dataloader_num_workers=workers))
        drawn.append([[b.code_rows.tolist() for b in batches_of(trainer, epoch)] for epoch in range(2)])
    assert drawn[0] == drawn[1]
    batches = trainer._train_batches()
    drawn = [batches.__getitems__(GlobalRows(range(8), epoch)).code_rows.tolist() for epoch in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- In a column ----


def test_the_column_names_rows_by_url_and_further_codes_by_text(make_trainer, rows, tokenizer):
    further = "def unrelated(thing): return thing.fly()"
    values = [[rows[5]["url"], further], None, [], [rows[0]["url"]], *[[further]] * 4]
    trainer = fitted(make_trainer(bm25(), with_column(rows[:8], values), negatives_per_query=2))
    [batch] = batches_of(trainer)
    assert batch.code_rows.tolist()[8:] == [8]  # urls of rows in the batch add no column
    tokens = trainer._train_batches().tokens["code"][8]
    assert further.replace(" ", "") in tokenizer.decode(tokens).replace(" ", "")


def test_a_duplicate_among_the_negatives_of_another_row_is_a_positive(make_trainer, rows):
    # Row 1's negative is row 9, which has row 0's query.
    twin = rows[9] | {"docstring": rows[0]["docstring"], "docstring_tokens": rows[0]["docstring_tokens"]}
    chosen = with_column([*rows[:9], twin], [None, [twin["url"]], *[None] * 8])
    for treatment, extra in (("positives", [True, False, False]), ("mask", None), ("ignore", None)):
        options = {"negatives_per_query": 1, "false_negatives": treatment, "alpha": 0.5}
        own = make_trainer(bm25(), chosen, **options)._train_batches().__getitems__([0, 1, 2])
        assert own.code_rows.tolist() == [0, 1, 2, 9]
        known = own.targets.extra_positives
        assert (None if known is None else known[:, 3].tolist()) == extra
        assert own.false_negatives == (treatment != "ignore")
        if treatment == "ignore":
            assert own.targets.negatives is None
        else:
            assert own.targets.negatives[:, 3].tolist() == [False, True, True]


def test_other_strategies_leave_code_only_rows_alone(make_trainer, rows):
    column = with_column(rows[:8], [["def further(x): return 1"]] * 8)
    for strategy in ("no_duplicates", "group_by_length", "one_language", "similar"):
        options = {"per_device_train_batch_size": 4, "negatives_per_query": 1, "alpha": 0.5, "group_size": 2}
        batches = batches_of(make_trainer(bm25(), column, train_sampling_strategy=strategy, **options))
        assert sorted(row for batch in batches for row in batch.rows) == list(range(8))
        assert all(batch.code_rows[-1] == 8 for batch in batches)


@pytest.mark.parametrize("own", [False, True])
def test_named_negatives_are_used_by_default_and_the_table_says_how_many(make_trainer, rows, own):
    column = with_column(rows[:8], [[f"def further(x): return {n}" for n in range(6)]] * 8)
    trainer = make_trainer(BM25Estimator(), column, collator=dict if own else None)
    assert setup_table(trainer)["negatives_per_query"] == (0 if own else 4)
    if own:  # a custom collator reads only pairs
        assert fitted(trainer).ongoing.prepared.negatives is None
        return
    [batch] = batches_of(trainer)
    assert 4 <= len(batch.code_rows) - 8 <= 6 and batch.targets.negatives is None  # all rows name the same six
    assert setup_table(trainer)["functions compared per query"] == "up to 40"
    trainer = make_trainer(BM25Estimator(), column, negatives_per_query=0)
    [batch] = batches_of(trainer)
    assert len(batch.code_rows) == 8 and setup_table(trainer)["negatives_per_query"] == 0


def test_a_negative_without_a_query_counts_as_the_least_similar_code(make_trainer, rows):
    column = with_column(rows[:8], [["def further(x): return 1"]] * 8)
    for estimator in (BM25Estimator(), initial()):
        [batch] = batches_of(fitted(make_trainer(estimator, column)))
        batch = make_trainer(estimator, column).weighed(batch) if batch.targets.weights is None else batch
        assert batch.code_rows[8] == 8 and (batch.targets.weights[:, 8] > 0).all()
    [batch] = batches_of(fitted(make_trainer(BM25Estimator(), column, loss="weighted_info_nce")))
    similarity = batch.targets.similarity
    assert torch.equal(similarity[:, 8], similarity[:, :8].amin(1))
