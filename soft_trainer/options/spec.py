"""Defines `option`, which declares an option with its default, help text and limits."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from soft_trainer.errors import UserError
from soft_trainer.system.terminal import nearest

FILES_OF_TRANSFORMERS = ("deepspeed", "fsdp_config")  # options of `transformers` whose value may be a file
BOOLEAN = (bool, bool | None, "bool", "bool | None")  # annotations of options that are True or False


@dataclass(frozen=True)
class OptionSpec:
    """The declaration of an option: its default, its valid values, and the other arguments of `option`."""

    default: object = None
    choices: tuple[str, ...] = ()
    own: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    of_estimator: float | None = None
    results: bool = True
    group: str = ""
    common: bool = False
    refers_to: str = ""
    several: bool = False
    chooses_rows: bool = False
    boolean: bool = False

    @property
    def range(self) -> str:
        """The valid range in words, such as "above 0" or "from 0 to 1"."""
        if self.above is not None:
            below = "" if self.below is None else f" and below {self.below}"
            return f"above {self.above}{below}"
        if self.least is None:
            return "a finite number"
        if self.most is not None:
            return f"from {self.least} to {self.most}"
        if self.below is not None:
            return f"from {self.least} to below {self.below}"
        return f"{self.least} or more"

    def checked(self, name: str, value):
        """Checks a value of the option and returns it. None is always valid and means the default.

        For an option with the choices `true` and `false`, a bool becomes one of these words.

        Raises:
            UserError: the value is invalid. The message gives the valid values.
        """
        if value is None:
            return None
        if isinstance(value, bool) and "true" in self.choices:
            return str(value).lower()
        if self.boolean and not isinstance(value, bool):
            raise UserError(f"{name}={value!r}: must be True or False")
        if self.choices:
            own = self.own and (callable(value) or ":" in str(value))
            if value not in self.choices and not own:
                words = ", or module:name" if self.own else ""
                near = nearest(value, self.choices)
                raise UserError(f"{name}={value!r}: use one of {', '.join(self.choices)}{words}{near}")
            return value
        limits = {"ge": self.least, "gt": self.above, "le": self.most, "lt": self.below}
        limits = {compare: limit for compare, limit in limits.items() if limit is not None}
        if isinstance(value, str):
            if limits or self.of_estimator is not None:
                raise UserError(f"{name}={value!r}: expected a number, not text")
            return value
        fits = all(getattr(operator, compare)(value, limit) for compare, limit in limits.items())
        if isinstance(value, float):
            fits = fits and math.isfinite(value)
        if not fits:
            raise UserError(f"{name}={value}: must be {self.range}")
        return value


class Help(str):
    """An option's help text with the `OptionSpec` attached, because argparse keeps no other metadata."""

    declared: OptionSpec


def option(default, help: str, *, aliases: Sequence[str] = (), **declared):
    """Declares an option as a dataclass field.

    Args:
        default: the default value. If it is None, the actual default is chosen elsewhere, and the help text gives it.
        help: one sentence for `--help`. If the default comes from the estimator, a note is appended automatically.
        aliases: other names for the option on the command line.
        declared: any of the following.
            `choices`: the valid strings. With `own=True`, a user's `module:name` is valid too.
            `least`, `above`, `most`, `below`: the limits of a number.
            `of_estimator`: for an option whose default is the estimator's attribute with the same name. This is the
                default if the estimator lacks the attribute.
            `results=False`: the option affects only the speed or what is printed or kept, not the results.
            `group`: the heading in `--help`. All options that choose weights or batches are in "weights" or "batches".
            `refers_to`: what the value refers to: "rows", an "encoder", a "tree" or repository to mine, "code" (a
                function or class, such as module:name) or another "folder". With `several=True`, it is a list,
                separated by commas.
            `chooses_rows=True`: the option excludes rows from an evaluation set.
            `common=True`: `--help` shows the option. `--help_all` shows all options.
    """
    if declared.get("of_estimator") is not None:
        help += " Default: the estimator's."
    text = Help(help)
    text.declared = OptionSpec(default, **declared)
    metadata = {"help": text}
    if aliases:
        metadata["aliases"] = [f"--{name}" for name in aliases]
    return dataclasses.field(default=default, metadata=metadata)


