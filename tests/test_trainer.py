import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from soft_trainer import BM25Estimator, losses
from soft_trainer.data.collator import ChunkCost, PairCollator
from soft_trainer.data.tokens import SIDES
from soft_trainer.errors import UserError
from soft_trainer.files import newest_complete
from soft_trainer.training.finite import NotFiniteError


@pytest.fixture
def make_trainer(trainer_of, model, dataset):
    def make(trainer_model=None, rows=None, callbacks=(), collator=None, **options):
        arguments = {
            "model": trainer_model or model,
            "train_dataset": dataset if rows is None else rows,
            "data_collator": collator,
        }
        trainer = trainer_of(arguments=arguments, **options)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return make


def first_batch(trainer):
    return next(iter(trainer.get_train_dataloader()))


def fitted(trainer):
    trainer.estimator_callback.estimator.fit(trainer.train_dataset)
    return trainer


@pytest.mark.slow
def test_every_parameter_moves_and_the_loss_falls(make_trainer, model):
    before = copy.deepcopy(model.state_dict())
    trainer = make_trainer(max_steps=30, learning_rate=5e-3)
    trainer.train()
    still = [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])]
    assert still == []
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(logged[-5:]) < 0.7 * sum(logged[:5])


@pytest.mark.slow
def test_the_log_tells_of_the_weights(make_trainer):
    trainer = make_trainer(per_device_train_batch_size=24, max_steps=1)
    trainer.train()
    entry = trainer.state.log_history[0]
    rows = torch.arange(24)
    weights = trainer.loss_settings.weights(trainer.estimator.similarity(rows, rows).float(), rows)
    negatives = weights[~torch.eye(24, dtype=torch.bool)]
    assert entry["weight_mean"] == pytest.approx(float(negatives.mean()), abs=1e-5)
    assert entry["weight_min"] == pytest.approx(float(negatives.min()), abs=1e-5)
    assert entry["weight_at_floor"] == pytest.approx(float((negatives <= 0.1).float().mean()), abs=1e-6)


@pytest.mark.slow
def test_plain_training_arguments_mean_soft_info_nce_with_an_estimator_and_info_nce_without(make_trainer):
    with_estimator = make_trainer(plain=True)
    assert with_estimator.loss_settings.loss == "soft_info_nce"
    assert (with_estimator.loss_settings.alpha, with_estimator.loss_settings.beta) == (1.5, 0.5)
    with_estimator.train()
    assert with_estimator.state.global_step == 3
    assert make_trainer(estimator=None, plain=True).loss_settings.loss == "info_nce"


def test_chunks_of_like_length_give_the_loss_and_gradients_of_one_padded_batch(make_trainer, model, tokenizer):
    model.eval()
    results = []
    for cost in (ChunkCost(overhead=1.0), None):
        collator = PairCollator(tokenizer.pad_token_id, cost)
        trainer = fitted(make_trainer(trainer_model=copy.deepcopy(model), collator=collator))
        batch = first_batch(trainer)
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        results.append((len(batch.code.chunks), loss, [p.grad for p in trainer.model.parameters()]))
    (many, loss, gradients), (one, expected, expected_gradients) = results
    assert many > one == 1
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


def test_the_loss_is_that_of_the_formula_on_the_rows_of_the_batch(make_trainer, model):
    model.eval()
    trainer = fitted(make_trainer())
    batch = first_batch(trainer)
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch)
        queries, codes = (
            torch.nn.functional.normalize(trainer.embeddings(model, getattr(batch, side))) for side in SIDES
        )
    similarity = BM25Estimator()
    similarity.fit(trainer.train_dataset.select(batch.rows.tolist()))
    n = len(batch.rows)
    weights = trainer.loss_settings.weights(similarity.similarity(range(n), range(n)), torch.arange(n))
    expected = losses.soft_info_nce(20 * queries @ codes.T, weights.float())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.slow
