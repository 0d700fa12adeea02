"""Values of options are checked, and references to files are found in them."""

import pytest
from refusals import refused

from soft_trainer import SoftInfoNCETrainingArguments
from soft_trainer.options.fields import DataArguments, SoftInfoNCEOptions, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import resolve
from soft_trainer.options.spec import option_specs, references


def test_references_are_in_parts_only_if_the_option_takes_several():
    options = {"source_dir": "a, b", "eval_data_dir": "c, d", "loss": None, "estimator": "mine:Own", "seed": 3}
    found = {each.option: each.values for each in references((DataArguments, TrainingOptions), options)}
    assert found == {"source_dir": ("a, b",), "eval_data_dir": ("c", "d"), "estimator": ("mine:Own",)}


# ---- Booleans and words ----


@pytest.mark.parametrize(("given", "word"), [(True, "true"), (False, "false"), ("auto", "auto")])
def test_a_bool_becomes_a_word(given, word):
    arguments = SoftInfoNCETrainingArguments(packing=given, use_cpu=True, loss="info_nce")
    assert arguments.packing == word
    arguments.packing = given  # arguments may change until training begins
    resolve(arguments)
    assert arguments.packing == word


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SoftInfoNCETrainingArguments, {"packing": 1}, "packing=1: use one of auto, true, false"),
        (SoftInfoNCETrainingArguments, {"packing": "no"}, "packing='no': use one of auto, true, false"),
        (SoftInfoNCETrainingArguments, {"cancel": True}, "cancel=True: use one of none, top_k, ratio"),
        (SoftInfoNCETrainingArguments, {"bf16": "false"}, "bf16='false': must be True or False"),
        (SoftInfoNCETrainingArguments, {"gather_negatives": 0}, "gather_negatives=0: must be True or False"),
        (SoftInfoNCETrainingArguments, {"lexical": "false"}, "lexical='false': must be True or False"),
        (ModelArguments, {"include_prompt": "no"}, "include_prompt='no': must be True or False"),
        (ModelArguments, {"dtype": 16}, "dtype=16: use one of float32, bfloat16, float16"),
    ],
)
def test_any_other_type_is_refused(kind, options, message):
    with refused(message):
        kind(**options)


def test_the_annotations_say_which_options_are_booleans():
    kinds = (SoftInfoNCEOptions, TrainingOptions, DataArguments, ModelArguments)
    for kind in kinds:
        for name, spec in option_specs(kind).items():
            assert spec.boolean or not isinstance(spec.default, bool), name
