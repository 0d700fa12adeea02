"""The program `soft-trainer`: its commands, its error messages, and its start-up time."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

import soft_trainer
import soft_trainer.cli
from soft_trainer.cli.__main__ import COMMANDS, main, name_model, run_command
from soft_trainer.options.recipes import RECIPES, read_recipe, recipe_path
from soft_trainer.studies.study import read_study

HEAVY = ("torch", "transformers", "datasets", "numpy", "scipy", "pyarrow", "tree_sitter", "yaml", "huggingface_hub")


def in_a_process(*words: str) -> list[str]:
    """Runs a command in a new process. Returns its error and its lines.

    The last line has the heavy modules imported and the seconds.
    """
    code = (
        f"import sys, time; start = time.process_time(); sys.argv = {['soft-trainer', *words]}\n"
        "from soft_trainer.cli.__main__ import main\n"
        "try: main()\n"
        f"finally: print(*(name for name in {HEAVY} if name in sys.modules), time.process_time() - start)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(soft_trainer.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return [*done.stderr.splitlines(), *done.stdout.splitlines()]


def error_of(words: list[str], monkeypatch, capsys) -> str:
    """Returns the line that a command prints before it exits with code 2."""
    monkeypatch.setattr(sys, "argv", ["soft-trainer", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith("error: ") and printed.out == ""
    return line.removeprefix("error: ")


# ---- The commands ----


def test_the_table_names_the_modules_of_the_folder():
    paths = Path(soft_trainer.cli.__file__).parent.glob("*.py")
    files = {path.stem for path in paths if re.search(r"^(def run|run =)", path.read_text(), re.MULTILINE)}
    assert {name.replace("-", "_") for name in COMMANDS} == files - {"__init__", "__main__"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_description_and_options_and_help(name, capsys):
    command = importlib.import_module(f"soft_trainer.cli.{name.replace('-', '_')}")
    assert command.__doc__.strip() and callable(command.run)
    assert hasattr(command, "OPTIONS") != hasattr(command, "add_arguments")
    with pytest.raises(SystemExit) as stopped:
        run_command([name, "--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and printed.startswith(f"usage: soft-trainer {name} ")
    assert not re.search(r"python -m soft_trainer\b(?!\.cli)", printed)


def test_the_overview_lists_the_commands_and_imports_nothing_heavy():
    *listed, last = in_a_process("--help")
    assert re.findall(r"^    (\S+)", "\n".join(listed), re.MULTILINE) == list(COMMANDS)
    assert float(last) < 1  # no module stands before the seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_does_not_wait_for_torch(name):
    heavy = HEAVY if name in ("compare", "index", "report", "search", "study") else HEAVY[:3]
    assert not {*in_a_process(name, "--help")[-1].split()} & {*heavy}


def test_the_version_and_without_a_command_the_overview(capsys):
    with pytest.raises(SystemExit):
        run_command(["--version"])
    assert capsys.readouterr().out == f"soft-trainer {soft_trainer.__version__}\n"
    assert run_command([]) == 2
    assert re.search(r"evaluate +evaluate an encoder", capsys.readouterr().err)


# ---- Wrong words ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, says",
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["frobnicate"], "unknown command 'frobnicate'; --help lists them all"),
        (["--verson"], "unknown option --verson; did you mean '--version'?"),
        (["study", "--confg", "x"], "unknown option --confg; did you mean '--config'?"),
        (["study", "--config", "x", "--set", "seed"], "set seed: expected OPTION=VALUE"),
        (["mine", "x", "--languag=go"], "unknown option --languag; did you mean '--language'?"),
        (["mine", "/nowhere", "--language", "go", "--output_dir", "x"], "/nowhere: no such folder"),
        (["mine", "a", "b", "--language", "go", "--output_dir", "x"], "unrecognized arguments: b"),
        (["push", "x", "user/name", "--repo_type", "disk"], "argument --repo_type: invalid choice: 'disk'"),
        (["compare", "a", "b", "--number", "ten"], "argument --number: invalid int value: 'ten'"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere: no such folder or file"),
        (["train", "--langauge", "go"], "unknown option --langauge; did you mean 'language'?"),
        (["study", "--config", "quickstart"], f"{RECIPES / 'quickstart.yaml'}: not a study, because it has no runs"),
        (["push", "/nowhere", "user/name"], "/nowhere: no such folder"),
        (["train", "quickstart"], "unexpected 'quickstart': write options as --NAME VALUE"),
        (["evaluate", "--data_dir", "ROWS"], "give the encoder: soft-trainer evaluate MODEL"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_one_line_and_exit_code_2(words, says, monkeypatch, capsys):
    assert error_of(words, monkeypatch, capsys).startswith(says)


@pytest.mark.parametrize("words", ["* a --x b", "--x b * a", "--x=b * a --y 1", "--model a --x b", "--x b"])
def test_the_model_of_evaluate_may_stand_anywhere(words):
    assert name_model(words.replace("* ", "").split()) == words.replace("*", "--model_name_or_path").split()


TRAIN = ["train", "--model", "base", "--data_dir"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, says, waits_for",
    [
        ([*TRAIN, "ROWS/test.jsonl", "--code_column", "cod"], "did you mean 'code'?", "datasets"),
        ([*TRAIN, "ROW"], "data_dir=ROW: no such folder or file; did you mean ", ""),
        ([*TRAIN, "ROWS", "--loss", "soft_info_ne"], "loss='soft_info_ne': use one of soft_info_nce", ""),
        ([*TRAIN, "ROWS", "--alpha", "much"], "argument --alpha: invalid float value: 'much'", ""),
        ([*TRAIN, "ROWS", "--lora_alpha", "8"], "lora_alpha: has no effect without lora_r", ""),
        ([*TRAIN, "ROWS", "--save_steps", "9"], "save_steps=9: has no effect with save_strategy=epoch", ""),
        (["train", "--language", "rubi"], "CodeSearchNet supports only ruby", ""),
        (["evaluate", "base", "--data_dir", "ROW"], "data_dir=ROW: no such folder or file; did you mean ", ""),
    ],
)
def test_a_mistake_does_not_wait_for_torch(words, says, waits_for, data_dir, tmp_path):
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "config.json").write_text('{"model_type": "soft_trainer_static"}')
    places = {"ROWS": data_dir, "ROW": str(data_dir)[:-1], "STATIC": tmp_path / "static"}

    def replaced(text: str) -> str:
        return re.sub("|".join(places), lambda place: str(places[place[0]]), text)

    error, last = in_a_process(*map(replaced, words))
    *imported, seconds = last.split()
    assert replaced(says) in error
    assert not {"torch", "datasets"} & {*imported} - {waits_for} and float(seconds) < 3


def test_what_the_disk_refuses_is_one_line_too(monkeypatch, capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr("soft_trainer.cli.mine.mine_to", lambda **options: (tmp_path / "taken").mkdir())
    line = error_of(["mine", "x", "--language", "go", "--output_dir", "x"], monkeypatch, capsys)
    assert "File exists" in line and "taken" in line


# ---- Recipes by name ----


def test_a_recipe_has_a_name_and_a_path_wins_over_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml", "paper/unixcoder/base"):
        assert recipe_path(name).parent.is_relative_to(RECIPES)
    assert read_recipe(recipe_path("paper/unixcoder/base"))["num_train_epochs"] == 30  # of its base
    assert len(read_study(recipe_path("paper/overall")).runs) == 36
    (tmp_path / "quickstart").write_text("seed: 5\n")
    assert recipe_path("quickstart") == Path("quickstart")
    (tmp_path / "quickstart").unlink()
    (tmp_path / "quickstart").mkdir()  # a folder is no recipe
    assert recipe_path("quickstart") == RECIPES / "quickstart.yaml"


def test_a_name_that_no_recipe_has_lists_those_near_it(monkeypatch, capsys):
    for name, words in {
        "quikstart": "did you mean quickstart?",
        "unixcoder": "did you mean smoke/unixcoder or paper/unixcoder/base?",
        "nothing-like-it": "the recipes are distilled, encoders/base, ",
        "accelerate/fspd": "neither a file nor the name of a recipe",
    }.items():
        with refused(f"{name}: neither a file", words):
            recipe_path(name)
    for command in ("train", "study"):
        assert "did you mean quickstart?" in error_of([command, "--config", "quikstart"], monkeypatch, capsys)


# ---- Another run's folder ----


SMALL = {"language": "python", "from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32}
SHORT = {"per_device_train_batch_size": 8, "max_steps": 1, "save_strategy": "no", "model_card": "false"}
HERE = {"use_cpu": "true", "disable_tqdm": "true", "output_dir": "out"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_run_writes_flat_numbers_and_its_record(script, data_dir, tmp_path):
    options = SMALL | SHORT | HERE | {"data_dir": data_dir}

    def read(name: str) -> dict:
        return json.loads((tmp_path / "out" / name).read_text())

    assert script(**options)[0] == 0
    every, train, evaluated = (read(f"{part}_results.json") for part in ("all", "train", "eval"))
    assert every == train | evaluated and all(isinstance(value, int | float) for value in every.values())
    assert {"train_loss", "train_runtime", "epoch"} <= train.keys() and "step" not in train
    record = read("run.json")
    for name, systems in record["results"].items():
        assert evaluated[f"{name}_mrr"] == systems["trained"]["mrr"]
        assert evaluated[f"{name}_untrained_recall@5"] == systems["untrained"]["recall@5"]
        assert evaluated[f"{name}_lexical_pool_size"] == systems["lexical"]["pool_size"] == 24
    assert len(evaluated) == sum(len(each) for systems in record["results"].values() for each in systems.values())
