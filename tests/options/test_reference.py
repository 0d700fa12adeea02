"""The signature, docstrings, stub and options page are generated from the declarations of the options."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.spec import option_specs
from soft_trainer.options.training import SoftInfoNCETrainingArguments

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from options_reference import PAGE, STUB, options_page, stub  # noqa: E402

KINDS = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)


def test_the_stub_and_the_page_are_what_the_command_writes():
    assert STUB.read_text() == stub(), "run `python docs/options_reference.py`"
    assert PAGE.read_text() == options_page(), "run `python docs/options_reference.py`"


@pytest.mark.parametrize("kind", KINDS)
def test_the_docstring_has_every_option_and_no_word_of_the_shell(kind):
    for name in option_specs(kind):
        assert f"\n    {name}: " in kind.__doc__
    assert "--" not in kind.__doc__ and "OPTIONS" not in kind.__doc__


def test_the_page_has_every_option_once():
    page = options_page()
    names = [name for kind in KINDS for name in option_specs(kind)]
    assert not [name for name in names if len(re.findall(rf"^\| `{name}`", page, re.MULTILINE)) != 1]
    others = {field.name for field in dataclasses.fields(SoftInfoNCETrainingArguments) if field.init} - set(names)
    assert not [name for name in others if page.count(f"\n| `{name}` |") != 1]
    assert "\n| `learning_rate`, `lr` | Peak learning rate" in page
    assert "| `cancel_ratio` | `cancel=ratio`: negatives" in page
