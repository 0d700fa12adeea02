"""Chooses the default options that depend on the encoder, for the command line, recipes and Python.

The kind of the encoder alone decides the learning rate, the epochs, the warm-up and the batch size (`SCHEDULES`). The
estimator, the weights and the way of drawing batches are a second set (`METHODS`). An option that is set changes no
other option, unless the default cannot work beside it: then a line names the change and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from accelerate.state import AcceleratorState

from soft_trainer.choices import ESTIMATORS, WEIGHTINGS
from soft_trainer.criterion import Criterion
from soft_trainer.encoders.passes import computes_bf16
from soft_trainer.encoders.profiles import EncoderProfile, is_cross_encoder
from soft_trainer.errors import UserError
from soft_trainer.hub_files import published_name, repository_file, split_revision
from soft_trainer.loss_options import TEACHER_WEIGHT
from soft_trainer.option_spec import ENCODER, changed_options
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.packaged import BASE
from soft_trainer.references import import_reference
from soft_trainer.terminal import print_on_main

LORA_RATE = 1e-4
SCHEDULE = ("learning_rate", "num_train_epochs", "warmup_steps", "per_device_train_batch_size", "dataloader_drop_last")
# The defaults for each kind of encoder. Static encoders may have fewer rows than a batch, so they keep the last one.
SCHEDULES = {
    "search": (6e-5, 1, 0.1, 32, True),  # recipes/hard_batches.yaml
    "distilled": (3e-3, 10, 0, 512, False),  # recipes/distilled.yaml
    "base": (1e-3, 5, 0, 128, False),  # chosen on valid in benchmarks/base_study.md
    "static": (3e-3, 10, 0, 128, False),  # benchmarks/static_study.md
    "scratch": (1e-3, 10, 0, 32, True),
    "pretrained": (2e-5, 10, 0, 32, True),
}
RANDOM = {"estimator": "bm25", "train_sampling_strategy": "random", "weighting": "linear"}
SIMILAR = {"estimator": "initial_model", "train_sampling_strategy": "similar", "weighting": "positive_aware"}
METHODS = dict.fromkeys(SCHEDULES, RANDOM) | {"search": SIMILAR}  # "distilled" also has the teacher in the profile
TITLES = {
    "search": "an encoder trained for search",
    "distilled": "an encoder with a stored teacher",
    "base": "the encoder `base`",
    "static": "a static encoder",
    "scratch": "an encoder from scratch",
    "pretrained": "a pretrained encoder",
}
NO_TEACHER = {"teacher": None, "estimator_model": None, "loss": None, "distill_weight": 0.0}
LARGE_BATCH = 256
OF_WEIGHTING = ("alpha", "beta", "floor", "margin")  # each is read by one of the weightings


def choose_precision(args: SoftInfoNCETrainingArguments, profile: EncoderProfile) -> None:
    """Sets `bf16` if neither the arguments nor the launcher chose a precision and the device computes in bfloat16.

    The table of settings says so, because `precision_is_default` is set then.

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
        args.precision_is_default = True
    earlier = AcceleratorState._shared_state.get("_mixed_precision")  # of another trainer in this process
    if not chosen and earlier not in (None, args.mixed_precision):
        AcceleratorState._reset_state()  # otherwise, `accelerate` refuses a trainer with another precision


def encoder_kind(profile: EncoderProfile, model: str | None, revision: str | None = None) -> str:
    """Returns the kind of an encoder, a key of `SCHEDULES`.

    Args:
        model: the folder or Hub name of the pretrained encoder, or None for an encoder from scratch.
    """
    if model and published_name(model) == BASE:
        return "base"
    if model and profile.teacher:
        return "distilled"
    if profile.name == "static":
        return "static"
    if model is None:
        return "scratch"
    if profile.score_function == "cosine":
        with suppress(UserError):  # a model in memory may come from a folder that has gone
            if repository_file(model, "modules.json", revision) is not None:
                return "search"
    return "pretrained"


