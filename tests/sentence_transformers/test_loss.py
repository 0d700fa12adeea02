"""The loss for sentence-transformers equals the loss of `SoftInfoNCETrainer`, cached or not, and trains there."""

import re
from pathlib import Path

import pytest
import torch
import trainings
from refusals import refused
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score

from soft_trainer import BM25Estimator, Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, TrainedModelEstimator
from soft_trainer.sentence_transformers import (
    CachedSoftInfoNCELoss,
    SentenceTransformerEstimator,
    SoftInfoNCELoss,
    with_rows,
)

ROWS = [3, 0, 22, 9, 1, 23, 14, 5]  # with both pairs of duplicates
DISTINCT = [3, 6, 9, 12, 15]  # all texts and negatives of these rows differ, so no loss excludes a column
BM25 = {"document_column": "code_tokens"}


@pytest.fixture
def still(sentence_transformer):
    """The tiny encoder in float64 and without dropout."""
    return trainings.still(sentence_transformer)


def loss_of(model, rows, kind=SoftInfoNCELoss, **options):
    """Makes a loss with weights from BM25 scores of queries against codes."""
    return kind(model, BM25Estimator(document_column="code_tokens"), rows, **options)


def gradients(model) -> dict[str, torch.Tensor]:
    """Returns an encoder's gradients by parameter name. The encoder may be inside a sentence-transformers model."""
    return {
        name.rsplit("model.", 1)[-1]: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def step(loss, features, labels):
    """Computes the loss and the gradients of a batch."""
    loss.model.zero_grad()
    value = loss(features, labels)
    value.backward()
    return value.item(), gradients(loss.model)


def assert_same(found, expected, tolerance=1e-6):
    assert found[0] == pytest.approx(expected[0], abs=tolerance)
    assert found[1].keys() == expected[1].keys() and len(found[1]) > 20
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=tolerance, rtol=1e-4, msg=name)


@pytest.fixture
def trainer_step(encoder_folder, long_profile, tmp_path):
    """Returns a function that computes the loss and gradients of `SoftInfoNCETrainer`'s first batch.

    The rows are in their original order, and there is no dropout.
    """

    def run(dataset, estimator, **options):
        encoder = load_encoder(encoder_folder, device="cpu")
        usual = {"per_device_train_batch_size": len(dataset), "train_sampling_strategy": "sequential", "use_cpu": True}
        trainer = SoftInfoNCETrainer(
            model=trainings.still(encoder.model),
            args=SoftInfoNCETrainingArguments(output_dir=str(tmp_path / "out"), **usual | options),
            train_dataset=dataset.rename_columns({"anchor": "docstring", "positive": "code"}),
            processing_class=encoder.tokenizer,
            encoder=long_profile,
            callbacks=[EstimatorCallback(estimator)] if estimator else [],
        )
        batch = trainer.weighed(next(iter(trainer.get_train_dataloader())))
        with trainer.running():
            value = trainer.compute_loss(trainer.model, batch)
            value.backward()
        return value.item(), gradients(trainer.model)

    return run


OPTIONS = {
    "linear": {"alpha": 1.5, "beta": 0.5, "temperature": 1.0},
    "positive_aware": {"weighting": "positive_aware", "temperature": 2.0, "margin": 0.5},
    "right twins": {"false_negatives": "positives"},
    "cancelled, twins as they are": {"cancel": "top_k", "cancel_k": 2, "false_negatives": "ignore", "floor": 0.3},
    "above the ratio": {"cancel": "ratio", "cancel_ratio": 0.7},
    "distilled": {"distill_weight": 0.5, "distill_temperature": 2.0},
    "kl": {"loss": "kl_regularization", "kl_weight": 0.3},
}