def test_accumulating_two_batches_is_not_one_batch_of_twice_the_size(make_trainer):
    # Negatives are those of a batch: accumulation averages two losses over 7 negatives, not one over 15.
    logged = []
    for size, accumulated in ((8, 2), (16, 1)):
        trainer = make_trainer(
            estimator=None,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            seed=1,
        )
        trainer.model.eval()
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[0] == pytest.approx(torch.log(torch.tensor(8.0)).item(), rel=0.25)
    assert logged[1] > logged[0] + 0.3


def test_evaluation_equals_brute_force(make_trainer, model):
    trainer = make_trainer()
    output = trainer.predict(trainer.eval_dataset)
    batch = trainer.data_collator([trainer._train_batches()[row] for row in range(24)])
    model.eval()
    with torch.no_grad():
        sides = (trainer.embeddings(model, batch[side]).double() for side in SIDES)
        q, c = map(torch.nn.functional.normalize, sides)
    scores = q @ c.T
    expected = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert output.ranking.ranks.tolist() == expected.tolist()
    assert output.metrics["test_mrr"] == pytest.approx((1 / expected).mean().item(), abs=1e-6)
    assert output.metrics["test_pool_size"] == 24
    assert trainer.evaluate()["eval_mrr"] == pytest.approx(output.metrics["test_mrr"], abs=1e-9)


