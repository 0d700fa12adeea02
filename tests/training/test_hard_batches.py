"""Hard batches through the trainer: clustered batches, extra negatives, weights, several right answers."""

import copy
import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from soft_trainer import BM25Estimator, losses
from soft_trainer.data import neighbours
from soft_trainer.data.global_batches import GlobalRows
from soft_trainer.data.negative_files import write_negatives
from soft_trainer.data.negatives import Negatives
from soft_trainer.data.tokens import SIDES
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, SimCSEEstimator
from soft_trainer.estimators.mixture import MixtureEstimator
from soft_trainer.loss_settings import LOSSES
from soft_trainer.training.hard_batches import training_texts

OWN = {"negatives_per_query": 2, "negative_candidates": 6}
SIMILAR = {"train_sampling_strategy": "similar", "group_size": 4}


def bm25():
    return BM25Estimator(document_column="code_tokens")


def initial():
    return InitialModelEstimator(cache_dir=None)


@pytest.fixture(scope="module")
def exact_model(_model):
    """The tiny encoder in float64 without dropout."""
    model = copy.deepcopy(_model).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.fixture
def make_trainer(trainer_of, _model, dataset):
    def make(estimator=None, rows=None, model=None, collator=None, **options):
        arguments = {"train_dataset": dataset if rows is None else rows, "eval_dataset": None, "codebase": None}
        arguments |= {"model": copy.deepcopy(_model if model is None else model), "data_collator": collator}
        return trainer_of(estimator=estimator, arguments=arguments, **{"max_steps": -1} | options)

    return make


def fitted(trainer):
    """The trainer as it is after `on_train_begin`."""
    prepared = trainer.prepare_rows()
    if trainer.estimator is not None:
        trainer.estimator_callback.fit(prepared.rows)
    return trainer


def batches_of(trainer, epoch: int = 0) -> list:
    loader = trainer.get_train_dataloader()
    loader.set_epoch(epoch)
    return list(loader)


@pytest.fixture(scope="module")
def topics(rows):
    """48 rows: six of each of eight topics, whose queries share a word."""
    return Dataset.from_list(
        [
            rows[0]
            | {
                "url": f"https://example.org/{topic}/{number}",
                "docstring": f"topic{topic} about {number} {topic * 6 + number}",
                "docstring_tokens": [f"topic{topic}", f"about{number}", str(topic * 6 + number)],
                "code": f"def f{topic}_{number}(): return {topic}",
                "code_tokens": ["def", f"f{topic}_{number}", "return", str(topic)],
            }
            for topic in range(8)
            for number in range(6)
        ]
    )


# ---- Clustered batches ----


