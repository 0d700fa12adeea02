"""The declaration of an option: one call of `option` says all there is to know about it."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soft_trainer.errors import UserError

DEFAULT_OF_ESTIMATOR = " Default: the estimator's."


class Values:
    """The options of a run by name, from several objects: the first that has an option has its value."""

    def __init__(self, *sources):
        self._sources = sources

    def __getattr__(self, name: str):
        return next(getattr(source, name) for source in self._sources if hasattr(source, name))


@dataclass(frozen=True)
class ReadIf:
    """The condition under which an option is read.

    Args:
        holds: takes the `Values` of a run.
        otherwise: the end of the line that says why the option has no effect.
    """

    holds: Callable[[Values], bool]
    otherwise: str


@dataclass(frozen=True)
class Declared:
    """The arguments of `option` other than the default and the help text; see there."""

    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    read_if: ReadIf | None = None
    of_estimator: float | None = None
    results: bool = True

    @property
    def range(self) -> str:
        """The numbers that the option takes, in words."""
        start = f"above {self.above}" if self.least is None else str(self.least)
        if self.least is None and self.above is None:
            return "a finite number"
        end = f"to {self.most}" if self.most is not None else f"to below {self.below}"
        if self.most is not None or self.below is not None:
            return f"from {start} {end}"
        return start if self.least is None else f"{start} or more"

    def check(self, name: str, value) -> None:
        """Refuses a value that the option does not take. None always means the default.

        Raises:
            UserError: names the values that it takes.
        """
        if value is None:
            return
        if self.choices and isinstance(value, str) and value not in self.choices:
            raise UserError(f"{name}={value!r}: use one of {', '.join(self.choices)}")
        limits = {"ge": self.least, "gt": self.above, "le": self.most, "lt": self.below}
        limits = {compare: limit for compare, limit in limits.items() if limit is not None}
        if isinstance(value, str):
            if limits or self.of_estimator is not None:
                raise UserError(f"{name}={value!r}: a number is expected, not text")
            return
        finite = not isinstance(value, float) or math.isfinite(value)
        if not (finite and all(getattr(operator, compare)(value, limit) for compare, limit in limits.items())):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UserError(f"{name}={shown}: must be {self.range}")


class Help(str):
    """The help text of an option. It carries the declaration, as argparse takes no other metadata of a field."""

    declared: Declared


def option(default, help: str, *, prefix: str = "", **declared):
    """Declares an option as a dataclass field.

    Args:
        default: its default. None means that something else decides, which the help text names.
        help: one sentence for `--help`. An option with a default of its estimator says so by itself.
        prefix: stands before the help text.
        declared: `choices`, the texts that it takes; `least`, `above`, `most` and `below`, the range of a number;
            `read_if`, a `ReadIf` for an option that only some runs read; `of_estimator`, for an option whose default
            is the estimator's attribute of that name, the value without such an attribute; `results=False` for an
            option that changes what is printed, kept or how fast, but not the result.
    """
    text = Help(f"{prefix}{help}{'' if declared.get('of_estimator') is None else DEFAULT_OF_ESTIMATOR}")
    text.declared = Declared(**declared)
    return dataclasses.field(default=default, metadata={"help": text})


def declared_options(kind) -> dict[str, Declared]:
    """Returns the declarations of a dataclass, or of an instance, by option."""
    helps = {field.name: field.metadata.get("help") for field in dataclasses.fields(kind)}
    return {name: text.declared for name, text in helps.items() if isinstance(text, Help)}


def check_values(options) -> None:
    """Refuses values that the options of a dataclass do not take.

    Raises:
        UserError: the option, and the values that it takes.
    """
    for name, declared in declared_options(options).items():
        declared.check(name, getattr(options, name))


def changed_options(options, kind=None) -> dict[str, object]:
    """Returns the declared options of `kind` (all when None) whose values in `options` differ from their defaults."""
    kind = options if kind is None else kind
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    values = {name: getattr(options, name) for name in declared_options(kind)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def unread_options(options: Sequence, values: Values) -> list[str]:
    """Returns a line for each option that was given and has no effect, given the other options of the run."""
    return [
        f"warning: {name}={value} has no effect: {declared.read_if.otherwise}"
        for part in options
        for declared_by in (declared_options(part),)
        for name, value in changed_options(part).items()
        if (declared := declared_by[name]).read_if and not declared.read_if.holds(values)
    ]


def effective_options(kind, values: Values) -> dict[str, object]:
    """Returns the settings that a run reads of the options of `kind`, for tables and records.

    An option that every run reads is left out at its default; one that only some runs read is named.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    effective = {}
    for name, declared in declared_options(kind).items():
        value, read_if = getattr(values, name), declared.read_if
        if value is not None and (read_if.holds(values) if read_if else value != defaults[name]):
            effective[name] = value
    return effective
