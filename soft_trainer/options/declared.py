"""Declares options. One call of `option` has everything that the package knows about an option."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soft_trainer.errors import UserError

DEFAULT_OF_ESTIMATOR = " Default: the estimator's."


class Values:
    """Looks up options by name in several objects. The first object that has the option gives its value."""

    def __init__(self, *sources):
        self._sources = sources

    def __getattr__(self, name: str):
        for source in self._sources:
            if hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(name)


@dataclass(frozen=True)
class ReadIf:
    """The condition under which an option is read.

    Args:
        holds: returns True if the option is read, given the `Values` of a run.
        otherwise: the reason why the option has no effect otherwise.
    """

    holds: Callable[[Values], bool]
    otherwise: str


@dataclass(frozen=True)
class Declared:
    """The declaration of an option: the arguments of `option`, except the help text."""

    default: object = None
    choices: tuple[str, ...] = ()
    own: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    read_if: ReadIf | None = None
    of_estimator: float | None = None
    results: bool = True
    group: str = ""
    common: bool = False
    evaluation: bool = False
    mteb: bool = False

    @property
    def range(self) -> str:
        """The numbers that are valid for the option, in words."""
        if self.above is not None:
            return f"above {self.above}"
        if self.least is None:
            return "a finite number"
        if self.most is not None:
            return f"from {self.least} to {self.most}"
        if self.below is not None:
            return f"from {self.least} to below {self.below}"
        return f"{self.least} or more"

    def check(self, name: str, value) -> None:
        """Checks a value of the option. None always means the default.

        Raises:
            UserError: the value is invalid. The message gives the valid ones.
        """
        limits = {"ge": self.least, "gt": self.above, "le": self.most, "lt": self.below}
        limits = {compare: limit for compare, limit in limits.items() if limit is not None}
        if isinstance(value, str):
            taken = value in self.choices or (self.own and ":" in value)
            if self.choices and not taken:
                own = ", or module:name" if self.own else ""
                raise UserError(f"{name}={value!r}: use one of {', '.join(self.choices)}{own}")
            if limits or self.of_estimator is not None:
                raise UserError(f"{name}={value!r}: a number is expected, not text")
        elif value is not None:
            fits = all(getattr(operator, compare)(value, limit) for compare, limit in limits.items())
            if isinstance(value, float):
                fits = fits and math.isfinite(value)
                value = f"{value:g}"
            if not fits:
                raise UserError(f"{name}={value}: must be {self.range}")


class Help(str):
    """The help text of an option. It carries the declaration, because argparse keeps no other metadata."""

    declared: Declared


def option(default, help: str, *, aliases: Sequence[str] = (), **declared):
    """Declares an option as a dataclass field.

    Args:
        default: the default. None means that it is decided elsewhere; the help text says where.
        help: one sentence for `--help`. The estimator's default is appended automatically.
        aliases: other names on the command line.
        declared: any of these.
            `choices`: the valid texts. With `own=True`, a user's `module:name` is valid too.
            `least`, `above`, `most`, `below`: the range of a number.
            `read_if`: a `ReadIf`, for an option that only some runs read.
            `of_estimator`: for an option whose default is the estimator's attribute of the same name. This is the
                default if the estimator has no such attribute.
            `results=False`: the option does not affect results, only what is printed or kept, or the speed.
            `group`: the heading in `--help`. All options that choose weights or batches are in "weights" or "batches".
            `common=True`: `--help` shows the option. `--help_all` shows all options.
            `evaluation=True`: `soft-trainer evaluate` has the option too. With `mteb=True`, it is also read with
                `--mteb`.
    """
    if declared.get("of_estimator") is not None:
        help += DEFAULT_OF_ESTIMATOR
    text = Help(help)
    text.declared = Declared(default, **declared)
    metadata = {"help": text}
    if aliases:
        metadata["aliases"] = [f"--{name}" for name in aliases]
    return dataclasses.field(default=default, metadata=metadata)


unset = functools.partial(option, None)  # the default is decided elsewhere; the help text says where


def declared_options(kind) -> dict[str, Declared]:
    """Returns the declarations of a dataclass, or of an instance, by option."""
    declared = {}
    for field in dataclasses.fields(kind):
        text = field.metadata.get("help")
        if isinstance(text, Help):
            declared[field.name] = text.declared
    return declared


def evaluation_options(kind) -> tuple[str, ...]:
    """Returns the options of a dataclass that `soft-trainer evaluate` shares, with the same help and defaults."""
    return tuple(name for name, declared in declared_options(kind).items() if declared.evaluation)


def check_values(options) -> None:
    """Checks the values of a dataclass's options.

    Raises:
        UserError: a value is invalid. The message gives the option and its valid values.
    """
    for name, declared in declared_options(options).items():
        declared.check(name, getattr(options, name))


def changed_options(options) -> dict[str, object]:
    """Returns the declared options whose values differ from their defaults."""
    changed = {}
    for name, declared in declared_options(options).items():
        value = getattr(options, name)
        if value != declared.default:
            changed[name] = value
    return changed


def unread_options(options: Sequence, values: Values) -> list[str]:
    """Returns a line for each option that was given and has no effect, given the other options of the run."""
    lines = []
    for part in options:
        declared = declared_options(part)
        for name, value in changed_options(part).items():
            read_if = declared[name].read_if
            if read_if and not read_if.holds(values):
                lines.append(f"warning: {name}={value} has no effect: {read_if.otherwise}")
    return lines


def effective_options(kind, values: Values) -> dict[str, object]:
    """Returns the options of `kind` that have an effect in a run, with their values, for tables and records.

    An option that only some runs read is included if this run reads it. Other options are included if they differ from
    their defaults.
    """
    effective = {}
    for name, declared in declared_options(kind).items():
        value = getattr(values, name)
        if declared.read_if:
            read = declared.read_if.holds(values)
        else:
            read = value != declared.default
        if read and value is not None:
            effective[name] = value
    return effective