@pytest.mark.parametrize("by", ["bm25", "estimator"])
def test_clustered_batches_hold_whole_topics_and_every_row_once_an_epoch(make_trainer, topics, by):
    options = {"train_sampling_strategy": "similar", "group_size": 6, "per_device_train_batch_size": 12}
    trainer = fitted(make_trainer(None if by == "bm25" else BM25Estimator(), topics, similar_by=by, **options))
    epochs = [[batch.rows for batch in batches_of(trainer, epoch)] for epoch in range(2)]
    for batches in epochs:
        assert sorted(np.concatenate(batches)) == list(range(48))
        assert [len(set(rows // 6)) for rows in batches] == [2, 2, 2, 2]
    assert not np.array_equal(epochs[0], epochs[1])
    shuffled = fitted(make_trainer(None if by == "bm25" else BM25Estimator(), topics, similar_by=by, **options))
    assert np.array_equal(epochs[1], [batch.rows for batch in batches_of(shuffled, 1)])
    apart = options | {"random_share": 1.0}
    mixed = fitted(make_trainer(None, topics, similar_by="bm25", **apart))
    assert min(len(set(batch.rows // 6)) for batch in batches_of(mixed)) > 2


def test_groups_are_nearest_by_brute_force(make_trainer):
    trainer = fitted(make_trainer(initial(), **SIMILAR))
    similarity = trainer.estimator.similarity(range(24), range(24))
    order = similarity.fill_diagonal_(-torch.inf).argsort(1, descending=True)
    rank = order.argsort(1).numpy()
    first_groups = [batch.rows[:4] for batch in batches_of(trainer)]
    # The first group of an epoch that was begun when all rows were free is a row with its three nearest.
    assert any(sorted(rank[group[0], group[1:]]) == [0, 1, 2] for group in first_groups)
    mates = np.concatenate([rank[group[0], group[1:]] for group in first_groups])
    assert mates.mean() < 6  # of 23: 11 in a random batch


def test_nearest_and_equal_texts_are_kept_apart(make_trainer, rows):
    twins = Dataset.from_list([*rows[:20], *(row | {"url": f"{row['url']}-twin"} for row in rows[:4])])
    trainer = fitted(make_trainer(initial(), twins, **SIMILAR, nearest_apart=1))
    similarity = trainer.estimator.similarity(range(24), range(24))
    nearest = similarity.fill_diagonal_(-torch.inf).argmax(1).numpy()
    for batch in batches_of(trainer):
        assert not set(batch.rows) & set(nearest[batch.rows])
    trainer = fitted(make_trainer(initial(), twins, **SIMILAR))
    assert any(batch.duplicates for batch in batches_of(trainer))  # the nearest of a row is its twin
    trainer = fitted(make_trainer(initial(), twins, **SIMILAR, equal_texts_apart=True))
    assert not any(batch.duplicates for batch in batches_of(trainer))


# ---- Extra negatives of a row ----


def test_mined_negatives_are_the_nearest_codes_and_meet_their_own_query(make_trainer):
    trainer = fitted(make_trainer(initial(), negatives_per_query=2, negative_temperature=0.0))
    similarity = trainer.estimator.similarity(range(24), range(24)).fill_diagonal_(-torch.inf)
    nearest_two = similarity.argsort(1, descending=True)[:, :2].numpy()
    for batch in batches_of(trainer):
        number = len(batch.rows)
        assert batch.code_rows[:number].tolist() == batch.rows.tolist() and len(batch.code_rows) > number
        assert batch.negatives[:, :number].all()  # no duplicates here
        for query, row in enumerate(batch.rows):
            met = batch.code_rows[batch.negatives[query].numpy()]
            assert set(met) == set(batch.rows) | set(nearest_two[row])


def test_own_negatives_may_meet_all_queries(make_trainer):
    trainer = fitted(make_trainer(initial(), **OWN, negatives_meet="all"))
    batch = batches_of(trainer)[0]
    assert len(batch.code_rows) > 8 and (batch.negatives is None or batch.negatives.all())


def with_column(rows, values) -> Dataset:
    return Dataset.from_list([row | {"negatives": value} for row, value in zip(rows, values, strict=True)])


def test_the_column_names_rows_by_url_and_further_codes_by_text(make_trainer, rows, tokenizer, profile):
    further = "def unrelated(thing): return thing.fly()"
    values = [[rows[5]["url"], further], None, [], [rows[0]["url"]], *[[further]] * 4]
    trainer = fitted(make_trainer(bm25(), with_column(rows[:8], values), negatives_per_query=2))
    [batch] = batches_of(trainer)
    assert batch.code_rows.tolist()[8:] == [8]  # urls of rows of the batch add no column
    assert [bool(batch.negatives[place, 8]) for place in np.argsort(batch.rows)] == [True, *[False] * 3, *[True] * 4]
    tokens = trainer._train_batches().tokens["code"][8]
    assert further.replace(" ", "") in tokenizer.decode(tokens).replace(" ", "")
    check_loss(trainer, batch)


def check_loss(trainer, batch):
    """Checks that the loss of a step is Soft-InfoNCE of the texts that the batch names."""
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, batch)
        tokens, collator = trainer._train_batches().tokens, trainer.data_collator
        queries = trainer.embeddings(trainer.model, collator.side([tokens["query"][int(r)] for r in batch.rows]))
        codes = trainer.embeddings(trainer.model, collator.side([tokens["code"][int(r)] for r in batch.code_rows]))
    scores = 20 * torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(codes).T
    similarity = trainer.estimator.similarity(batch.rows, batch.code_rows)
    weights = trainer.loss_settings.weights(similarity, batch.positives, batch.negatives)
    assert (weights > 0).sum() == len(batch.rows) + batch.negatives.sum() - batch.negatives.diagonal().sum()
    expected = losses.soft_info_nce(scores.double(), weights.double())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_file_of_negatives_is_read(make_trainer, dataset, profile, tmp_path):
    starts = np.arange(0, 25)
    codes = np.array([(row + 12) % 24 for row in range(23)] + [24])
    scores, own = np.full(24, 0.5, np.float32), np.ones(24, np.float32)
    negatives = Negatives(
        starts, codes, scores, own, [{"code": "def further(): pass", "url": "https://example.org/x"}]
    )
    write_negatives(tmp_path / "negatives.jsonl.gz", negatives, training_texts(dataset, profile), "test")
    trainer = fitted(make_trainer(bm25(), negatives=str(tmp_path / "negatives.jsonl.gz"), negatives_per_query=1))
    for batch in batches_of(trainer):
        for query, row in enumerate(batch.rows):
            met = batch.code_rows[batch.negatives[query].numpy()]
            assert set(met) == {*batch.rows, 24 if row == 23 else (row + 12) % 24}
    check_loss(trainer, batch)
    other = dataset.select(range(1, 24))
    with pytest.raises(UserError, match="made for other rows"):
        make_trainer(bm25(), other, negatives=str(tmp_path / "negatives.jsonl.gz"), negatives_per_query=1).train()


def test_draws_change_with_the_epoch_alone_also_in_data_workers(make_trainer):
    drawn = []
    for workers in (0, 1):
        trainer = fitted(make_trainer(initial(), **OWN, dataloader_num_workers=workers))
        drawn.append([[b.code_rows.tolist() for b in batches_of(trainer, epoch)] for epoch in range(2)])
    assert drawn[0] == drawn[1]
    batches = trainer._train_batches()
    drawn = [batches.__getitems__(GlobalRows(range(8), epoch)).code_rows.tolist() for epoch in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("meet", ["own", "all"])
def test_two_processes_have_the_columns_of_one(make_trainer, gather, meet):
    trainer = fitted(make_trainer(initial(), **OWN, weighting="positive_aware", negatives_meet=meet))
    rows, whole = list(range(3, 12)), trainer._train_batches()
    shares = []
    for rank in range(2):
        share = copy.copy(whole)
        share.rank, share.world_size, share.gather = rank, 2, gather
        shares.append(share.__getitems__(rows))
    alone = [whole.__getitems__(rows)] if gather else [whole.__getitems__(rows[:5]), whole.__getitems__(rows[5:])]

    def met(batch) -> dict:
        own = batch.rows.tolist()
        mask = np.ones((len(own), len(batch.code_rows)), bool) if batch.negatives is None else batch.negatives.numpy()
        weights = batch.loss_inputs["weights"]
        return {
            row: {
                int(code): (mask[query, column], pytest.approx(weights[query, column].item(), abs=1e-6))
                for column, code in enumerate(batch.code_rows)
            }
            for query, row in enumerate(own)
        }

    expected, together = {}, {}
    for batch in alone:
        expected |= met(batch)
    for batch in shares:
        together |= met(batch)
        start = batch.code_sizes[0] if gather and batch is shares[1] else 0
        assert batch.positives.tolist() == list(range(start, start + len(batch.rows)))
        assert batch.code_rows[batch.positives].tolist() == batch.rows.tolist()
    assert together == expected
    for side in SIDES:  # as many forward passes on each process
        assert len({len(getattr(batch, side).chunks) for batch in shares}) == 1
    assert sum(shares[0].code_sizes) == (len(shares[0].code_rows) if gather else sum(len(b.code_rows) for b in shares))


# ---- The step ----


def gradients(trainer, batch) -> tuple[float, list]:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    loss = trainer.training_step(trainer.model, batch)
    return float(loss), [p.grad.clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        OWN,
        OWN | {"negatives_meet": "all", "duplicates": "positives", "order_loss_weight": 0.5},
        {"duplicates": "positives", "weighting": "positive_aware"},
        {"loss": "kl_regularization", "order_loss_weight": 0.5} | OWN,
        OWN | {"weighting": "positive_aware", "duplicates": "positives", "distill_weight": 0.5},
    ],
    ids=["own", "own-all-positives-order", "positives", "kl", "own-positives-distill"],
)
def test_gradient_caching_changes_nothing(make_trainer, rows, exact_model, options):
    twins = Dataset.from_list([*rows[:9], *(row | {"url": f"{row['url']}-twin"} for row in rows[:3])])
    results = []
    for chunk in (None, 3):
        trainer = fitted(
            make_trainer(
                initial(),
                twins,
                exact_model,
                per_device_train_batch_size=12,
                gradient_cache_chunk_size=chunk,
                **options,
            )
        )
        [batch] = batches_of(trainer)
        assert batch.duplicates == 6 and (batch.also is not None) == (options.get("duplicates") == "positives")
        results.append(gradients(trainer, batch))
    (plain, expected), (cached, found) = results
    assert cached == pytest.approx(plain, abs=1e-10)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-10, rtol=0)


ADDED = {
    "order_loss_weight": lambda *batch, **columns: losses.order_loss(batch[0], batch[1], 1.0, batch[2], **columns),
    "distill_weight": lambda *batch, **columns: losses.kl_divergence(batch[0], batch[1], 1.0, batch[2], **columns),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_further_loss_stands_beside_every_loss_with_inputs_from_the_workers(make_trainer, exact_model, loss, name):
    values = []
    for in_workers, weight in ((True, 0.7), (False, 0.7), (True, 0.0)):
        estimator = bm25()
        estimator.in_workers = in_workers
        trainer = fitted(make_trainer(estimator, model=exact_model, loss=loss, **{name: weight}, **OWN))
        batch = batches_of(trainer)[0]
        assert (batch.loss_inputs is not None) == (in_workers and (weight > 0 or loss != "info_nce"))
        with torch.no_grad():
            queries, codes = (trainer.embeddings(trainer.model, getattr(batch, side)) for side in SIDES)
            values.append(trainer.batch_loss(queries, codes, batch).item())
    scores = 20 * torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(codes).T
    similarity = trainer.estimator.similarity(batch.rows, batch.code_rows)
    added = ADDED[name](scores, similarity, batch.positives, negatives=batch.negatives)
    assert added > 0.02
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert values[0] - values[2] == pytest.approx(0.7 * added.item(), abs=1e-6)


def test_distilling_from_the_initial_model_adds_nothing_before_the_first_step(make_trainer, exact_model):
    values = []
    for options in ({}, {"distill_weight": 1.0}, {"distill_weight": 1.0, "distill_temperature": 2.0}):
        trainer = fitted(make_trainer(initial(), model=exact_model, weighting="positive_aware", **options, **SIMILAR))
        batch = batches_of(trainer)[0]
        with torch.no_grad():
            values.append(trainer.compute_loss(trainer.model, batch).item())
    assert values[1] == pytest.approx(values[0], abs=1e-6)
    assert values[2] > values[0] + 1e-3


@pytest.mark.parametrize(
    "options, counts",
    [({}, "mask"), ({"duplicates": "positives"}, "positives"), ({"duplicates": "ignore"}, "ignore")],
)
def test_duplicates_are_left_out_or_right_answers_or_negatives(make_trainer, rows, options, counts):
    twin = rows[0] | {"code": "def other(): pass", "code_tokens": ["other"]}
    trainer = fitted(make_trainer(bm25(), Dataset.from_list([*rows[:7], twin]), **options))
    [batch] = batches_of(trainer)
    places = np.argsort(batch.rows)
    first, last = int(places[0]), int(places[7])
    assert (batch.negatives is None) == (counts == "ignore")
    assert (batch.also is None) == (counts != "positives")
    if counts != "ignore":
        assert not batch.negatives[first, last] and not batch.negatives[last, first]
        assert batch.duplicates == int((~batch.negatives).sum()) == 2
    if counts == "positives":
        assert batch.also[first, last] and batch.also[last, first] and int(batch.also.sum()) == 2


def test_a_duplicate_that_a_query_does_not_meet_is_no_right_answer(make_trainer, rows):
    # Row 1's own negative is row 9, which has the query of row 0. Row 0 does not meet it.
    twin = rows[9] | {"docstring": rows[0]["docstring"], "docstring_tokens": rows[0]["docstring_tokens"]}
    chosen = with_column([*rows[:9], twin], [None, [twin["url"]], *[None] * 8])
    options = {"negatives_per_query": 1, "duplicates": "positives", "alpha": 0.5}
    batches = fitted(make_trainer(bm25(), chosen, **options))._train_batches()
    batch = batches.__getitems__([0, 1, 2])
    assert batch.code_rows.tolist() == [0, 1, 2, 9]
    assert batch.negatives[:, 3].tolist() == [False, True, False]
    assert batch.also is None and batch.duplicates == 0
    assert fitted(make_trainer(bm25(), chosen, negatives_meet="all", **options))._train_batches().__getitems__(
        [0, 1, 2]
    ).also.nonzero().tolist() == [[0, 3]]


def test_defaults_of_the_weights_are_the_estimators(make_trainer):
    loss = make_trainer(initial(), weighting="positive_aware").loss_settings
    assert (loss.margin, loss.temperature) == (
        0.0,
        pytest.approx(1.0),
    )  # 0.05 x the score scale of 20
    loss = make_trainer(initial()).loss_settings
    assert (loss.alpha, loss.beta, loss.temperature) == (1.3, 0.7, 2.0)
    loss = make_trainer(bm25(), weighting="positive_aware", margin=0.5, temperature=0.0).loss_settings
    assert (loss.margin, loss.temperature) == (0.5, 0.0)
    assert make_trainer(bm25(), weighting="positive_aware").loss_settings.temperature == 1.0


# ---- Resume ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [OWN, SIMILAR, OWN | SIMILAR | {"dataloader_num_workers": 1}],
    ids=["own", "similar", "both-workers"],
)
def test_resumed_in_the_second_epoch_to_the_bit(make_trainer, options, tmp_path):
    options = options | {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4, "save_total_limit": None}
    options |= {"learning_rate": 5e-3}
    whole = make_trainer(initial(), weighting="positive_aware", **options)
    whole.train()
    assert whole.state.global_step == 9
    resumed = make_trainer(initial(), weighting="positive_aware", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for name in ("_queries", "_codes"):
        assert np.array_equal(getattr(whole.estimator, name), getattr(resumed.estimator, name))
    trained = whole.estimator.similarity(range(24), range(24))
    whole.estimator.fit(whole.train_dataset)
    assert not torch.allclose(trained, whole.estimator.similarity(range(24), range(24)), atol=0.1)
    with pytest.raises(UserError, match="resume with a new trainer"):
        whole.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))


@pytest.mark.slow
def test_the_initial_model_is_read_once_a_training_also_if_it_starts_again(make_trainer):
    trainer = make_trainer(initial(), num_train_epochs=1, learning_rate=0.1)
    trainer.train()
    scores = trainer.estimator.similarity(range(24), range(24))
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)  # auto_find_batch_size
    assert torch.equal(trainer.estimator.similarity(range(24), range(24)), scores)
    trainer.train()
    assert not torch.allclose(trainer.estimator.similarity(range(24), range(24)), scores, atol=0.1)


# ---- Bad input ----


@pytest.mark.parametrize(
    "estimator, options, says",
    [
        (BM25Estimator, {"weighting": "positive_aware"}, "BM25Estimator does not compare queries with codes"),
        (lambda: SimCSEEstimator("x"), {"weighting": "positive_aware"}, "SimCSEEstimator does not compare"),
        (lambda: MixtureEstimator([bm25(), initial()]), {"weighting": "positive_aware"}, "MixtureEstimator does not"),
        (None, SIMILAR, "no estimator has no vectors"),
        (None, OWN, "mining needs an estimator"),
        (bm25, {"negatives": "none.jsonl"}, "--negatives_per_query"),
        (bm25, OWN | {"negatives": "none.jsonl"}, "none.jsonl: no such file"),
        (bm25, OWN | {"negative_ranks": "5,2"}, "negative_ranks=5,2"),
        (None, {"order_loss_weight": 1.0}, "needs an estimator"),
        (None, {"distill_weight": 1.0}, "distill_weight=1.0 needs an estimator"),
    ],
)
def test_what_cannot_work_is_refused_by_the_constructor(make_trainer, estimator, options, says):
    with pytest.raises(UserError, match=says) as error:
        make_trainer(estimator and estimator(), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"negatives_per_query": 1, "negative_max_score": -1000.0}, "none of .* is left by negative_max_score"),
        ({"negatives_per_query": 24}, "negatives_per_query=24: no row has more than"),
        (SIMILAR | {"group_size": 0}, "group_size=0"),
        (SIMILAR | {"random_share": 1.5}, "random_share=1.5"),
    ],
)
def test_what_the_rows_do_not_allow_is_refused_before_the_first_step(make_trainer, options, says):
    with pytest.raises(UserError, match=says) as error:
        make_trainer(initial(), **options).train()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_estimator_without_vectors_mines_by_comparing_all_pairs_but_makes_no_clusters(make_trainer):
    class SameLength:
        def fit(self, dataset):
            self.lengths = torch.tensor([float(len(tokens)) for tokens in dataset["docstring_tokens"]])

        def similarity(self, query_rows, code_rows):
            return -(self.lengths[query_rows][:, None] - self.lengths[code_rows][None, :]).abs()

    with pytest.raises(UserError, match="SameLength has no vectors"):
        make_trainer(SameLength(), **SIMILAR)
    trainer = fitted(make_trainer(SameLength(), **OWN))
    negatives = trainer._prepared.own_negatives.negatives
    lengths = trainer.estimator.lengths
    for row in range(24):
        away = (lengths - lengths[row]).abs()
        away[row] = torch.inf
        own = slice(negatives.starts[row], negatives.starts[row + 1])
        assert away[negatives.codes[own]].sort().values.tolist() == away.sort().values[:6].tolist()
    trainer.train()


