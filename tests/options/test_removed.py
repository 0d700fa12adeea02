"""Options and commands that are gone say what to use instead."""

import pytest
from refusals import refused

from soft_trainer.cli.__main__ import parse_command, run_command
from soft_trainer.options import removed
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.parse import parse
from soft_trainer.options.training import SoftInfoNCETrainingArguments


@pytest.fixture(autouse=True)
def gone(monkeypatch):
    monkeypatch.setitem(removed.REMOVED, "old_option", "use --loss")
    monkeypatch.setitem(removed.REMOVED, "old-command", "use train")


@pytest.mark.parametrize("options", [DataArguments, TrainingOptions, SoftInfoNCETrainingArguments])
def test_a_removed_option_names_its_replacement_in_python(options):
    with refused("old_option: was removed", "use --loss"):
        options(old_option=1)
    with pytest.raises(TypeError):  # any other unknown name
        options(no_such_option=1)


@pytest.mark.parametrize("name", ["--old_option", "--old-option"])
def test_a_removed_option_names_its_replacement_on_the_shell(name):
    with refused("old_option: was removed", "use --loss"):
        parse([DataArguments], [name, "1"])


def test_a_removed_option_names_its_replacement_in_a_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("old_option: 1\n")
    with refused("mine.yaml: old_option: was removed", "use --loss"):
        parse([DataArguments], ["--config", str(recipe)])


def test_a_removed_option_of_another_command_names_its_replacement():
    with refused("old_option: was removed", "use --loss"):
        parse_command(["evaluate", "MODEL", "--old_option", "1"])


def test_a_removed_command_names_its_replacement():
    with refused("old-command: was removed", "use train"):
        run_command(["old-command", "--help"])
