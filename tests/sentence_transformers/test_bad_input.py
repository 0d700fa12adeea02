"""Incompatible data sets, options and estimators give a one-line error."""

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from refusals import refused

from soft_trainer import BM25Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.sentence_transformers import CachedSoftInfoNCELoss, SoftInfoNCELoss, with_rows

PAIR = {"anchor": ["a b", "c d"], "positive": ["e f", "g h"]}


def data(**columns) -> Dataset:
    return Dataset.from_dict(PAIR | columns)


NO_LABELS = "no column 'label' with a hash of each row. Call train_dataset = with_rows"
OTHER_LABELS = "column 'label' does not contain the hashes of the texts. Call with_rows(train_dataset)"


@pytest.mark.parametrize(
    ("numbered", "dataset", "words"),
    [
        (True, DatasetDict(train=data()), "with_rows: expected one datasets.Dataset, not DatasetDict"),
        (True, {"a": data()}, "not dict. Call it for each data set in a dict"),
        (True, data().to_iterable_dataset(), "not IterableDataset"),
        (True, data(score=[0.1, 0.2]), "with_rows: the data set already has a column 'score'"),
        (True, with_rows(data()), "with_rows: the data set already has a column 'label'"),
        (False, data(), NO_LABELS),
        (False, data(label=[0.0, 1.0]), OTHER_LABELS),
        (False, data(label=[1, 1]), OTHER_LABELS),
        (False, data(label=["0", "1"]), OTHER_LABELS),
        (False, with_rows(data()).select([]), NO_LABELS),
        (False, data(label=[0, 1]).remove_columns("positive"), "but the columns are anchor, label"),
        (False, data(label=[0, 1], length=[3, 4]), "column 'length' would count as negatives. Call with_rows"),
        (True, data(negative=[3, 4]), "column 'negative' does not contain text"),
        (False, data(label=[0, 1], negative=["x", None]), "column 'negative' has no text in row 2"),
        (False, {"a": data(label=[0, 1])}, "create a separate loss for each data set"),
    ],
)
def test_data_sets_that_cannot_be_labelled_or_have_no_usable_labels(numbered, dataset, words, sentence_transformer):
    with refused(words):
        with_rows(dataset) if numbered else SoftInfoNCELoss(sentence_transformer, BM25Estimator(), dataset)


@pytest.mark.parametrize(
    ("estimator", "options", "words"),
    [
        (BM25Estimator(), {"weighting": "positive_aware"}, "BM25Estimator does not compare queries with functions"),
        (BM25Estimator(), {"weighting": "eq5"}, "weighting='eq5': use one of linear, positive_aware"),
        (BM25Estimator(), {"aplha": 1.0}, "SoftInfoNCELoss has no option aplha; use scale, similarity_fct, "),
        (BM25Estimator(), {"negatives_per_query": 1}, "SoftInfoNCELoss has no option negatives_per_query"),
        (BM25Estimator(), {"alpha": -1.0}, "alpha=-1.0: must be 0 or more"),
        (BM25Estimator(), {"false_negatives": "drop"}, "false_negatives='drop': use one of mask, positives, ignore"),
        (BM25Estimator(), {"scale": 0}, "scale=0: must be above 0"),
        (None, {"loss": "soft_info_nce"}, "loss=soft_info_nce needs an estimator"),
        (
            BM25Estimator(),
            {"teacher": "a/b"},
            "teacher=a/b: a teacher is the estimator, so it cannot be combined",
        ),
        (InitialModelEstimator(), {}, "use SentenceTransformerEstimator()"),
        (BM25Estimator, {}, "estimator: expected an object such as BM25Estimator(), not <class"),
        ("bm25", {}, "estimator: expected an object such as BM25Estimator(), not 'bm25'"),
        (BM25Estimator(), {"alpha": "2"}, "alpha='2': expected a number, not text"),
        (BM25Estimator("docstring_words"), {}, "BM25 reads column 'docstring_words'"),
    ],
)
def test_options_that_cannot_work(estimator, options, words, sentence_transformer):
    with refused(words):
        SoftInfoNCELoss(sentence_transformer, estimator, with_rows(data()), **options)


@pytest.mark.parametrize("columns", [{"repo": ["r", "s"]}, {"repo": ["r", "s"], "stars": [1, None]}])
def test_columns_that_are_not_negatives_are_named_and_not_used(columns, capsys):
    rows = with_rows(data(negative=["i", "j"], **columns))
    assert f"with_rows: not using {', '.join(map(repr, columns))}; only columns named" in capsys.readouterr().err
    assert rows.column_names == ["anchor", "positive", "negative", "label"]
    assert rows["label"][:] == with_rows(data(negative=["i", "j"]))["label"][:]
    assert "not using" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("estimator", "options", "said"),
    [(None, {}, True), (None, {"loss": "info_nce"}, False), (BM25Estimator(), {}, False)],
)
def test_a_loss_without_weights_is_reported(sentence_transformer, capsys, estimator, options, said):
    SoftInfoNCELoss(sentence_transformer, estimator, with_rows(data()), **options)
    assert ("SoftInfoNCELoss without an estimator or a teacher is InfoNCE" in capsys.readouterr().err) == said


