"""After any sequence of commands, an output folder holds what the last successful command would write to an empty one.

The commands differ in seed and length, overwrite or not, and are stopped at random: by Ctrl-C in a step, by an error
in a step, or while the trained encoder is measured. The learning rate is constant, so a run that is continued for
longer has the weights of one that was long from the start.
"""

import hashlib
import json
import os
import random
import signal
from pathlib import Path

import pytest

from soft_trainer.run.measurements import Measurements
from soft_trainer.system.files import TRAINING_FILES, files_matching
from soft_trainer.trainer import SoftInfoNCETrainer

OPTIONS = {"from_scratch": "32x1", "vocabulary_size": 400, "per_device_train_batch_size": 6, "language": "python"}
OPTIONS |= {
    "use_cpu": True,
    "examples": 0,
    "lexical": False,
    "lr_scheduler_type": "constant",
    "save_strategy": "steps",
}
CHOOSES = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
VARIANTS = [
    {},
    CHOOSES,
    CHOOSES | {"early_stopping_patience": 1, "learning_rate": 1e-9},
    {"merge_ratio": 0.5},
    {"save_total_limit": 1},
]
STOPS = ("never", "never", "Ctrl-C", "error", "while measuring")


def content(folder: Path) -> dict[str, str]:
    """Hashes every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def outcome(folder: Path) -> tuple:
    """Returns what a run leaves: a hash of its weights, its metrics and the names of its files."""
    metrics = {}
    for name, value in json.loads((folder / "all_results.json").read_text()).items():
        if not name.endswith(("runtime", "per_second", "flos")):
            metrics[name] = value
    return content(folder)["model.safetensors"], metrics, files_matching(folder, TRAINING_FILES)


class Stop:
    """Stops a command in one of its steps, or while it measures the trained encoder."""

    def __init__(self, patch):
        self.how = "never"
        self.step = 0
        training_step = SoftInfoNCETrainer.training_step
        measure = Measurements.measure

        def stopping_step(trainer, *args, **kwargs):
            if trainer.state.global_step + 1 == self.step:
                if self.how == "Ctrl-C":
                    os.kill(os.getpid(), signal.SIGINT)
                elif self.how == "error":
                    raise KeyboardInterrupt
            return training_step(trainer, *args, **kwargs)

        def stopping_measure(measurements, system, *args, **kwargs):
            if system == "trained" and self.how == "while measuring":
                raise KeyboardInterrupt
            return measure(measurements, system, *args, **kwargs)

        patch.setattr(SoftInfoNCETrainer, "training_step", stopping_step)
        patch.setattr(Measurements, "measure", stopping_measure)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(VARIANTS)))
def test_any_sequence_of_commands_ends_like_one_in_an_empty_folder(script, data_dir, tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    stop = Stop(monkeypatch)
    out = tmp_path / "out"
    fresh = {}
    variant = VARIANTS[seed]

    def run(folder, **options):
        return script(**OPTIONS | {"data_dir": data_dir, "output_dir": folder} | options)

    def check_outcome(options):
        key = options["seed"], options["max_steps"], options["save_steps"]
        if key not in fresh:
            stop.how = "never"
            folder = tmp_path / "-".join(map(str, key))
            assert run(folder, **options)[0] == 0
            fresh[key] = outcome(folder)
        weights, metrics, listed = outcome(out)
        assert (weights, listed) == (fresh[key][0], fresh[key][2]), history
        assert metrics == pytest.approx(fresh[key][1], rel=1e-6), history

    history = []
    for _ in range(6):
        options = {"seed": draw.choice((1, 2)), "max_steps": draw.choice((2, 4)), "save_steps": draw.choice((1, 100))}
        options |= variant
        overwrite = {"overwrite": True} if draw.random() < 0.4 else {}
        stop.how = draw.choice(STOPS)
        stop.step = draw.randint(1, options["max_steps"])
        before = content(out)
        code, said = run(out, **options, **overwrite)
        history.append((options | overwrite, stop.how, stop.step, code, said[-1:]))
        if code == 130 and draw.random() < 0.5:
            if "without --overwrite true" in said[-1]:
                overwrite = {}
            stop.how = "never"
            code, said = run(out, **options, **overwrite)
            history.append(("what the last line advises", options | overwrite, code, said[-1:]))
            assert code == 0, history
        if code == 0:
            check_outcome(options)
        elif code == 2:
            assert content(out) == before and not overwrite, history
            assert " is now " in said[-1], history
        else:
            assert code == 130, history
