"""Chooses the default options that depend on the encoder, for the command line, recipes and Python.

The kind of the encoder alone decides the learning rate, the epochs, the warm-up and the batch size (`SCHEDULES`). The
estimator, the weights and the way of drawing batches are a second set (`METHODS`). An option that is set changes no
other option, unless the default cannot work beside it. A line names the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from accelerate.state import AcceleratorState

from soft_trainer.criterion import Criterion
from soft_trainer.encoders.passes import computes_bf16
from soft_trainer.encoders.profiles import EncoderProfile, is_cross_encoder
from soft_trainer.errors import UserError
from soft_trainer.hub.files import published_name, repository_file, split_revision
from soft_trainer.options.choices import ESTIMATORS, WEIGHTINGS
from soft_trainer.options.loss_options import TEACHER_WEIGHT
from soft_trainer.options.references import import_reference
from soft_trainer.options.spec import option_specs
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.system.packaged import BASE
from soft_trainer.system.terminal import print_on_main

LORA_RATE = 1e-4
SCHEDULE = ("learning_rate", "num_train_epochs", "warmup_steps", "per_device_train_batch_size")
# The defaults for each kind of encoder.
SCHEDULES = {
    "search": (6e-5, 1, 0.1, 32),  # recipes/hard_batches.yaml
    "distilled": (3e-3, 10, 0, 512),  # recipes/distilled.yaml
    "base": (1e-3, 5, 0, 128),  # chosen on valid in benchmarks/base_study.md
    "static": (3e-3, 10, 0, 128),  # benchmarks/static_study.md
    "scratch": (1e-3, 10, 0, 32),
    "pretrained": (2e-5, 10, 0, 32),
}
RANDOM = {"estimator": "bm25", "train_sampling_strategy": "random", "weighting": "linear"}
SIMILAR = {"estimator": "initial_model", "train_sampling_strategy": "similar", "weighting": "positive_aware"}
METHODS = dict.fromkeys(SCHEDULES, RANDOM) | {"search": SIMILAR}  # "distilled" also has the teacher in the profile
# What these options are if nothing about the encoder changes them. A run fingerprint omits these values.
PLAIN = dict(zip(SCHEDULE, SCHEDULES["pretrained"], strict=True)) | RANDOM | {"dataloader_drop_last": True}
LARGEST_BATCH = max(schedule[SCHEDULE.index("per_device_train_batch_size")] for schedule in SCHEDULES.values())
TITLES = {
    "search": "an encoder trained for search",
    "distilled": "an encoder with a stored teacher",
    "base": "the encoder `base`",
    "static": "a static encoder",
    "scratch": "an encoder from scratch",
    "pretrained": "a pretrained encoder",
}
OF_WEIGHTING = ("alpha", "beta", "floor", "margin")  # each is read by one of the weightings


def choose_precision(args: SoftInfoNCETrainingArguments, profile: EncoderProfile) -> None:
    """Sets `bf16` if neither the arguments nor the launcher chose a precision and the device computes in bfloat16.

    `accelerate launch` exports the precision "no" even if the user has not set one, so "no" is not a choice. DeepSpeed
    reads the precision from its own configuration.
    """
    if args.bf16 is not None:
        return
    args.bf16 = args.mixed_precision == "bf16"
    chosen = args.mixed_precision != "no" or args.deepspeed_plugin is not None
    if not chosen and profile.name != "static" and computes_bf16(args.device):
        args.bf16 = True
        args.mixed_precision = "bf16"
    earlier = AcceleratorState._shared_state.get("_mixed_precision")  # of another trainer in this process
    if not chosen and earlier not in (None, args.mixed_precision):
        AcceleratorState._reset_state()  # otherwise, `accelerate` refuses a trainer with another precision


def encoder_kind(starting) -> str:
    """Returns the kind of an encoder to train (`run/starting.py`), a key of `SCHEDULES`."""
    profile = starting.profile
    if starting.name and published_name(starting.name) == BASE:
        return "base"
    if starting.name and profile.teacher:
        return "distilled"
    if profile.name == "static":
        return "static"
    if starting.from_scratch:
        return "scratch"
    if starting.name and profile.score_function == "cosine":
        with suppress(UserError):  # a model in memory may come from a folder that has gone
            if repository_file(starting.name, "modules.json", starting.revision) is not None:
                return "search"
    return "pretrained"


def defaults_of(kind) -> dict[str, object]:
    """Returns the defaults of the options that a dataclass or its instance declares, for an encoder of no kind."""
    return PLAIN | {name: spec.default for name, spec in option_specs(kind).items() if name not in PLAIN}


def apply_defaults(
    args: SoftInfoNCETrainingArguments, starting, estimator=None, trains: bool = True, split=None
) -> None:
    """Sets the options that are None from the encoder and the other options, and prints what the encoder decided.

    `args.by_encoder` has the names of these options, and marks the arguments as complete: another trainer keeps them.

    Args:
        starting: the encoder to train (`run/starting.py`).
        estimator: the estimator passed to a trainer in Python, or None.
        trains: False for a run that only evaluates: nothing depends on its encoder but the precision.
        split: the training rows, if known.

    Raises:
        UserError: the options set both a teacher and another estimator, or a value that was set later is invalid.
    """
    choose_precision(args, starting.profile)
    if args.by_encoder is None:
        given = {name: value for name, value in vars(args).items() if value is not None}
        plain = defaults_of(args)
        values = dict(plain)
        title = ""
        if trains:
            if estimator is not None and "estimator" in given:
                raise UserError(f"estimator={args.estimator}: the callbacks have an estimator too; omit one of them")
            if estimator is not None:
                given["estimator"] = args.estimator = estimator_name(estimator)
            kind = encoder_kind(starting)
            title = TITLES[kind]
            values |= dict(zip(SCHEDULE, SCHEDULES[kind], strict=True)) | METHODS[kind]
            if starting.adapter:
                values["learning_rate"] = LORA_RATE
                title += " with an adapter"
            values |= _of_teacher(given, starting.profile.teacher if kind == "distilled" else None)
            values |= _adapted(values | given, given, estimator, args)
        args.by_encoder = values.keys() - given.keys()
        for name in args.by_encoder:
            setattr(args, name, values[name])
        shown = []
        for name, value in values.items():
            unread = name == "estimator" and not args.reads_estimator(split)
            if name in args.by_encoder and value != plain[name] and not unread:
                shown.append(f"{name}={value}")
        if shown:
            print_on_main(f"Defaults for {title}: {', '.join(shown)}")
    # This also checks what was set after the constructor, and puts the final values into DeepSpeed's configuration.
    SoftInfoNCETrainingArguments.__post_init__(args)


def default_output_dir(args: SoftInfoNCETrainingArguments, label: str, about: Mapping | None) -> str:
    """Returns `outputs/MODEL-ROWS-LOSS-ESTIMATOR`, or `outputs` if the rows have no name.

    Args:
        label: the short name of the encoder.
        about: see `SoftInfoNCETrainer`.
    """
    if not about:
        return "outputs"
    rows = "-".join(about["languages"]) or about["dataset"].rsplit("/", 1)[-1]
    loss = args.loss or ("info_nce" if args.estimator == "none" else "soft_info_nce")
    return f"outputs/{label}-{rows}-{loss}-{args.estimator}".replace(":", ".")


def _of_teacher(given: Mapping, stored: str | None) -> dict[str, object]:
    """Returns the defaults that a teacher stands for: the user's teacher, or the one in a distilled encoder's profile.

    Raises:
        UserError: the user set a teacher and another estimator.
    """
    teacher = given.get("teacher")
    other = given.get("estimator")
    if other in (None, "trained_model"):
        other = given.get("estimator_model")
    if teacher is not None:
        if other not in (None, teacher):
            raise UserError(f"teacher={teacher}: a teacher is the estimator, so it cannot be combined with {other}")
        weighting = {} if "loss" in given else {"weighting": "linear"}  # InfoNCE has no weights
        return teacher_settings(teacher) | weighting
    if stored is None or given.get("estimator", "trained_model") != "trained_model":
        return {}
    return {"teacher": other or stored} | teacher_settings(stored)


def _adapted(values: Mapping, given: Mapping, estimator, args: SoftInfoNCETrainingArguments) -> dict[str, object]:
    """Returns other values for defaults that cannot work beside the user's options."""
    random = {"train_sampling_strategy": "random"}
    linear = {"weighting": "linear"}
    if values["estimator"] == "none":
        return random | linear
    changes = {}
    finds, compares = _abilities(estimator or values["estimator"], args.bm25_document_column)
    if values["estimator"] == "trained_model" and values["estimator_model"] is not None:
        with suppress(UserError):  # `choose_estimator` explains why it cannot be read
            finds = finds and not is_cross_encoder(*split_revision(values["estimator_model"]))
    if not finds:
        changes |= random
    loss = values["loss"] or "soft_info_nce"
    if not compares or not Criterion(loss=loss).uses_weights:
        changes |= linear
    for name in OF_WEIGHTING:
        for weighting in WEIGHTINGS:
            reads = name in Criterion(loss=loss, weighting=weighting).reads
            if given.get(name) is not None and reads and (compares or weighting == "linear"):
                changes.setdefault("weighting", weighting)
    if {**values, **changes}["train_sampling_strategy"] == "similar":
        pairs = values["per_device_train_batch_size"] * args.world_size
        if 2 <= pairs < 2 * values["group_size"]:  # two groups
            changes["group_size"] = pairs // 2
    return changes