KINDS = ((SoftInfoNCELoss, {}), (CachedSoftInfoNCELoss, {"mini_batch_size": 3}))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("document_column", [None, "code_tokens"])
@pytest.mark.parametrize(("columns", "chosen"), [("pairs", ROWS), ("tuples", DISTINCT)])
def test_it_equals_the_trainer(request, name, document_column, columns, chosen, still, features_of, trainer_step):
    if OPTIONS[name].get("weighting") == "positive_aware" and document_column is None:
        pytest.skip("BM25 of queries has no similarity of a query and a function")
    if OPTIONS[name].get("cancel") == "top_k" and columns == "tuples":
        pytest.skip("of equal similarities, the first columns are cancelled, and the order of columns differs")
    batch = request.getfixturevalue(columns).select(chosen)
    estimator = BM25Estimator(document_column=document_column)
    expected = trainer_step(batch, estimator, **OPTIONS[name])
    given = features_of(still, with_rows(batch), range(len(chosen)))
    for kind, size in KINDS:
        estimator = BM25Estimator(document_column=document_column)
        assert_same(step(kind(still, estimator, with_rows(batch), **size, **OPTIONS[name]), *given), expected)


@pytest.mark.slow
def test_a_teacher_by_name_is_a_trained_model_whose_scores_the_loss_learns(pairs, still, features_of, encoder_dir):
    rows = with_rows(pairs.select(ROWS))
    given = features_of(still, rows, range(len(ROWS)))
    loss = SoftInfoNCELoss(still, train_dataset=rows, teacher=str(encoder_dir))
    options = {"loss": "info_nce", "distill_weight": 0.3}
    expected = SoftInfoNCELoss(still, TrainedModelEstimator(str(encoder_dir)), rows, **options)
    plain = SoftInfoNCELoss(still, None, rows)(*given).item()
    assert loss(*given).item() == expected(*given).item() != plain
    off = SoftInfoNCELoss(still, train_dataset=rows, teacher=str(encoder_dir), distill_weight=0.0)
    assert off(*given).item() == plain


def test_rows_are_found_by_their_texts_whatever_their_order(tuples, still, features_of):
    train_dataset = with_rows(tuples)
    given = features_of(still, train_dataset, ROWS)
    whole = step(loss_of(still, train_dataset), *given)
    assert_same(step(loss_of(still, train_dataset.shuffle(seed=5)), *given), whole, 1e-9)
    assert_same(step(loss_of(still, train_dataset), *features_of(still, train_dataset, ROWS[::-1])), whole)
    # Labels made after shuffling identify the same rows.
    shuffled = with_rows(tuples.shuffle(seed=5))
    positions = [shuffled["label"][:].index(label) for label in given[1].tolist()]
    assert_same(step(loss_of(still, train_dataset), *features_of(still, shuffled, positions)), whole)


def test_rows_of_another_data_set_are_an_error(pairs, still, features_of):
    first, second = (with_rows(pairs.select(rows)) for rows in (range(12), range(12, 24)))
    loss = loss_of(still, first)
    loss(*features_of(still, first, range(6)))
    with refused("no row of the loss's train_dataset has label"):
        loss(*features_of(still, second, range(6)))


def test_without_an_estimator_it_is_the_loss_of_sentence_transformers(tuples, still, features_of, trainer_step):
    train_dataset = with_rows(tuples)
    given = features_of(still, train_dataset, DISTINCT)
    for options, tolerance in (({}, 1e-6), ({"scale": 0.5, "similarity_fct": dot_score}, 1e-5)):
        expected = step(MultipleNegativesRankingLoss(still, **options), *given)
        assert_same(step(SoftInfoNCELoss(still, None, train_dataset, **options), *given), expected, tolerance)
    expected = step(MultipleNegativesRankingLoss(still), *given)
    for options in ({}, {"gradient_cache_chunk_size": 4}):
        assert_same(trainer_step(tuples.select(DISTINCT), None, loss="info_nce", **options), expected)


def test_in_an_evaluation_it_is_the_loss_of_sentence_transformers(tuples, sentence_transformer, features_of):
    model, train_dataset = sentence_transformer.eval(), with_rows(tuples)
    losses = [loss_of(model, with_rows(tuples), kind, **size) for kind, size in KINDS]
    features, _ = features_of(model, train_dataset, ROWS)
    theirs = MultipleNegativesRankingLoss(model)
    with torch.no_grad():
        for labels in (None, torch.full((8,), 999)):  # the numbers of other rows
            for loss in losses:
                torch.testing.assert_close(loss(features, labels), theirs(features, None))
        # An evaluation set may lack negatives even if the training rows have negatives.
        torch.testing.assert_close(losses[0](features[:2], None), theirs(features[:2], None))