def test_a_url_that_is_no_code_is_named_with_its_row(make_trainer, rows):
    values = [*[None] * 5, ["https://example.org/nowhere"], *[None] * 2]
    with pytest.raises(UserError, match="row 6: .*https://example.org/nowhere"):
        make_trainer(bm25(), with_column(rows[:8], values), negatives_per_query=1).train()


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [BM25Estimator, lambda: MixtureEstimator([BM25Estimator(), bm25()])])
def test_codes_without_a_query_need_an_estimator_that_reads_codes(make_trainer, rows, estimator):
    column = with_column(rows[:8], [["def further(x): return 1"]] * 8)
    with pytest.raises(UserError, match=r"not training rows \(1 of them\) have no query, but BM25Estimator"):
        make_trainer(estimator(), column, negatives_per_query=1, num_train_epochs=1).train()
    make_trainer(estimator(), column, negatives_per_query=1, loss="info_nce", num_train_epochs=1).train()
    make_trainer(MixtureEstimator([bm25(), initial()]), column, negatives_per_query=1, num_train_epochs=1).train()


def test_other_strategies_leave_code_only_rows_alone(make_trainer, rows):
    column = with_column(rows[:8], [["def further(x): return 1"]] * 8)
    for strategy in ("no_duplicates", "group_by_length", "one_language", "similar"):
        options = {"per_device_train_batch_size": 4, "negatives_per_query": 1, "alpha": 0.5, "group_size": 2}
        trainer = fitted(make_trainer(bm25(), column, train_sampling_strategy=strategy, **options))
        batches = batches_of(trainer)
        assert sorted(row for batch in batches for row in batch.rows) == list(range(8))
        assert all(batch.code_rows[-1] == 8 for batch in batches)


