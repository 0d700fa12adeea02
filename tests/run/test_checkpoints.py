"""Only the run that wrote a checkpoint can resume from it."""

import resource
from types import SimpleNamespace

import pytest
from refusals import refused
from trainings import fingerprint_of
from transformers import TrainerCallback

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.errors import UserError
from soft_trainer.run.folder import MARKER, compared, mark_complete, saving_checkpoint


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
def test_a_longer_run_has_the_rates_of_its_new_length(trainer_of, schedule):
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": schedule}
    if schedule == "warmup_stable_decay":
        options["lr_scheduler_kwargs"] = {"num_decay_steps": 2}
    trained = []
    for steps, resume in ((2, None), (4, "last"), (6, "last"), (6, None)):
        trainer = trainer_of(max_steps=steps, **options)
        trainer.train(resume)
        trained.append(trainer)
    rates = [[entry["learning_rate"] for entry in each.state.log_history if "loss" in entry] for each in trained]
    assert rates[2][4:] == rates[3][4:]


@pytest.mark.slow
def test_a_checkpoint_named_by_its_path_must_be_whole(trainer_of, tmp_path):
    trainer_of(save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "out" / "checkpoint-2"
    kept = (folder / MARKER).read_bytes()
    (folder / MARKER).unlink()
    with refused("not a complete checkpoint"):
        trainer_of().train(resume_from_checkpoint=str(folder))
    (folder / MARKER).write_bytes(kept)
    trainer_of().train(resume_from_checkpoint=str(folder))


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
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "logging_strategy": "no"}
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