def test_cached_gradients_replay_dropout(tuples, sentence_transformer, features_of):
    model, train_dataset = sentence_transformer.train(), with_rows(tuples)
    features, labels = features_of(model, train_dataset, ROWS)
    cached = loss_of(model, train_dataset, CachedSoftInfoNCELoss, mini_batch_size=3)
    torch.manual_seed(7)
    found = step(cached, features, labels)
    torch.manual_seed(7)
    model.zero_grad()
    # The second pass encodes the same chunks in the same order, with the same dropout and with a graph.
    chunks = [list(cached.embed_minibatch_iter(side, True, False)) for side in features]
    embeddings = [torch.cat([chunk for chunk, _ in side]) for side in chunks]
    value = cached.compute_loss_from_embeddings(embeddings, labels)
    value.backward()
    assert_same(found, (value.item(), gradients(model)))
    torch.manual_seed(8)
    assert abs(step(cached, features, labels)[0] - found[0]) > 1e-4


def test_scores_stay_in_float32_under_autocast(pairs, sentence_transformer, features_of):
    model, train_dataset = sentence_transformer.eval(), with_rows(pairs)
    loss = SoftInfoNCELoss(model, BM25Estimator(), train_dataset)
    given = features_of(model, train_dataset, ROWS)
    exact = loss(*given)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*given)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(exact.item(), rel=0.02)
    embeddings = [model(features)["sentence_embedding"].detach() for features in given[0]]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loss.compute_loss_from_embeddings(embeddings, given[1]), exact.detach())


def test_the_model_as_it_starts_gives_the_weights(pairs, sentence_transformer, features_of, trainer_step):
    batch = pairs.select(ROWS)
    options = {"weighting": "positive_aware"}
    expected = trainer_step(batch, InitialModelEstimator(cache_dir=None), **options)
    train_dataset, estimator = with_rows(batch), SentenceTransformerEstimator(batch_size=3)
    model = trainings.still(sentence_transformer.train())
    loss = SoftInfoNCELoss(model, estimator, train_dataset, **options)
    assert model.training
    given = features_of(model, train_dataset, range(len(ROWS)))
    assert_same(step(loss, *given), expected, 1e-5)
    assert loss.criterion.temperature == 1.0
    assert loss.get_config_dict()["estimator"] == "SentenceTransformerEstimator"
    before = loss.estimator.similarity([0, 1], [2, 3])
    with torch.no_grad():
        next(model.parameters()).mul_(3)
    torch.testing.assert_close(loss.estimator.similarity([0, 1], [2, 3]), before)


# ---- In SentenceTransformerTrainer ----


@pytest.fixture
def train(sentence_transformer, tmp_path):
    def run(loss, train_dataset, eval_dataset=None, resume=None, **options):
        settings = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True}
        settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "output_dir": str(tmp_path)}
        args = SentenceTransformerTrainingArguments(**settings | options)
        trainer = SentenceTransformerTrainer(sentence_transformer, args, train_dataset, eval_dataset, loss=loss)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SoftInfoNCELoss, CachedSoftInfoNCELoss])
def test_a_run_trains_evaluates_and_describes_itself(
    kind, train, pairs, train_dataset, sentence_transformer, tmp_path
):
    before = {name: value.clone() for name, value in sentence_transformer.named_parameters()}
    loss = kind(sentence_transformer, BM25Estimator(), train_dataset, alpha=1.2)
    options = {"batch_sampler": "no_duplicates", "gradient_accumulation_steps": 2, "bf16": True, "eval_steps": 2}
    options |= {"eval_strategy": "steps", "per_device_eval_batch_size": 8, "learning_rate": 1e-3}
    prompts = {"anchor": "query: ", "positive": "code: "}
    history = train(loss, train_dataset, pairs, prompts=prompts, **options).state.log_history
    assert len([entry["loss"] for entry in history if "loss" in entry]) == 2
    assert any(entry.get("eval_loss", 0) > 0 for entry in history)
    moved = [name for name, value in sentence_transformer.named_parameters() if not torch.equal(before[name], value)]
    assert len(moved) >= len(before) - 2
    sentence_transformer.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"loss.{kind.__name__}</code> with these parameters" in card and '"alpha": 1.2' in card
    assert "Rethinking Negative Pairs in Code Search" in card and f"loss:{kind.__name__}" in card
    again = type(sentence_transformer)(str(tmp_path / "saved"), device="cpu")
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, sentence_transformer.state_dict()[name], msg=name)


