"""Every option with choices or a range accepts the values at its limits, and refuses the values just outside."""

import math

import pytest

from soft_trainer.errors import UserError
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.option_spec import OptionSpec, Values, option_specs, references
from soft_trainer.options.resolve import RANGES
from soft_trainer.options.training import SoftInfoNCETrainingArguments

KINDS = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
DECLARED = {name: each for kind in KINDS for name, each in option_specs(kind).items()} | RANGES


def border(declared: OptionSpec) -> tuple[list, list]:
    """Returns values at the limits that an option accepts, and values just outside that it refuses."""
    taken, refused = [None, *declared.choices], ["nonsense"] if declared.choices else []
    for limit, outside in ((declared.least, -1), (declared.most, 1)):
        if limit is not None:
            taken.append(limit)
            refused += [limit + outside, math.nan]
    for limit, inside in ((declared.above, 0.5), (declared.below, -0.5)):
        if limit is not None:
            taken.append(limit + inside)
            refused += [limit, math.inf]
    return taken, refused


@pytest.mark.parametrize("name", [name for name, declared in DECLARED.items() if border(declared)[1]])
def test_values_on_the_border(name):
    taken, refused = border(DECLARED[name])
    for value in taken:
        DECLARED[name].check(name, value)
    for value in refused:
        with pytest.raises(UserError, match=f"^{name}=.*: (must be|use one of) "):
            DECLARED[name].check(name, value)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (OptionSpec(least=0), "0 or more"),
        (OptionSpec(above=0), "above 0"),
        (OptionSpec(least=0, most=1), "from 0 to 1"),
        (OptionSpec(least=0, below=1), "from 0 to below 1"),
        (OptionSpec(), "a finite number"),
    ],
)
def test_a_range_in_words(declared, words):
    assert declared.range == words


def test_the_values_of_several_objects():
    values = Values(OptionSpec(least=1), OptionSpec(least=2))
    assert values.least == 1 and not hasattr(values, "unknown")


def test_references_are_in_parts_only_if_the_option_takes_several():
    options = {"source_dir": "a, b", "eval_data_dir": "c, d", "loss": None, "estimator": "mine:Own", "seed": 3}
    found = {each.option: each.values for each in references((DataArguments, TrainingOptions), options)}
    assert found == {"source_dir": ("a, b",), "eval_data_dir": ("c", "d"), "estimator": ("mine:Own",)}