def test_a_collator_of_ones_own_sees_pairs_only(make_trainer):
    with pytest.raises(UserError, match="data_collator: collates pairs"):
        make_trainer(bm25(), collator=lambda features: features, **OWN)


# ---- The script ----


@pytest.mark.slow
def test_the_script_takes_the_column_of_a_file(script, write_folder, rows, tmp_path):
    further = "def further(x): return x.away()"
    train = [row | {"negatives": further if number % 2 else [rows[0]["url"]]} for number, row in enumerate(rows[:8])]
    common = {"data_dir": write_folder(train=train), "language": "python", "use_cpu": True, "max_steps": 1}
    common |= {"from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32, "lexical": False}
    common |= {"per_device_train_batch_size": 8, "model_card": False, "output_dir": tmp_path / "run", "examples": 0}
    weights = {"weighting": "positive_aware", "margin": 0.5, "duplicates": "positives"}
    code, said = script(**common, **weights, bm25_document_column="code_tokens", negatives_per_query=1)
    assert code == 0, said
    assert any(line.startswith("own negatives: 0.9 candidates a row, 1 of 8 rows") for line in said)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["negatives_per_query"] == record["training"]["negatives_per_query"] == 1
    assert record["training"]["duplicates"] == "positives"
    names = ("loss", "weighting", "margin", "temperature")
    assert [record["loss"][name] for name in names] == ["soft_info_nce", "positive_aware", 0.5, 1.0]
    assert "alpha" not in record["loss"]
    for options, says in (
        ({"negatives_per_query": 1}, "not training rows"),
        ({"negatives_per_query": 3, "bm25_document_column": "code_tokens"}, "no row has more than 1"),
        ({"estimator": "initial_model"}, "the encoder starts at random"),
    ):
        code, said = script(**common, **options, overwrite=True)
        assert code == 2 and says in said[-1] and not any("training" in line for line in said[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_neighbours_by_bm25_are_kept_where_the_options_say(script, data_dir, tmp_path, monkeypatch, kept):
    stored = []
    monkeypatch.setattr(neighbours, "store_arrays", lambda folder, *_: stored.append(folder))
    options = {"estimator": "none", "train_sampling_strategy": "similar", "similar_by": "bm25", "max_steps": 1}
    cache = {"estimator_cache_dir": tmp_path / "kept"} if kept else {"no_estimator_cache": True}
    encoder = {"from_scratch": "32x1", "vocabulary_size": 400, "per_device_train_batch_size": 8, "use_cpu": True}
    code, _ = script(data_dir=data_dir, language="python", output_dir=tmp_path / "out", **options, **cache, **encoder)
    assert code == 0 and stored == ([str(tmp_path / "kept")] if kept else [])
