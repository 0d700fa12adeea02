"""Options are parsed from the command line and recipes, and every error is one line."""

import errno
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.errors import UserError
from soft_trainer.options.fields import TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import make_parser, parse, short_help
from soft_trainer.options.recipes import read_recipe
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.system.terminal import exit_on_user_error, one_line_errors


@dataclass
class Colours:
    ink: str = "blue"
    paper: str | None = None
    names: list[str] = field(default_factory=list)


@dataclass
class Sizes:
    width: int = 3
    learning_rate: float = 0.5
    frame: bool = False
    margin: bool = True


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and returns its path."""

    def write(text: str, name: str = "recipe.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def read(*argv: str) -> tuple[Colours, Sizes]:
    return parse((Colours, Sizes), argv)


# ---- Options ----


def test_every_kind_of_value(monkeypatch):
    assert read() == (Colours(), Sizes())
    words = "--ink red --width=7 --learning_rate 1e-3 --frame --margin false --names a b"
    assert read(*words.split()) == (Colours("red", None, ["a", "b"]), Sizes(7, 0.001, True, False))
    monkeypatch.setattr("sys.argv", ["script.py", "--width", "9"])
    assert parse((Colours, Sizes))[1].width == 9


def test_short_names_stand_for_long_ones(recipe):
    words = ["--model", "here", "--epochs=3", "--lr", "1", "--batch_size", "7"]
    for each in (words, ["--config", recipe("model: here\nepochs: 3\nlr: 1\nbatch_size: 7\n")]):
        model, training = parse((ModelArguments, TrainingOptions), each)
        assert (model.model_name_or_path, training.num_train_epochs) == ("here", 3)
        assert (training.learning_rate, training.per_device_train_batch_size) == (1, 7)
        assert {"model_name_or_path", "num_train_epochs"} <= model.named
    help_text = short_help((TrainingOptions,)).format_help()
    assert re.search(r"--num_train_epochs(?: VALUE)?, --epochs VALUE", help_text)  # Python 3.13 shows one VALUE


# ---- Recipes ----


@pytest.mark.parametrize(
    "text, colours, sizes",
    [
        ("ink: red\nwidth: 7\nlearning_rate: 1e-3\nframe: true\nmargin: false\nnames: [a, b]\npaper: null\n",
         Colours("red", None, ["a", "b"]), Sizes(7, 0.001, True, False)),
        ("ink: [16, 8]\nnames: [a, b]\n", Colours("16,8", None, ["a", "b"]), Sizes()),
        ("ink: '-5 %'\npaper: ''\nwidth: -2\n", Colours("-5 %", ""), Sizes(-2)),
        ("# nothing\n", Colours(), Sizes()),
    ],
    ids=["every kind", "a list for an option of one text", "texts that look like something else", "empty"],
)  # fmt: skip
def test_a_recipe_sets_options(recipe, text, colours, sizes):
    assert read("--config", recipe(text)) == (colours, sizes)


@pytest.mark.parametrize("position", [0, 1])
def test_the_command_line_wins_wherever_the_recipe_is_named(recipe, position):
    words = [["--width", "9", "--frame", "false"], [f"--config={recipe('width: 7')}"]]
    recipe("width: 7\nink: red\nframe: true\n")
    colours, sizes = read(*words[position], *words[1 - position])
    assert (colours.ink, sizes.width, sizes.frame) == ("red", 9, False)


def test_a_recipe_can_change_another(recipe, tmp_path):
    recipe("ink: red\nwidth: 1\nmargin: false\n", "base.yaml")
    recipe("base: base.yaml\nwidth: 2\n", "middle.yaml")
    path = recipe("base: middle.yaml\nframe: true\n", "top.yaml")
    assert read("--config", path) == (Colours("red"), Sizes(width=2, frame=True, margin=False))
    assert read_recipe(path) == {"ink": "red", "width": 2, "margin": False, "frame": True}


def test_a_mapping_reaches_the_training_arguments(recipe, tmp_path):
    path = recipe("lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 2}\nuse_cpu: true\n")
    [args] = parse((SoftInfoNCETrainingArguments,), ["--config", path, "--output_dir", str(tmp_path)])
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


# ---- What a user can get wrong ----


@pytest.mark.parametrize(
    "line, words",
    [
        ("--widht 3", ["--widht", "'width'"]),
        ("--learning_ra 1", ["'learning_rate'"]),  # an abbreviation is no option
        ("--zzzzzz", ["--help"]),
        ("--width wide", ["--width"]),
        ("--width", ["--width"]),
        ("--frame perhaps", ["--frame"]),
        ("--config", ["--config"]),
    ],
)
def test_a_wrong_option_or_value_is_named_with_the_nearest(line, words):
    with refused(*words):
        read(*line.split())


@pytest.mark.parametrize(
    "text, words",
    [
        ("learning_rat: 1\n", ["recipe.yaml", "'learning_rat'", "'learning_rate'"]),
        ("7: 1\n", ["7"]),
        ("base: none.yaml\n", ["none.yaml"]),
        ("width: 1\nink: red\nwidth: 2\n", ["recipe.yaml", "width is set twice"]),
        ("ink: {a: 1, a: 1}\n", ["recipe.yaml", "a is set twice"]),
        ("base: recipe.yaml\n", ["recipe.yaml"]),
        ("base: [a.yaml, b.yaml]\n", ["recipe.yaml", "base=['a.yaml', 'b.yaml']"]),
        *((text, ["recipe.yaml"]) for text in ("width: [1\n", "- width\n", "just text\n", "a: b: c\n")),
    ],
)
def test_a_wrong_recipe_is_named_with_its_key(recipe, tmp_path, text, words):
    path = recipe(text)
    with refused(*(tmp_path / word if word.endswith(".yaml") else word for word in words)):
        read("--config", path)


def test_a_recipe_in_another_encoding_is_named(recipe):
    path = Path(recipe(""))
    path.write_bytes("colours: [grün]\n".encode("latin-1"))
    with refused(path, "not valid YAML"):
        read("--config", str(path))


def test_arguments_know_whether_they_come_from_the_command_line(tmp_path):
    [args] = parse([TrainingOptions], ["--output_dir", str(tmp_path)])
    assert args.from_command_line
    assert not SoftInfoNCETrainingArguments(output_dir=str(tmp_path)).from_command_line


def test_nothing_given_means_train_evaluate_and_predict(tmp_path):
    def wanted(*argv):
        argv = ["--output_dir", str(tmp_path), "--use_cpu", "true", *argv]
        [args] = parse((SoftInfoNCETrainingArguments,), argv)
        return args.do_train, args.do_eval, args.do_predict

    assert wanted() == (True, True, True)
    assert wanted("--do_predict") == (False, False, True)
    assert wanted("--do_train", "--do_eval") == (True, True, False)
    assert wanted("--do_predict", "false") == (True, True, False)
    assert wanted("--do_predict", "false", "--do_train") == (True, False, False)


# ---- One line on standard error ----


@pytest.mark.parametrize(
    "error, line",
    [
        (UserError("file.jsonl, row 3: not valid JSON"), "file.jsonl, row 3: not valid JSON"),
        (UserError("found:\n- this\n- that"), "found: - this - that"),
        (OSError(errno.ENOSPC, "No space left on device", "all_results.json"),
         "[Errno 28] No space left on device: 'all_results.json'"),
    ],
    ids=["a refusal", "several lines", "a full disk"],
)  # fmt: skip
def test_an_error_is_one_line_and_exit_code_2(capsys, error, line):
    with pytest.raises(SystemExit) as stopped, exit_on_user_error():
        raise error
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), ZeroDivisionError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)), exit_on_user_error():
        raise error


ERRORS = {
    "its text": (KeyError("seed"), "KeyError: 'seed' ("),
    "two lines": (RuntimeError("TensorBoard is\nnot installed."), "RuntimeError: TensorBoard is not installed. ("),
    "of a system call": (OSError(5, "Input/output error", "/a/rows/x"), "OSError: [Errno 5] Input/output error:"),
    "of a data worker": (
        RuntimeError(
            "Caught KeyError in worker process 0.\nTraceback (most recent call last):\n  File\nKeyError: 'url'\n"
        ),
        "RuntimeError: KeyError: 'url' (",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_before_the_first_step_any_error_is_one_line(error):
    raised, line = ERRORS[error]
    with pytest.raises(UserError) as refusal, one_line_errors():
        raise raised
    message = str(refusal.value)
    assert message.startswith(line) and "\n" not in message
    assert re.search(r"\(.*test_parse\.py:\d+; SOFT_TRAINER_TRACEBACK=1 shows the traceback\)$", message)


def test_after_it_and_on_request_there_is_a_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError), one_line_errors(until=lambda: True):
        raise ZeroDivisionError
    monkeypatch.setenv("SOFT_TRAINER_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


# ---- Help ----


@pytest.mark.parametrize(("name", "listed", "lines"), [("train", 28, 110), ("evaluate", 12, 60)])
def test_help_fits_a_screen_and_agrees_with_the_parser(name, listed, lines, capsys):
    with pytest.raises(SystemExit):
        run_command([name, "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < lines and shown.count("\n  --") == listed
    options = importlib.import_module(f"soft_trainer.cli.{name}").OPTIONS
    parsed = {option: action for action in make_parser(options)._actions for option in action.option_strings}
    for action in short_help(options)._actions:
        full = parsed[action.option_strings[0]]
        assert (action.default, action.help) == (full.default, full.help.replace("%", "%%").replace("%%%%", "%%"))
    for action in make_parser(options, whole=False)._actions:  # read first
        assert action.default in (None, parsed[action.option_strings[0]].default)


def test_help_all_lists_the_options_of_transformers_too(capsys):
    with pytest.raises(SystemExit):
        run_command(["train", "--help_all"])
    shown = capsys.readouterr().out
    assert "--adam_beta1" in shown and shown.count("\n  --") > 150


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, float(text)) for text in ("1e-5", "1E5", "-2e3", "+.5", "5.", "0.1")),
        *((text, int(text)) for text in ("10", "-3", "+3", "010", "08")),
        *((text, text) for text in ("no", "yes", "on", "off", "1e", "1.5.2", "e5", ".e1", "1:30", "2026-11-29")),
        *((text, text.lower() == "true") for text in ("true", "False", "TRUE")),
    ],
)
def test_values_of_a_recipe_are_what_people_write(recipe, text, value):
    read = read_recipe(recipe(f"ink: {{deep: {text}}}\nwidth: {text}\n"))
    assert repr(read) == repr({"ink": {"deep": value}, "width": value})