def test_a_negative_without_a_query_is_as_little_similar_as_the_least_similar_code(sentence_transformer):
    rows = with_rows(Dataset.from_dict({"anchor": ["a b", "a", "c"], "positive": ["e", "f", "g"]}))
    loss = SoftInfoNCELoss(sentence_transformer, BM25Estimator(), rows, loss="weighted_info_nce")
    known = loss.estimator.similarity(range(3), range(3))
    negatives = with_rows(Dataset.from_dict(rows.remove_columns("label")[:] | {"negative": ["g", "x", "y"]}))
    loss = SoftInfoNCELoss(sentence_transformer, BM25Estimator(), negatives, loss="weighted_info_nce")
    targets, _ = loss.target_maker.find_positives(np.arange(3), np.arange(5), torch.arange(3))
    found = loss.target_maker.add_weights(targets, np.arange(3), np.arange(5)).similarity
    torch.testing.assert_close(found[:, :3], known.float())
    assert (found[:, 3:] == found[:, :3].amin(1, keepdim=True)).all()


def test_positive_aware_weights_say_nothing_of_beta(train_dataset, sentence_transformer, features_of):
    estimator = BM25Estimator(document_column="code_tokens")
    loss = SoftInfoNCELoss(sentence_transformer, estimator, train_dataset, weighting="positive_aware", cancel="top_k")
    with refused("N=2 functions, too few for loss=soft_info_nce, cancel=top_k: the smallest N"):
        loss(*features_of(sentence_transformer, train_dataset, range(2)))


@pytest.mark.slow
def test_two_losses_of_one_estimator_keep_their_own_rows(sentence_transformer):
    estimator = BM25Estimator()
    first = SoftInfoNCELoss(sentence_transformer, estimator, with_rows(data()))
    before = first.estimator.similarity([0, 1], [0, 1])
    other = Dataset.from_dict({"anchor": ["a", "a b", "c"], "positive": ["e", "f", "g"]})
    second = SoftInfoNCELoss(sentence_transformer, estimator, with_rows(other))
    assert torch.equal(first.estimator.similarity([0, 1], [0, 1]), before)
    assert second.estimator.similarity([2], [0, 1, 2]).shape == (1, 3)


@pytest.mark.parametrize("kind", [SoftInfoNCELoss, CachedSoftInfoNCELoss])
def test_batches_that_do_not_fit(kind, train_dataset, sentence_transformer, features_of):
    loss = kind(sentence_transformer, BM25Estimator(), train_dataset)
    small, large = (features_of(sentence_transformer, train_dataset, range(size)) for size in (4, 5))
    features, labels = small
    no_labels = "the batch of 4 rows has no hashes in the column 'label'"
    for wrong, words in (
        (None, no_labels),
        (torch.tensor([0.5, 1.0, 0.0, 3.0]), no_labels),
        (torch.tensor([[0, 1, 2, 3]]), no_labels),
        (torch.cat([labels[:3], labels[3:] + 1]), f"train_dataset has label {labels[3] + 1}"),
        (torch.arange(4), "no row of the loss's train_dataset has label 0"),
    ):
        with refused(words):
            loss(features, wrong)
    with refused("each query is compared with N=4 functions, too few", "the smallest N that works is 5"):
        loss(*small)
    for given in (features[:1], [*features, features[1]]):
        with refused(f"the batch has {len(given)} columns of texts, but the loss's train_dataset", "has 2"):
            loss(given, labels)
    loss(*large)
    assert torch.isfinite(loss(*small))  # the short batch at the end of an epoch


def test_the_columns_of_queries_and_functions_may_be_named_and_ids_are_refused(capsys):
    rows = Dataset.from_dict(
        {"ticket_id": ["101", "102"], "text": ["a", "b"], "fix": ["x", "y"], "negative": ["v", "w"]}
    )
    for given, column in ((rows, "ticket_id"), (rows.select_columns(["text", "ticket_id"]), "ticket_id")):
        with refused(f"with_rows: column {column!r} contains distinct numbers, which are ids rather than texts"):
            with_rows(given)
    named = with_rows(rows, query_column="text", code_column="fix")
    assert named.column_names == ["text", "fix", "negative", "label"]
    assert "not using 'ticket_id'" in capsys.readouterr().err
    plain = with_rows(rows.select_columns(["text", "fix", "negative"]))
    assert named["label"][:] == plain["label"][:]
    for columns, message in (
        ({"query_column": "text"}, "set both query_column and code_column"),
        ({"query_column": "text", "code_column": "text"}, "set both query_column and code_column, to two different"),
        ({"query_column": "txt", "code_column": "fix"}, "query_column=txt: no such column; the rows have ticket_id"),
    ):
        with refused(message):
            with_rows(rows, **columns)
