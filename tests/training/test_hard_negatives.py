"""Training with hard negatives, either mined or from a column of the rows."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import normalize
from trainings import OWN, SameLength, batches_of, bm25, fitted, initial

from soft_trainer import BM25Estimator, losses
from soft_trainer.encoders.encoding import encode, pad
from soft_trainer.errors import UserError
from soft_trainer.run.record import setup_table
from soft_trainer.training.sampler import GlobalRows


def with_column(rows, values) -> Dataset:
    return Dataset.from_list([row | {"negatives": value} for row, value in zip(rows, values, strict=True)])


def met_by(batch, query: int) -> set[int]:
    """Returns the corpus indices of the codes that a query is compared with."""
    return set(batch.code_rows[batch.targets.negatives[query].numpy()].tolist())


def check_loss(trainer, batch):
    """Checks that a step's loss is the Soft-InfoNCE loss of the batch's texts."""
    trainer.model.eval()
    with torch.no_grad(), trainer.running():
        loss = trainer.compute_loss(trainer.model, batch)
        tokens = trainer._train_batches().tokens
        texts = {"query": batch.rows, "code": batch.code_rows}
        padded = [pad([tokens[side][int(row)] for row in rows], 1) for side, rows in texts.items()]
        queries, codes = (encode(trainer.model, trainer.encoder, inputs) for inputs in padded)
    similarity = trainer.estimator.similarity(batch.rows, batch.code_rows)
    negatives = batch.targets.negatives
    weights = trainer.criterion.targets(batch.targets.positives, negatives, similarity=similarity).weights
    assert (weights > 0).sum() == len(batch.rows) + negatives.sum() - negatives.diagonal().sum()
    scores = 20 * normalize(queries) @ normalize(codes).T
    expected = losses.soft_info_nce(scores.double(), weights.double())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


# ---- Mined ----


def test_mined_negatives_are_similar_codes_below_the_ratio_and_meet_their_own_query(make_trainer):
    trainer = fitted(make_trainer(initial(), negatives_per_query=2, negative_ratio=0.98))
    similarity = trainer.estimator.similarity(range(24), range(24))
    own = similarity.diagonal()[:, None]
    allowed = similarity <= own - 0.02 * own.abs()
    assert 0 < int(allowed.sum()) < 24 * 23
    added = 0
    for batch in batches_of(trainer):
        number = len(batch.rows)
        assert batch.code_rows[:number].tolist() == batch.rows.tolist()
        assert batch.targets.negatives[:, :number].all()  # this batch has no duplicates
        for query, row in enumerate(batch.rows.tolist()):
            further = met_by(batch, query) - set(batch.rows.tolist())
            assert len(further) <= 2 and all(allowed[row, code] for code in further)
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
    assert [bool(batch.targets.negatives[row, 8]) for row in np.argsort(batch.rows)] == [
        True,
        *[False] * 3,
        *[True] * 4,
    ]
    tokens = trainer._train_batches().tokens["code"][8]
    assert further.replace(" ", "") in tokenizer.decode(tokens).replace(" ", "")
    check_loss(trainer, batch)


def test_a_duplicate_that_a_query_is_not_compared_with_is_not_a_positive(make_trainer, rows):
    # Row 1's negative is row 9, which has row 0's query, so row 0 is not compared with it.
    twin = rows[9] | {"docstring": rows[0]["docstring"], "docstring_tokens": rows[0]["docstring_tokens"]}
    chosen = with_column([*rows[:9], twin], [None, [twin["url"]], *[None] * 8])
    options = {"negatives_per_query": 1, "false_negatives": "positives", "alpha": 0.5}
    own = make_trainer(bm25(), chosen, **options)._train_batches().__getitems__([0, 1, 2])
    assert own.code_rows.tolist() == [0, 1, 2, 9]
    assert own.targets.negatives[:, 3].tolist() == [False, True, False]
    assert own.targets.extra_positives is None and own.false_negatives == 0


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
    assert batch.targets.negatives[:, 8:].sum(1).tolist() == [4] * 8
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


# ---- On two processes ----


# ---- Bad input ----


# ---- The script ----


@pytest.mark.slow
def test_the_script_takes_the_column_of_a_file(script, write_folder, rows, tmp_path):
    further = "def further(x): return x.away()"
    train = [row | {"negatives": further if number % 2 else [rows[0]["url"]]} for number, row in enumerate(rows[:8])]
    common = {"data_dir": write_folder(train=train), "language": "python", "use_cpu": True, "max_steps": 1}
    common |= {"from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32, "lexical": False}
    common |= {"per_device_train_batch_size": 8, "model_card": False, "output_dir": tmp_path / "run", "examples": 0}
    code, said = script(**common, weighting="positive_aware", bm25_document_column="code_tokens")
    assert code == 0, said
    assert any(line.startswith("hard negatives: 0.9 candidates per query, and 1 of 8 queries") for line in said)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["training"]["negatives_per_query"] == 1
    assert record["loss"]["weighting"] == "positive_aware" and "alpha" not in record["loss"]
