"""Chooses the defaults that depend on the encoder, for the command line, recipes and Python."""

from __future__ import annotations

import json

from soft_trainer.choices import ESTIMATORS
from soft_trainer.encoders.hub_files import repository_file
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError, for_caller, name_option
from soft_trainer.options.declared import changed_options, declared_options
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main

SCRATCH_RATE = 1e-3
STATIC_RATE = 3e-3  # chosen on valid in benchmarks/static_study.md
RECIPE = "hard_batches.yaml"
DISTILLED_RECIPE = "distilled.yaml"


def apply_default_recipe(
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    profile: EncoderProfile,
    model: str | None,
    revision: str | None = None,
) -> None:
    """Applies the recipe that is known to help the encoder, if there is one, and prints the options that it sets.

    `recipes/distilled.yaml` helps an encoder that `soft-trainer distil` made, if its teacher can be loaded.
    `recipes/hard_batches.yaml` helps other pretrained encoders that have sentence-transformers files and cosine
    scores. Such an encoder can find and weight similar rows before it is trained. Other static encoders, and encoders
    from scratch, get a higher learning rate. Options that were given keep their values. A run that sets any option
    for batches or weights gets no recipe, and neither do all other encoders.

    Args:
        model: the folder or Hub name of the pretrained encoder, or None for an encoder from scratch.
    """
    given = args.named | changed_options(args).keys() | changed_options(data_args).keys()
    declared = declared_options(data_args) | declared_options(args)
    chosen = any(name in declared and declared[name].group in ("weights", "batches") for name in given)
    # In Python, `train` trains, whatever the parts of a run are.
    measures = not args.do_train and hasattr(args, "given")
    suits = model and not measures and not chosen and profile.score_function == "cosine"
    suits = suits and repository_file(model, "modules.json", revision) is not None
    teacher = None
    if suits:
        teacher = loadable_teacher(profile)
    if teacher is not None:
        values = read_recipe(RECIPES / DISTILLED_RECIPE) | {"estimator_model": teacher}
        options = _set_options(values, (data_args, args), given)
        other = for_caller("--estimator none", "callbacks=[BM25Estimator()]")
        print_on_main(f"This encoder learns from its teacher by default: {options}. {other} turns it off.")
    elif profile.name == "static" or model is None:
        if not measures and "learning_rate" not in given:
            _set_rate(args, profile)
    elif suits and args.per_device_train_batch_size * args.world_size >= 2 * args.group_size:
        options = _set_options(read_recipe(RECIPES / RECIPE), (data_args, args), given)
        other = for_caller("--estimator bm25", "callbacks=[BM25Estimator()]")
        print_on_main(f"This encoder gets hard batches by default: {options}. {other} turns them off.")


def _set_rate(args: SoftInfoNCETrainingArguments, profile: EncoderProfile) -> None:
    """Sets the learning rate of an encoder that 2e-5 would leave as it is, and prints it."""
    args.learning_rate = SCRATCH_RATE
    kind = "An encoder from scratch"
    if profile.name == "static":
        args.learning_rate = STATIC_RATE
        kind = "A static encoder"
    print_on_main(f"{kind} gets {name_option('learning_rate', args.learning_rate)} by default.")


def loadable_teacher(profile: EncoderProfile) -> str | None:
    """Returns the encoder that this one was distilled from, or None if it has none.

    If the teacher cannot be loaded, or is no longer the same encoder, a line says so, and the result is None.
    """
    if not profile.teacher:
        return None
    try:
        same = load_encoder(profile.teacher, device="cpu").identity() == profile.teacher_identity
    except UserError as error:
        print_on_main(f"This encoder trains without its teacher, which cannot be loaded: {error}")
        return None
    if same:
        return profile.teacher
    anyway = for_caller(
        f"give --config distilled --estimator_model {profile.teacher}",
        f'pass callbacks=[TrainedModelEstimator("{profile.teacher}")], loss="info_nce" and distill_weight',
    )
    print_on_main(
        f"This encoder trains without its teacher, because {profile.teacher} has changed since; to use it anyway, "
        f"{anyway}"
    )
    return None


def _set_options(values: dict, targets: tuple, given: set[str]) -> str:
    """Sets the options of a recipe that were not given. Returns them as the caller would write them."""
    changed = []
    for name, value in values.items():
        target = next((target for target in targets if hasattr(target, name)), None)
        if target is not None and name not in given:
            setattr(target, name, value)
            changed.append(_words(name, value, values))
    return for_caller(" ", ", ").join(filter(None, changed))


def _words(name: str, value, recipe: dict) -> str:
    """Returns an option of a recipe as the caller would write it. In Python, a callback has all of an estimator."""
    if name == "estimator_model":
        return for_caller(name_option(name, value), "")
    if name == "estimator":
        model = json.dumps(recipe["estimator_model"]) if "estimator_model" in recipe else ""
        return for_caller(name_option(name, value), f"callbacks=[{ESTIMATORS[value].partition(':')[2]}({model})]")
    return name_option(name, value)
