"""Chooses the default options that depend on the encoder, for the command line, recipes and Python."""

from __future__ import annotations

from collections.abc import Set

from soft_trainer.encoders.hub_files import published_name, repository_file
from soft_trainer.encoders.packaged import BASE
from soft_trainer.encoders.passes import computes_bf16
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import TEACHER_WEIGHT, DataArguments
from soft_trainer.options.option_spec import changed_options, option_specs
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main

SCRATCH_RATE = 1e-3
LORA_RATE = 1e-4
# Rate and batch were chosen on valid in benchmarks/static_study.md. There may be fewer rows than in a batch.
STATIC = {"learning_rate": 3e-3, "per_device_train_batch_size": 128, "dataloader_drop_last": False}
# `base` is trained already. Its rate and epochs were chosen on valid in benchmarks/base_study.md.
OF_BASE = STATIC | {"learning_rate": 1e-3, "num_train_epochs": 5}
RECIPE = "hard_batches.yaml"
DISTILLED_RECIPE = "distilled.yaml"


def choose_precision(args: SoftInfoNCETrainingArguments, profile: EncoderProfile) -> None:
    """Sets `bf16` if neither the arguments nor the launcher chose a precision and the device computes in bfloat16.

    The table of settings says so, because `precision_is_default` is set then.

    `accelerate launch` exports the precision "no" even if the user has not set one, so "no" is not a choice. DeepSpeed
    reads the precision from its own configuration.
    """
    if args.bf16 is not None:
        return
    args.bf16 = args.mixed_precision == "bf16"
    if args.mixed_precision != "no" or args.deepspeed_plugin is not None or profile.name == "static":
        return
    if computes_bf16(args.device):
        args.bf16 = True
        args.mixed_precision = "bf16"
        args.precision_is_default = True


def apply_defaults(
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    profile: EncoderProfile,
    model: str | None,
    revision: str | None = None,
    estimator: str | None = None,
    adapter: bool = False,
) -> None:
    """Sets the options whose defaults depend on the encoder or the teacher, and prints them.

    An encoder that `soft-trainer distil` made gets `recipes/distilled.yaml`, with the teacher in its profile. Other
    static encoders get a higher learning rate and batches of 128, and `base` also fewer epochs. Encoders from scratch
    get a higher learning rate. Search encoders get `recipes/hard_batches.yaml`. These are other pretrained encoders
    with sentence-transformers files and cosine scores, which can find and weight similar rows before training. If the
    user set any option for batches or weights, no recipe is used. An adapter gets its own learning rate. Options that
    the user set keep their values.

    Args:
        model: the folder or Hub name of the pretrained encoder, or None for an encoder from scratch.
        estimator: the name of the estimator passed to a trainer in Python, or None.
        adapter: whether an adapter is trained instead of all weights.

    Raises:
        UserError: the options set both a teacher and another estimator.
    """
    choose_precision(args, profile)
    given = args.named | changed_options(args).keys() | changed_options(data_args).keys()
    specs = option_specs(data_args) | option_specs(args)
    chosen = [name for name in given if name in specs and specs[name].group in ("weights", "batches")]
    chosen = [name for name in chosen if name != "negatives_per_query"]  # these are added to any batch
    if "distill_weight" in given and args.distill_weight == 0:
        chosen.append("distill_weight")
    trains = args.do_train or not args.from_command_line  # in Python, `train` trains even without do_train
    if adapter and trains and (changed := _set_options({"learning_rate": LORA_RATE}, (args,), given)):
        given = {*given, "learning_rate"}
        print_on_main(f"An adapter gets {changed} by default.")
    suits = trains and model and not chosen and estimator is None and profile.score_function == "cosine"
    suits = suits and repository_file(model, "modules.json", revision) is not None
    if suits and profile.teacher:
        recipe = read_recipe(RECIPES / DISTILLED_RECIPE) | {"teacher": profile.teacher}
        options = _set_options(recipe, (data_args, args), given)
        print_on_main(
            f"This encoder learns from its teacher by default: {options}. Set estimator=none to turn this off."
        )
    elif trains and (profile.name == "static" or model is None):
        chooses_teacher = estimator is not None or not given.isdisjoint(("estimator", "estimator_model", "teacher"))
        if profile.teacher and chosen and not chooses_teacher:
            values = vars(data_args) | vars(args)
            options = ", ".join(f"{name}={values[name]}" for name in sorted(chosen))
            print_on_main(
                f"This encoder trains without its teacher, because of {options}; to use the teacher anyway, set "
                f"teacher={profile.teacher}"
            )
        kind = "An encoder from scratch"
        options = {"learning_rate": SCRATCH_RATE}
        if profile.name == "static":
            kind = "A static encoder"
            options = STATIC
        if model and published_name(model) == BASE:
            kind = "The encoder `base`"
            options = OF_BASE
        if changed := _set_options(options, (args,), given):
            print_on_main(f"{kind} gets {changed} by default.")
    elif suits and args.per_device_train_batch_size * args.world_size >= 2 * args.group_size:
        options = _set_options(read_recipe(RECIPES / RECIPE), (data_args, args), given)
        print_on_main(f"This encoder gets hard batches by default: {options}. Set estimator=none to turn this off.")
    if args.teacher is not None:
        if "estimator" in given and data_args.estimator != "trained_model":
            estimator = data_args.estimator
        elif "estimator_model" in given and data_args.estimator_model != args.teacher:
            estimator = data_args.estimator_model
        _set_options(teacher_settings(args.teacher, estimator), (data_args, args), given)


def teacher_settings(teacher: str, estimator: str | None = None) -> dict[str, object]:
    """Returns the four settings that a teacher stands for.

    Args:
        estimator: another estimator that is set, or None.

    Raises:
        UserError: another estimator is set.
    """
    if estimator is not None:
        raise UserError(f"teacher={teacher}: a teacher is the estimator, so it cannot be combined with {estimator}")
    return {
        "estimator": "trained_model",
        "estimator_model": teacher,
        "loss": "info_nce",
        "distill_weight": TEACHER_WEIGHT,
    }


def train_without_teacher(data_args: DataArguments, args: SoftInfoNCETrainingArguments) -> None:
    """Replaces the options of `recipes/distilled.yaml` with those of a static encoder without a teacher."""
    args.teacher = None
    args.loss = None
    data_args.estimator = "bm25"
    data_args.estimator_model = None
    _set_options(STATIC | {"distill_weight": 0.0}, (args,), args.named)


def _set_options(values: dict, targets: tuple, given: Set[str]) -> str:
    """Sets a recipe's options, except those in `given`. Returns the changes to print: "cancel=ratio, floor=0"."""
    changed = []
    for name, value in values.items():
        target = next((target for target in targets if hasattr(target, name)), None)
        if target is not None and name not in given:
            setattr(target, name, value)
            if name != "dataloader_drop_last":  # says nothing to a newcomer, who reads this line first
                changed.append(f"{name}={value}")
    return ", ".join(changed)