@pytest.mark.slow
def test_the_script_of_the_documentation_runs(pairs, encoder_folder, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "sentence_transformers.md"
    script, *_ = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    pairs.to_json(tmp_path / "pairs.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    exec(script.replace("sentence-transformers/all-MiniLM-L6-v2", str(encoder_folder)), {})
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def test_labels_are_a_new_column_of_63_bits(pairs):
    labels = with_rows(pairs)["label"][:]
    assert len(set(labels)) == 24 and all(0 <= label < 2**63 for label in labels)
    assert "label" not in pairs.column_names


@pytest.mark.slow
def test_data_sets_in_a_dict_have_a_loss_each(train, pairs, sentence_transformer):
    sets = {"a": with_rows(pairs.select(range(12))), "b": with_rows(pairs.select(range(12, 24)))}
    losses = {name: SoftInfoNCELoss(sentence_transformer, BM25Estimator(), rows) for name, rows in sets.items()}
    assert len(train(losses, sets, per_device_train_batch_size=6).state.log_history) == 3


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(train, train_dataset, sentence_transformer):
    loss = SoftInfoNCELoss(sentence_transformer, SentenceTransformerEstimator(), train_dataset)
    train(loss, train_dataset, save_strategy="steps", save_steps=2, max_steps=2)
    trainer = train(loss, train_dataset, max_steps=3, resume=True)
    assert trainer.state.global_step == 3 and [entry["step"] for entry in trainer.state.log_history][:3] == [1, 2, 3]


@pytest.mark.parametrize("kind", [SoftInfoNCELoss, CachedSoftInfoNCELoss])
def test_it_works_inside_matryoshka(kind, tuples, still, features_of):
    train_dataset = with_rows(tuples)
    features, labels = features_of(still, train_dataset, ROWS)
    found = step(MatryoshkaLoss(still, loss_of(still, train_dataset, kind), [32, 16]), features, labels)
    embeddings = [torch.nn.functional.normalize(still(side)["sentence_embedding"], dim=-1) for side in features]
    plain = loss_of(still, train_dataset)
    sides = [[side[:, :width] for side in embeddings] for width in (32, 16)]
    expected = sum(plain.compute_loss_from_embeddings(side, labels).item() for side in sides)
    assert found[0] == pytest.approx(expected, abs=1e-5)


class Constant(Estimator):
    """A user's estimator that finds all codes equally similar."""

    def fit(self, split):
        self.columns = split.queries.column_names + split.corpus.column_names

    def similarity(self, query_rows, code_rows):
        return torch.zeros(len(query_rows), len(code_rows))


def test_a_users_own_estimator(pairs, sentence_transformer, features_of):
    train_dataset, estimator = with_rows(pairs), Constant()
    loss = SoftInfoNCELoss(sentence_transformer.eval(), estimator, train_dataset, alpha=0.5)
    value, _ = step(loss, *features_of(sentence_transformer, train_dataset, [2, 3, 4, 5]))
    plain = SoftInfoNCELoss(sentence_transformer, None, train_dataset)
    assert value == pytest.approx(step(plain, *features_of(sentence_transformer, train_dataset, [2, 3, 4, 5]))[0])
    assert loss.estimator.columns == ["docstring", "code"]


def test_the_settings_that_have_an_effect_are_named(pairs, sentence_transformer):
    def config(estimator=None, **options):
        return SoftInfoNCELoss(sentence_transformer, estimator, with_rows(pairs), **options).get_config_dict()

    common = {"false_negatives": "mask", "scale": 20.0, "similarity_fct": "cos_sim"}
    common |= {"gather_across_devices": False}
    assert config() == {"estimator": None, "loss": "info_nce"} | common
    aware = config(BM25Estimator(**BM25), weighting="positive_aware", cancel="top_k")
    assert aware == common | {
        "estimator": "BM25Estimator(document_column='code_tokens')", "loss": "soft_info_nce",
        "weighting": "positive_aware", "margin": 0.0, "temperature": 1.0, "cancel": "top_k", "cancel_k": 3,
    }  # fmt: skip
    kl = config(BM25Estimator(), loss="kl_regularization")
    assert {"kl_weight", "infonce_weight"} <= kl.keys() and "alpha" not in kl