def apply_defaults(
    args: SoftInfoNCETrainingArguments, starting, estimator=None, trains: bool = True, split=None
) -> None:
    """Sets the options whose defaults depend on the encoder or on other options, and prints what it chose.

    Options that the user set keep their values. `args.origins` stores who chose each value, and marks the arguments as
    complete: a second call has no effect.

    Args:
        starting: the encoder to train (`run/starting.py`).
        estimator: the estimator passed to a trainer in Python, or None.
        trains: False for a run that only evaluates, which needs no defaults but the precision.
        split: the training rows, if known.

    Raises:
        UserError: the options set both a teacher and another estimator.
    """
    profile = starting.profile
    choose_precision(args, profile)
    if args.origins is not None:
        return
    args.origins = {}
    if not trains:
        return
    choice = _Choice(args)
    given = choice.given
    if estimator is not None:
        if given.get("estimator") is not None:
            raise UserError(f"estimator={given['estimator']}: the callbacks have an estimator too; omit one of them")
        if args.teacher is not None:
            check_teacher(args.teacher, type(estimator).__name__)
        given["estimator"] = args.estimator = estimator_name(estimator)
        args.origins["estimator"] = "you"
    # An encoder without a name counts as trained from scratch.
    kind = encoder_kind(profile, starting.name, starting.revision)
    schedule = dict(zip(SCHEDULE, SCHEDULES[kind], strict=True))
    title = TITLES[kind]
    if starting.adapter:
        schedule["learning_rate"] = LORA_RATE
        title += " with an adapter"
    choice.defaults(schedule | METHODS[kind])
    _choose_teacher(choice, kind, profile.teacher, estimator)
    _adapt(choice, kind, estimator)
    hidden = ("dataloader_drop_last", None if args.reads_estimator(split) else "estimator")
    shown = []
    for name, origin in args.origins.items():
        if origin == ENCODER and getattr(args, name) != getattr(type(args), name) and name not in hidden:
            shown.append(f"{name}={getattr(args, name)}")
    if shown:
        print_on_main(f"Defaults for {title}: {', '.join(shown)}")
    for line in choice.lines:
        print_on_main(line)
    if kind == "search" and not starting.adapter and args.origins["learning_rate"] == ENCODER:
        pairs = args.per_device_train_batch_size * args.world_size
        if pairs >= LARGE_BATCH:
            print_on_main(
                f"learning_rate={args.learning_rate:g} was chosen in batches of 32. In batches of {LARGE_BATCH}, the "
                f"MRR of MiniLM on valid still rose at 1.8e-4, so try a higher rate with your {pairs} pairs per batch"
            )


def default_output_dir(args: SoftInfoNCETrainingArguments, label: str, about: Mapping | None) -> str:
    """Returns `outputs/MODEL-ROWS-LOSS-ESTIMATOR`, or `outputs` if the rows have no name.

    Args:
        label: the short name of the encoder.
        about: see `SoftInfoNCETrainer`.
    """
    if not about:
        return "outputs"
    rows = "-".join(about["languages"]) or about["dataset"].rsplit("/", 1)[-1]
    estimator = args.estimator or "none"
    loss = args.loss or ("info_nce" if estimator == "none" else "soft_info_nce")
    return f"outputs/{label}-{rows}-{loss}-{estimator}".replace(":", ".")


class _Choice:
    """Sets options that the user has not set, and keeps the origin of each value and a line for each consequence.

    Attributes:
        given: the options that the user set: in the constructor, or later to another value than the default.
    """

    def __init__(self, args: SoftInfoNCETrainingArguments):
        self.args = args
        self.lines: list[str] = []
        self.given = {name: getattr(args, name) for name in args.named if hasattr(args, name)} | changed_options(args)
        for name in ("warmup_steps", "dataloader_drop_last"):  # options of `transformers`
            if getattr(args, name) != getattr(type(args), name):
                self.given[name] = getattr(args, name)
        for name in self.given:
            args.origins[name] = "recipe" if name in args.of_recipe else "you"

    def defaults(self, values: Mapping[str, object]) -> None:
        """Sets the encoder's defaults, except for options that the user set."""
        for name, value in values.items():
            if name not in self.given:
                setattr(self.args, name, value)
                self.args.origins[name] = ENCODER

    def follow(self, cause: str, why: str, values: Mapping[str, object], loss: str | None = None) -> None:
        """Replaces defaults that cannot work beside the option `cause`, and adds a line with the changes.

        Args:
            why: the reason for the changes, such as "it uses no weights".
            loss: the loss that `loss=None` now stands for, if it changes.
        """
        changed = []
        for name, value in values.items():
            if self.args.origins.get(name, ENCODER) == ENCODER and getattr(self.args, name) != value:
                setattr(self.args, name, value)
                self.args.origins[name] = f"you, by {cause}"
                if value is not None:
                    changed.append(f"{name}={value}")
        if loss is not None and self.args.loss is None:
            changed.append(f"loss={loss}")
        if changed:
            self.lines.append(f"{cause}={getattr(self.args, cause)}: {why}, so {', '.join(changed)}")