unset = functools.partial(option, None)  # the actual default is chosen elsewhere, and the help text gives it


def option_specs(kind) -> dict[str, OptionSpec]:
    """Returns the `OptionSpec` of each option that a dataclass or its instance declares, keyed by name."""
    declared = {}
    for field in dataclasses.fields(kind):
        text = field.metadata.get("help")
        if isinstance(text, Help):
            declared[field.name] = dataclasses.replace(text.declared, boolean=field.type in BOOLEAN)
    return declared


class Reference(NamedTuple):
    """A reference from an option to rows, an encoder, a tree, code or a file.

    Args:
        option: the name of the option.
        kind: "rows", "encoder", "tree", "code", "folder", or "file" for an option of `transformers`.
        values: the paths or names. Only an option that takes a list can have more than one.
    """

    option: str
    kind: str
    values: tuple[str, ...]


def references(kinds: Iterable, options: Mapping[str, object]) -> list[Reference]:
    """Returns a `Reference` for each option that refers to rows, an encoder, a tree, code or a file.

    Args:
        kinds: the dataclasses, or instances of them, that declare the options. The result has the same order.
        options: the values, keyed by name. Options that are None or missing are skipped.
    """
    found = []
    for name in FILES_OF_TRANSFORMERS:
        if isinstance(options.get(name), str):
            found.append(Reference(name, "file", (options[name],)))
    for kind in kinds:
        for name, declared in option_specs(kind).items():
            value = options.get(name)
            if declared.refers_to and value:
                values = [str(value)]
                if declared.several and not os.path.exists(values[0]):  # a path may contain a comma
                    values = values[0].split(",")
                found.append(Reference(name, declared.refers_to, tuple(part.strip() for part in values)))
    return found


def described(field: dataclasses.Field) -> str:
    """Returns an option's help for Python and recipes: the command line's `--name` becomes `name`."""
    return re.sub(r"--(\w+)", r"`\1`", field.metadata["help"])


def documented(kind: type) -> type:
    """Replaces the word `OPTIONS` in a dataclass's docstring with the help of each declared option."""
    lines = []
    for name in option_specs(kind):
        text = f"{name}: {described(kind.__dataclass_fields__[name])}"
        lines.append(textwrap.fill(text, 114, initial_indent="    ", subsequent_indent="        "))
    kind.__doc__ = inspect.cleandoc(kind.__doc__).replace("OPTIONS", "\n".join(lines))
    return kind


def check_values(options, specs: Mapping[str, OptionSpec] | None = None) -> None:
    """Checks the values of all options of a dataclass instance. A bool becomes a word where the option has words.

    Args:
        specs: the declarations, keyed by name. By default, the instance's. Options that it lacks are skipped.

    Raises:
        UserError: a value is invalid. The message gives the option and its valid values.
    """
    for name, declared in (specs or option_specs(options)).items():
        if not hasattr(options, name):
            continue
        value = getattr(options, name)
        checked = declared.checked(name, value)
        if checked is not value:
            setattr(options, name, checked)


def changed_options(options) -> dict[str, object]:
    """Returns the declared options whose values differ from their defaults. None stands for the default."""
    changed = {}
    for name, declared in option_specs(options).items():
        value = getattr(options, name)
        if value not in (None, declared.default):
            changed[name] = value
    return changed


def unread_lines(options, reasons: Mapping[str, str]) -> list[str]:
    """Returns a warning for each option that the user changed but that has no effect.

    Args:
        reasons: the options without an effect, each with the reason.
    """
    lines = []
    chosen = getattr(options, "by_encoder", None) or ()
    for name, value in changed_options(options).items():
        if name in reasons and name not in chosen:
            lines.append(f"warning: {name}={value} has no effect: {reasons[name]}")
    return lines
