"""Only the run that wrote a checkpoint can resume from it."""

import itertools
import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from trainings import check_weights, fingerprint_of
from transformers import TrainerCallback

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.errors import UserError
from soft_trainer.run.folder import MARKER, compared, mark_complete, newest_complete, saving_checkpoint


@pytest.fixture
def checkpoint(trainer_of, tmp_path):
    """A checkpoint that was written before the first step."""
    mark_complete(tmp_path / "checkpoint-1", fingerprint_of(trainer_of()))
    return str(tmp_path / "checkpoint-1")


def test_another_setting_is_named_and_no_list_of_what_may_change(trainer_of, checkpoint):
    other = fingerprint_of(trainer_of(seed=7))
    with refused(f"{checkpoint}: seed was 42, is now 7. A run must resume with its original settings"):
        compared(lambda: other, checkpoint)


LONGER = [
    ({"max_steps": 3}, {"max_steps": 4}, None),
    ({"max_steps": 3}, {"max_steps": 2}, "max_steps was 3, is now 2"),
    ({"num_train_epochs": 3}, {"num_train_epochs": 3.5}, None),
    ({"num_train_epochs": 3}, {"num_train_epochs": 2}, "num_train_epochs was 3, is now 2"),
    ({"num_train_epochs": 12}, {}, "num_train_epochs was 12, is now 10"),  # the default
    ({"num_train_epochs": 3, "max_steps": 5}, {"num_train_epochs": 2, "max_steps": 5}, None),  # steps count
    ({"num_train_epochs": 3}, {"max_steps": 5}, None),  # the number of steps is compared when training begins
]


@pytest.mark.parametrize(("then", "now", "shorter"), LONGER)
def test_a_run_resumes_only_for_as_long_or_longer(trainer_of, tmp_path, then, now, shorter):
    before, after = (fingerprint_of(trainer_of(**{"max_steps": -1} | options)) for options in (then, now))
    checkpoint = tmp_path / "checkpoint-1"
    mark_complete(checkpoint, before)
    if shorter is None:
        compared(lambda: after, str(checkpoint))
    else:
        with refused(f"{checkpoint}: {shorter}. A run must resume with its original settings, and with at least its"):
            compared(lambda: after, str(checkpoint))


class Twice(SoftInfoNCETrainer):
    """A trainer whose step has two passes, as adversarial training does."""

    def training_step(self, *args):
        super().training_step(*args)
        return super().training_step(*args)


class OwnStep(SoftInfoNCETrainer):
    def training_step(self, model, inputs, *args):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SoftInfoNCETrainer, Twice, OwnStep])
def test_the_loss_of_a_resumed_run_is_the_mean_of_the_whole_run(trainer_of, kind):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9, "max_steps": 5, "logging_steps": 3}
    whole = trainer_of(kind=kind, **options)
    whole.train()
    again = trainer_of(kind=kind, **options)
    checkpoint = f"{again.args.output_dir}/checkpoint-2"
    output = again.train(resume_from_checkpoint=checkpoint)
    losses = [each.state.log_history[-1]["train_loss"] for each in (whole, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert output.training_loss == losses[1]
    logged = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert 0.5 < losses[1] / logged[0] < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "warmup_stable_decay"])
def test_a_longer_run_has_the_rates_of_its_new_length_and_a_record_of_the_earlier_ones(trainer_of, capsys, schedule):
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": schedule}
    if schedule == "warmup_stable_decay":
        options["lr_scheduler_kwargs"] = {"num_decay_steps": 2}
    trained = []
    for steps, resume in ((2, None), (4, "last"), (6, "last"), (6, None)):
        trainer = trainer_of(max_steps=steps, **options)
        trainer.train(resume)
        trained.append(trainer)
    *_, longest, whole = trained
    rates = [[entry["learning_rate"] for entry in each.state.log_history if "loss" in entry] for each in trained]
    assert rates[2][4:] == rates[3][4:]
    lines = ["checkpoint-2: max_steps was 2, is now 4", "checkpoint-4: max_steps was 4, is now 6"]
    assert longest.run_fingerprint["continued from"] == lines and "continued from" not in whole.run_fingerprint
    assert "Continuing for longer: max_steps was 4, is now 6" in capsys.readouterr().err


