"""Options, recipes and errors as one line."""

import errno
from dataclasses import dataclass, field

import pytest

from soft_trainer.errors import UserError
from soft_trainer.options.parse import parse
from soft_trainer.options.recipes import read_recipe
from soft_trainer.terminal import exit_on_user_error


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


def error_of(*argv: str) -> str:
    """Returns the one line that the user sees."""
    with pytest.raises(UserError) as caught:
        read(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- Options ----


def test_a_full_disk_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stopped, exit_on_user_error():
        raise OSError(errno.ENOSPC, "No space left on device", "all_results.json")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'all_results.json'\n"
    with pytest.raises(PermissionError), exit_on_user_error():
        raise PermissionError(errno.EACCES, "Permission denied")


def test_defaults():
    assert read() == (Colours(), Sizes())


def test_every_kind_of_value():
    colours, sizes = read(
        "--ink", "red", "--width=7", "--learning_rate", "1e-3", "--frame", "--margin", "false", "--names", "a", "b"
    )
    assert colours == Colours("red", None, ["a", "b"])
    assert sizes == Sizes(7, 0.001, True, False)


def test_options_come_from_the_command_line_of_the_process(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--width", "9"])
    assert parse((Colours, Sizes))[1].width == 9


# ---- Recipes ----


def test_a_recipe_sets_options_of_every_kind(recipe):
    path = recipe("ink: red\nwidth: 7\nlearning_rate: 1e-3\nframe: true\nmargin: false\nnames: [a, b]\npaper: null\n")
    assert read("--config", path) == (Colours("red", None, ["a", "b"]), Sizes(7, 0.001, True, False))


def test_a_list_is_joined_for_an_option_that_takes_one_text(recipe):
    assert read("--config", recipe("ink: [16, 8]\nnames: [a, b]\n"))[0] == Colours("16,8", None, ["a", "b"])


@pytest.mark.parametrize("place", [0, 1])
def test_the_command_line_wins_wherever_the_recipe_is_named(recipe, place):
    words = [["--width", "9", "--frame", "false"], [f"--config={recipe('width: 7')}"]]
    recipe("width: 7\nink: red\nframe: true\n")
    colours, sizes = read(*words[place], *words[1 - place])
    assert (colours.ink, sizes.width, sizes.frame) == ("red", 9, False)


def test_texts_that_look_like_something_else(recipe):
    colours, sizes = read("--config", recipe("ink: '-5 %'\npaper: ''\nwidth: -2\n"))
    assert (colours.ink, colours.paper, sizes.width) == ("-5 %", "", -2)


def test_a_recipe_can_change_another(recipe, tmp_path):
    recipe("ink: red\nwidth: 1\nmargin: false\n", "base.yaml")
    recipe("base: base.yaml\nwidth: 2\n", "middle.yaml")
    path = recipe("base: middle.yaml\nframe: true\n", "top.yaml")
    assert read("--config", path) == (Colours("red"), Sizes(width=2, frame=True, margin=False))
    assert read_recipe(path) == {"ink": "red", "width": 2, "margin": False, "frame": True}


def test_an_empty_recipe_changes_nothing(recipe):
    assert read("--config", recipe("# nothing\n")) == (Colours(), Sizes())


def test_a_mapping_reaches_the_training_arguments(recipe, tmp_path):
    from soft_trainer.options.fields import SoftInfoNCETrainingArguments

    path = recipe("lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 2}\nuse_cpu: true\n")
    [args] = parse((SoftInfoNCETrainingArguments,), ["--config", path, "--output_dir", str(tmp_path)])
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


# ---- What a user can get wrong ----


@pytest.mark.parametrize("word", ["--widht", "--widht=3"])
def test_an_unknown_option_names_the_nearest(word):
    message = error_of(word, "3")
    assert "--widht" in message and "'width'" in message


def test_an_unknown_option_like_no_other_points_to_the_help():
    assert "--help" in error_of("--zzzzzz")


def test_an_unknown_key_names_the_recipe_and_the_nearest(recipe):
    path = recipe("learning_rat: 1\n")
    message = error_of("--config", path)
    assert path in message and "'learning_rat'" in message and "'learning_rate'" in message


def test_an_unknown_key_that_is_no_text(recipe):
    assert "7" in error_of("--config", recipe("7: 1\n"))


def test_an_abbreviation_is_no_option():
    assert "'learning_rate'" in error_of("--learning_ra", "1")


@pytest.mark.parametrize("argv", [["--width", "wide"], ["--width"], ["--frame", "perhaps"], ["--width", "1.5"]])
def test_a_value_that_an_option_does_not_take(argv):
    assert argv[0] in error_of(*argv)


def test_a_value_of_a_recipe_that_an_option_does_not_take(recipe):
    assert "width" in error_of("--config", recipe("width: wide\n"))


def test_config_without_a_file():
    assert "--config" in error_of("--config")


def test_a_missing_recipe(tmp_path):
    assert str(tmp_path / "none.yaml") in error_of("--config", str(tmp_path / "none.yaml"))


def test_a_missing_base_names_it(recipe, tmp_path):
    assert str(tmp_path / "none.yaml") in error_of("--config", recipe("base: none.yaml\n"))


def test_a_recipe_that_is_its_own_base(recipe):
    assert "recipe.yaml" in error_of("--config", recipe("base: recipe.yaml\n"))


@pytest.mark.parametrize("text", ["width: [1\n", "- width\n", "just text\n", "a: b: c\n"])
def test_a_recipe_that_is_no_mapping(recipe, text):
    path = recipe(text)
    assert path in error_of("--config", path)


def test_training_arguments_that_contradict_are_one_line(tmp_path, capsys):
    from soft_trainer.options.fields import SoftInfoNCETrainingArguments

    argv = ["--output_dir", str(tmp_path), "--load_best_model_at_end", "true", "--eval_strategy", "no"]
    with pytest.raises(SystemExit), exit_on_user_error():
        parse((SoftInfoNCETrainingArguments,), argv)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "load_best_model_at_end" in line


def test_nothing_given_means_train_evaluate_and_predict(tmp_path):
    from soft_trainer.options.fields import SoftInfoNCETrainingArguments

    def wanted(*argv):
        argv = ["--output_dir", str(tmp_path), "--use_cpu", "true", *argv]
        [args] = parse((SoftInfoNCETrainingArguments,), argv)
        return args.do_train, args.do_eval, args.do_predict

    assert wanted() == (True, True, True)
    assert wanted("--do_predict") == (False, False, True)
    assert wanted("--do_train", "--do_eval") == (True, True, False)


# ---- One line on standard error ----


def test_a_setup_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        raise UserError("file.jsonl, row 3: not valid JSON")
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: file.jsonl, row 3: not valid JSON\n")


def test_an_error_of_several_lines_becomes_one(capsys):
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError("found:\n- this\n- that")
    assert capsys.readouterr().err == "error: found: - this - that\n"


def test_other_errors_stay_what_they_are():
    with pytest.raises(ZeroDivisionError), exit_on_user_error():
        _ = 1 / 0
