"""Options of several objects are looked up together, and references to files are found in them."""

from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.option_spec import OptionSpec, Values, references


def test_the_values_of_several_objects():
    values = Values(OptionSpec(least=1), OptionSpec(least=2))
    assert values.least == 1 and not hasattr(values, "unknown")


def test_references_are_in_parts_only_if_the_option_takes_several():
    options = {"source_dir": "a, b", "eval_data_dir": "c, d", "loss": None, "estimator": "mine:Own", "seed": 3}
    found = {each.option: each.values for each in references((DataArguments, TrainingOptions), options)}
    assert found == {"source_dir": ("a, b",), "eval_data_dir": ("c", "d"), "estimator": ("mine:Own",)}