def _abilities(estimator, document_column: str | None) -> tuple[bool, bool]:
    """Returns whether an estimator finds similar rows, and whether it compares queries with functions.

    Args:
        estimator: an estimator, a built-in name, or the user's `module:Class`.
        document_column: the option `bm25_document_column`.
    """
    if isinstance(estimator, str) and ":" not in estimator:
        choice = ESTIMATORS[estimator]
        return choice.finds_neighbours, choice.compares_codes or (estimator == "bm25" and document_column is not None)
    if isinstance(estimator, str):
        estimator = import_reference("estimator", estimator)
    return callable(getattr(estimator, "neighbours", None)), getattr(estimator, "compares_codes", True)


def estimator_name(estimator) -> str:
    """Returns the value of the option `estimator` for an estimator object: a built-in name, or `module:Class`."""
    kind = type(estimator)
    for name, choice in ESTIMATORS.items():
        if choice and choice.reference == f"{kind.__module__.rpartition('.')[2]}:{kind.__qualname__}":
            return name
    return f"{kind.__module__}:{kind.__qualname__}"


def teacher_settings(teacher: str) -> dict[str, object]:
    """Returns the four settings that a teacher stands for."""
    return {
        "estimator": "trained_model",
        "estimator_model": teacher,
        "loss": "info_nce",
        "distill_weight": TEACHER_WEIGHT,
    }


def train_without_teacher(args: SoftInfoNCETrainingArguments) -> None:
    """Replaces a default teacher that cannot be loaded with the settings of a static encoder without one."""
    without = {"teacher": None, "estimator_model": None, "loss": None, "distill_weight": 0.0}
    for name, value in (METHODS["static"] | without).items():
        if name in args.by_encoder:
            setattr(args, name, value)