EVALUATIONS = itertools.count()


def falls(predictions):
    """Returns a metric that falls at every evaluation, so that the first one is best."""
    return {"falling": -next(EVALUATIONS)}


@pytest.mark.slow
def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(trainer_of, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "falling", "greater_is_better": True}
    options |= {"save_total_limit": 9, "learning_rate": 1e-2}
    whole = trainer_of(**options, arguments={"compute_metrics": falls})
    whole.train()
    best = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    (tmp_path / "out").rename(tmp_path / "moved")
    again = trainer_of(**options, output_dir=str(tmp_path / "moved"), arguments={"compute_metrics": falls})
    again.train(resume_from_checkpoint="last")
    check_weights(again.model.state_dict(), best)


@pytest.mark.slow
def test_a_checkpoint_named_by_its_path_must_be_whole(trainer_of, tmp_path):
    trainer_of(save_strategy="steps", save_steps=2).train()
    for name in ("optimizer.pt", "scheduler.pt", MARKER):
        folder = tmp_path / "out" / "checkpoint-2"
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(UserError, match="incomplete"):
            trainer_of().train(resume_from_checkpoint=str(folder))
        (folder / name).write_bytes(kept)
    trainer_of().train(resume_from_checkpoint=str(folder))


class TerminatedInTheLastEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 4])  # at the end of an epoch, and within one
def test_a_signal_in_the_last_evaluation_loses_no_training(trainer_of, steps):
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": steps, "logging_steps": 3}
    options |= {"max_steps": steps, "lr_scheduler_type": "constant"}
    trainer = trainer_of(**options)
    trainer.add_callback(TerminatedInTheLastEvaluation())
    with pytest.raises(SystemExit):
        trainer.train()
    assert newest_complete(trainer.args.output_dir).endswith(f"checkpoint-{steps}")
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    again = trainer_of(**options)
    again.train(resume_from_checkpoint="last")
    assert again.state.global_step == steps
    losses = [each.state.log_history[-1]["train_loss"] for each in (trainer, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.model.state_dict().items())


@pytest.mark.parametrize("error", [ValueError("a library's"), KeyboardInterrupt()])
def test_no_error_leaves_half_a_checkpoint(tmp_path, error):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    with pytest.raises(type(error)), saving_checkpoint(folder):
        raise error
    assert not folder.exists()


def test_a_full_disk_is_one_line_whatever_torch_says(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="0 MiB free"), saving_checkpoint(tmp_path / "checkpoint-5"):
        raise RuntimeError("basic_ios::clear: iostream error")


class FilesEnd(TrainerCallback):
    """A callback that limits the size of files after the third step, which acts like a full disk."""

    def __init__(self, most: int):
        self.most = most

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.parametrize("most", [100, 20_000, 200_000], ids=["the first file", "the weights", "the optimizer"])
def test_a_disk_that_fills_up_leaves_the_last_complete_checkpoint(trainer_of, tmp_path, most):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    trainer = trainer_of(**options)
    trainer.add_callback(FilesEnd(most))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(UserError, match="cannot save to .*checkpoint-4: .*Everything saved earlier is intact"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    again = trainer_of(**options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5


@pytest.mark.slow
def test_a_training_that_would_end_before_its_checkpoint_is_refused(trainer_of):
    trainer_of(max_steps=3, save_strategy="steps", save_steps=3).train()
    with refused("checkpoint-3 is at step 3, but this training ends at step 2"):
        trainer_of(max_steps=-1, num_train_epochs=0.5).train(resume_from_checkpoint="last")