def test_several_data_sets_are_ranked_in_their_own_codebases(make_trainer, dataset):
    trainer = make_trainer()
    trainer.codebase = {"small": dataset.select(range(8)), "large": dataset}
    metrics = trainer.evaluate({"small": dataset.select(range(4)), "large": dataset.select(range(4))})
    assert metrics["eval_small_pool_size"] == 8 and metrics["eval_large_pool_size"] == 24


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(make_trainer, model, tmp_path):
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "num_train_epochs": 3}
    whole = make_trainer(trainer_model=copy.deepcopy(model), **options)
    whole.train()
    resumed = make_trainer(trainer_model=copy.deepcopy(model), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.slow
def test_a_short_last_batch_trains_with_weights_of_one(make_trainer, dataset):
    # 24 rows in batches of 22 leave 2: one negative a query, too few for alpha 1.5 and beta 0.5.
    trainer = make_trainer(per_device_train_batch_size=22, dataloader_drop_last=False, max_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    assert entries[1]["weight_mean"] == 1.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_the_last_short_batch_is_dropped_by_default(make_trainer):
    trainer = fitted(make_trainer(per_device_train_batch_size=10))
    assert [len(batch.rows) for batch in trainer.get_train_dataloader()] == [10, 10]


@pytest.mark.slow
def test_the_smallest_batch_that_is_named_works(make_trainer):
    make_trainer(per_device_train_batch_size=5, max_steps=1).train()


def test_an_own_estimator_needs_two_methods(make_trainer):
    class SameLength:
        def fit(self, dataset):
            self.lengths = torch.tensor([float(len(tokens)) for tokens in dataset["docstring_tokens"]])

        def similarity(self, query_rows, code_rows):
            return -(self.lengths[query_rows][:, None] - self.lengths[code_rows][None, :]).abs()

    trainer = make_trainer(estimator=SameLength())
    trainer.train()
    assert trainer.state.log_history[0]["weight_min"] < 1


def test_an_estimator_of_the_wrong_shape_is_named(make_trainer):
    class Wrong:
        def fit(self, dataset):
            pass

        def similarity(self, query_rows, code_rows):
            return torch.zeros(len(query_rows))

    with pytest.raises(ValueError, match=r"Wrong.similarity returned shape \(8,\) for 8 queries and 8 codes"):
        make_trainer(estimator=Wrong()).train()


def test_a_similarity_that_is_nan_is_named_with_its_rows(make_trainer):
    class Broken:
        def fit(self, dataset):
            pass

        def similarity(self, query_rows, code_rows):
            return torch.where(code_rows[None, :] == 5, torch.nan, torch.zeros(len(query_rows), len(code_rows)))

    with pytest.raises(ValueError, match=r"Broken.similarity returned NaN for the rows \d+ \(query\) and 5 \(code\)"):
        make_trainer(estimator=Broken()).train()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_rows(make_trainer):
    def break_weights(args, state, control, model, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.embeddings.word_embeddings.weight.fill_(torch.nan)

    breaker = TrainerCallback()
    breaker.on_step_end = break_weights
    trainer = make_trainer(max_steps=6, callbacks=[breaker], save_strategy="steps", save_steps=1)
    with pytest.raises(NotFiniteError, match=r"loss of step 3 is nan \(step 2 had \d.*\)") as error:
        trainer.train()
    assert str(error.value).count("https://example.org/module_") == 8
    assert newest_complete(trainer.args.output_dir).endswith("checkpoint-2")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_termination_saves_a_checkpoint_first(make_trainer, capsys):
    def terminate(args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    killer = TrainerCallback()
    killer.on_step_end = terminate
    trainer = make_trainer(max_steps=30, callbacks=[killer])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        trainer.train()
    assert error.value.code == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert 'trainer.train(resume_from_checkpoint="last")' in said and "--" not in said
    assert newest_complete(trainer.args.output_dir).endswith(("checkpoint-2", "checkpoint-3"))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("from_command", "save_strategy", "kept", "goes_on"),
    [
        (True, "steps", "checkpoint-2 is kept", "--resume_from_checkpoint last"),
        (False, "steps", "checkpoint-2 is kept", 'trainer.train(resume_from_checkpoint="last")'),
        (True, "no", "no checkpoint", "the same command"),
        (False, "no", "no checkpoint", "trainer.train()"),
    ],
)
def test_an_interruption_says_what_is_kept_and_how_to_go_on(make_trainer, from_command, save_strategy, kept, goes_on):
    def interrupt(args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt

    callback = TrainerCallback()
    callback.on_step_begin = interrupt
    trainer = make_trainer(max_steps=4, callbacks=[callback], save_strategy=save_strategy, save_steps=1)
    if from_command:
        trainer.args.given = frozenset()
    with pytest.raises(KeyboardInterrupt, match="interrupted at step 2") as error:
        trainer.train()
    assert kept in str(error.value) and goes_on in str(error.value) and "\n" not in str(error.value)
    assert ("--" in str(error.value)) == (from_command and save_strategy == "steps")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_a_half_written_checkpoint_is_passed_over(make_trainer, capsys):
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.train()
    last = Path(newest_complete(trainer.args.output_dir))
    assert last.name == "checkpoint-3"
    weights = last / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert newest_complete(trainer.args.output_dir).endswith("checkpoint-2")
    assert "checkpoint-3: it is not whole" in capsys.readouterr().err


def test_a_query_without_its_code_is_named(make_trainer, dataset):
    with pytest.raises(UserError, match="module_20.py"):
        make_trainer().predict(dataset.select([20]), dataset.select(range(10)))


def test_rows_may_be_lists_of_dicts_everywhere(make_trainer, dataset):
    rows = dataset.to_list()
    trainer = make_trainer(rows=rows)
    whole = trainer.evaluate()
    assert trainer.evaluate(rows, codebase=rows)["eval_mrr"] == whole["eval_mrr"]
    assert trainer.predict(rows, rows).metrics["test_mrr"] == whole["eval_mrr"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trainer, rows: trainer.evaluate(codebase=rows), "eval: no queries; pass eval_dataset="),
        (lambda trainer, rows: trainer.predict(rows.select([])), "test: there are no rows"),
        (lambda trainer, rows: trainer.predict(rows.remove_columns("url")), "test: no column 'url'"),
        (
            lambda trainer, rows: trainer.predict(
                rows.select_columns("url").add_column("docstring", [*range(len(rows))])
            ),
            "column 'docstring' holds int64, text is expected for the query",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_said(make_trainer, dataset, call, message):
    trainer = make_trainer()
    trainer.eval_dataset = None
    with pytest.raises(UserError, match=message):
        call(trainer, dataset)
