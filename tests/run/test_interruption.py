"""What Ctrl-C, SIGTERM and a killed process leave, and that a resumed run ends with the weights of a whole one."""

import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import stopped
import torch
from safetensors.torch import load_file
from trainings import check_weights
from transformers import TrainerCallback, TrainerControl, TrainerState

from soft_trainer.options.parse import as_argv
from soft_trainer.run import interruption
from soft_trainer.run.folder import newest_complete
from soft_trainer.run.interruption import Stopping
from soft_trainer.system import distributed
from soft_trainer.training.sampler import EpochDataLoader

HERE = Path(__file__).parent
SHELL = {
    "from_scratch": "32x1",
    "vocabulary_size": 400,
    "query_length": 16,
    "code_length": 32,
    "loss": "info_nce",
    "per_device_train_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "dataloader_num_workers": 2,
    "do_train": "true",
    "use_cpu": "true",
}
CODES = {"SIGINT": (130, 1), "SIGTERM": (143, 143), "SIGKILL": (-9, -9)}  # exit codes in the shell and in Python


@pytest.fixture(scope="module")
def run(data_dir, encoder_dir):
    """Returns a function that trains for one epoch in a folder, in the shell or in Python, stopped by a signal."""

    def start(way: str, folder: Path, name: str = "none"):
        if way == "shell":
            script = HERE.parents[1] / "run_codesearch.py"
            options = as_argv(SHELL | {"data_dir": data_dir, "output_dir": folder})
        else:
            script = HERE / "one_epoch.py"
            options = [encoder_dir, data_dir, folder, way]
        return forked.run([stopped.__file__, name, script, *options], os.environ | {"ACCELERATE_USE_CPU": "true"})

    return start


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The folders of runs that were not stopped, in the shell and in Python."""
    folders = {}
    for way in ("shell", "fork"):
        folders[way] = tmp_path_factory.mktemp("whole") / way
        done = run(way, folders[way])
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("shell", "SIGINT"),
        ("shell", "SIGTERM"),
        ("shell", "SIGKILL"),
        ("fork", "SIGINT"),
        ("fork", "SIGTERM"),
        ("spawn", "SIGINT"),
    ],
)
def test_a_stopped_run_goes_on_to_the_weights_of_a_whole_one(run, whole, tmp_path, way, name):
    folder = tmp_path / "out"
    ended = run(way, folder, name)
    assert ended.returncode == CODES[name][way != "shell"], ended.stderr
    kept = newest_complete(folder)
    if name != "SIGKILL":
        assert kept.endswith("/checkpoint-5") and f"to continue from {kept}, run the same" in ended.stderr
        assert "DataLoader worker" not in ended.stderr and "the script went on" not in ended.stdout
    assert not (folder / "model.safetensors").exists()
    resumed = run(way, folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from {kept}" in resumed.stderr
    reference = whole["shell" if way == "shell" else "fork"]
    check_weights(load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors"))
    assert (folder / "checkpoint-8").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_data_workers_ignore_ctrl_c(start):
    args = SimpleNamespace(
        dataloader_num_workers=1,
        dataloader_pin_memory=False,
        dataloader_prefetch_factor=2,
        dataloader_persistent_workers=False,
        dataloader_multiprocessing_context=start,
        device=torch.device("cpu"),
    )
    batches = iter(EpochDataLoader.for_training(range(20), [[row] for row in range(20)], args))
    next(batches)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == 19


# ---- In this process ----


class Sends(TrainerCallback):
    """A callback that sends signals to this process in an event of a step."""

    def __init__(self, event: str, step: int, *numbers: int):
        self.step = step
        self.numbers = numbers
        setattr(self, event, self._send)

    def _send(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.fixture
def stop(trainer_of):
    """Returns a function that trains, stopped by signals in an event of a step, and returns the trainer and error."""

    def run(*numbers: int, event: str = "on_step_begin", step: int = 4, **options):
        trainer = trainer_of(**{"num_train_epochs": 3, "max_steps": -1} | options)
        trainer.add_callback(Sends(event, step, *numbers))
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises((KeyboardInterrupt, SystemExit)) as error:
            trainer.train()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        return trainer, error.value

    return run


def names(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).glob("**/checkpoint-*"))


def test_ctrl_c_saves_after_the_step_and_says_how_to_go_on(stop, capsys):
    trainer, error = stop(signal.SIGINT, save_strategy="no")
    out = trainer.args.output_dir
    assert names(out) == ["checkpoint-5"]
    assert str(error) == (
        f"interrupted at step 5: to continue from {out}/checkpoint-5, run the same command; in Python, call "
        "train(resume_from_checkpoint='last')"
    )
    assert "Ctrl-C: saving a checkpoint after this step; press it again to stop at once" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_of_a_scheduler_exits_with_143(stop, capsys, number):
    trainer, error = stop(number)
    assert error.code == 143 and names(trainer.args.output_dir) == ["checkpoint-5"]
    assert f"stopped by {number.name} at step 5: to continue from" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_ctrl_c_stops_at_once(stop, monkeypatch):
    monkeypatch.setattr(interruption, "SAME_INTERRUPT", -1.0)
    trainer, error = stop(signal.SIGINT, signal.SIGINT)
    assert not names(trainer.args.output_dir)
    assert str(error).startswith("interrupted at step 4: no checkpoint has been written, so the next run starts")


def test_a_launcher_that_repeats_a_ctrl_c_changes_nothing(stop):
    trainer, _ = stop(signal.SIGINT, signal.SIGINT)
    assert names(trainer.args.output_dir) == ["checkpoint-5"]


@pytest.mark.slow
def test_a_stop_within_an_epoch_is_not_evaluated_and_keeps_the_best(stop):
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    trainer, _ = stop(signal.SIGINT, **options, save_total_limit=1)  # an epoch has three steps
    assert names(trainer.args.output_dir) == ["checkpoint-3", "checkpoint-5"]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_mrr" in entry] == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "step", "kept"),
    [
        ("on_step_end", 6, "checkpoint-6"),  # the last step of an epoch
        ("on_evaluate", 6, "checkpoint-7"),
        ("on_train_end", 9, "checkpoint-9"),
    ],
)
def test_a_stop_at_the_end_of_an_epoch_keeps_its_evaluation(stop, event, step, kept):
    trainer, _ = stop(signal.SIGINT, event=event, step=step, save_strategy="epoch", eval_strategy="epoch")
    assert newest_complete(trainer.args.output_dir).endswith(f"out/{kept}")
    assert step in [entry["step"] for entry in trainer.state.log_history if "eval_mrr" in entry]


def test_all_processes_stop_at_the_same_step(monkeypatch):
    stopping = Stopping()
    args = SimpleNamespace(world_size=2, save_total_limit=2)
    monkeypatch.setattr(distributed, "largest", lambda number: signal.SIGINT)  # another process got the signal
    asked = []
    for step in range(11, 33):
        control = TrainerControl()
        stopping.on_step_end(args, TrainerState(global_step=step, epoch=step / 32), control)
        if control.should_save and control.should_training_stop:
            asked.append(step)
    assert asked == [20, 30] and stopping.signal == signal.SIGINT


@pytest.fixture
def always_late(monkeypatch):
    """Makes a checkpoint due after every step."""
    monkeypatch.setattr(interruption, "ROLLING_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("always_late")
@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"save_strategy": "epoch"}, True),
        ({"save_strategy": "no"}, False),
        ({"save_strategy": "epoch", "save_only_model": True}, False),
        ({"save_strategy": "epoch", "from_command_line": False}, False),
    ],
)
def test_a_run_from_the_command_line_saves_by_time(trainer_of, options, saved):
    in_shell = options.pop("from_command_line", True)
    trainer = trainer_of(num_train_epochs=1, max_steps=-1, save_total_limit=9, **options)
    trainer.args.from_command_line = in_shell
    trainer.train()
    assert ("checkpoint-2" in names(trainer.args.output_dir)) == saved


@pytest.mark.slow
@pytest.mark.usefixtures("always_late")
def test_checkpoints_by_time_change_no_weight(trainer_of, model):
    weights = []
    start = copy.deepcopy(model)
    for in_shell in (False, True):
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
        trainer = trainer_of(**options, arguments={"model": copy.deepcopy(start)})
        trainer.args.from_command_line = in_shell
        trainer.train()
        weights.append(trainer.model.state_dict())
    check_weights(*weights)