def _choose_teacher(choice: _Choice, kind: str, stored: str | None, estimator) -> None:
    """Sets the options that a teacher stands for: the user's teacher, or the one in a distilled encoder's profile.

    Raises:
        UserError: the user set a teacher and another estimator.
    """
    args = choice.args
    given = choice.given
    if given.get("teacher") is not None:
        check_teacher(args.teacher, given.get("estimator"), given.get("estimator_model"))
        settings = teacher_settings(args.teacher)
        if "loss" not in given:
            settings["weighting"] = "linear"  # InfoNCE has no weights
        choice.follow("teacher", "it stands for other options", settings)
    elif kind == "distilled":
        choice.defaults({"teacher": stored} | teacher_settings(stored))
        if given.get("estimator_model") is not None:
            choice.follow("estimator_model", f"it replaces the teacher {stored}", {"teacher": args.estimator_model})
        if estimator is not None or given.get("estimator", "trained_model") != "trained_model":
            why = f"it replaces the teacher; teacher={stored} keeps it"
            choice.follow("estimator", why, NO_TEACHER)


def _adapt(choice: _Choice, kind: str, estimator) -> None:
    """Replaces defaults of a kind of encoder that cannot work beside the user's options."""
    args = choice.args
    weighs = kind != "distilled"  # the default loss of the kind
    if args.estimator in (None, "none"):
        without = {"train_sampling_strategy": "random", "weighting": "linear"}
        loss = "info_nce" if weighs else None
        choice.follow("estimator", "nothing finds similar rows or weighs negatives", without, loss)
        return
    if not weighs:
        choice.follow("estimator", "its similarities become weights", {}, "soft_info_nce")
    finds, compares = _abilities(estimator or args.estimator, args.bm25_document_column)
    cause = "estimator"
    if args.estimator == "trained_model" and args.estimator_model is not None:
        with suppress(UserError):  # `choose_estimator` explains why it cannot be read
            if is_cross_encoder(*split_revision(args.estimator_model)):
                finds = False
                cause = "estimator_model"
    if not finds:
        choice.follow(cause, "it cannot find similar rows", {"train_sampling_strategy": "random"})
    loss = args.loss or "soft_info_nce"
    if not Criterion(loss=loss).uses_weights:
        choice.follow("loss", "it uses no weights", {"weighting": "linear"})
    elif not compares:
        choice.follow("estimator", "it compares queries with queries", {"weighting": "linear"})
    for name in OF_WEIGHTING:
        for weighting in WEIGHTINGS:
            reads = name in Criterion(loss=loss, weighting=weighting).reads
            if choice.given.get(name) is not None and reads and (compares or weighting == "linear"):
                choice.follow(name, f"only {weighting} weights use it", {"weighting": weighting})
    if args.train_sampling_strategy != "similar":
        return
    pairs = args.per_device_train_batch_size * args.world_size
    if 2 <= pairs < 2 * args.group_size:
        why = f"too few for two groups of {args.group_size} similar rows"
        choice.follow("per_device_train_batch_size", why, {"group_size": pairs // 2})


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


def check_teacher(teacher: str, estimator: str | None, estimator_model: str | None = None) -> None:
    """Checks that no other estimator is set beside a teacher.

    Raises:
        UserError: another estimator is set.
    """
    other = estimator_model if estimator in (None, "trained_model") else estimator
    if other not in (None, teacher):
        raise UserError(f"teacher={teacher}: a teacher is the estimator, so it cannot be combined with {other}")


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
    for name, value in (METHODS["static"] | NO_TEACHER).items():
        if args.origins[name] == ENCODER:
            setattr(args, name, value)
