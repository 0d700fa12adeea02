"""Generates the option reference from the declarations: a stub for editors, and the page `docs/options.md`.

`python docs/options_reference.py` writes both.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainingArguments

from soft_trainer.options import training
from soft_trainer.options.defaults import PLAIN, SCHEDULE
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import RANGES, REFUSED
from soft_trainer.options.spec import OptionSpec, described, option_specs
from soft_trainer.options.training import SoftInfoNCETrainingArguments

STUB = Path(training.__file__).with_suffix(".pyi")
PAGE = Path(__file__).with_name("options.md")
# The groups of options with their titles, in the order of the page.
GROUPS = {
    "model": "Encoder",
    "data": "Rows",
    "weights": "Loss and weights",
    "batches": "Batches and negatives",
    "training": "Training",
    "output": "Output",
}
# Each class, with the group of its options that do not declare one.
CLASSES = {ModelArguments: "model", DataArguments: "data", SoftInfoNCETrainingArguments: "training"}
# Names of options, values and functions that are not in backquotes yet.
CODE = re.compile(r"(?<![`'\w/.])(?:\w+=[\w.]*\w|module:\w+|[\w.]*\w_\w[\w.]*\w)(?![`\w/])")
PAGE_HEAD = """\
# Options

This page lists every option of `soft-trainer train`: what it does, its values and its default.
`soft-trainer train --help` lists the common options in a terminal, and `--help_all` lists all of them.

An option has the same name everywhere: `--epochs 3` in the shell, `epochs: 3` in a recipe. In Python, options for
the loss, batches and training are arguments of `SoftInfoNCETrainingArguments`, which accepts only the first name of
an option. An estimator of your own is passed as a callback, such as `callbacks=[MyEstimator()]`. Options for rows and
the encoder are fields of `DataArguments` and `ModelArguments`. A run warns about, or refuses, most options that are
set but have no effect.
"""
STUB_HEAD = '''\
"""Declares the training arguments for editors. `python docs/options_reference.py` writes this file."""

from dataclasses import dataclass

from transformers import TrainingArguments

from soft_trainer.options.fields import TrainingOptions

@dataclass
class SoftInfoNCETrainingArguments(TrainingOptions, TrainingArguments):
'''


def stub() -> str:
    """Returns the text of `training.pyi`, in which each option's docstring is its help text."""
    doc = textwrap.indent(f'"""{SoftInfoNCETrainingArguments.__doc__}\n"""', "    ")
    lines = [STUB_HEAD + doc, ""]
    for field, _ in option_fields(SoftInfoNCETrainingArguments):
        default = repr(field.default).replace("'", '"')
        lines.append(f"    {field.name}: {annotation(SoftInfoNCETrainingArguments, field.name)} = {default}")
        words = f'"""{" ".join(option_facts(field))}"""'
        lines += textwrap.wrap(words, 119, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def options_page() -> str:
    """Returns the text of `docs/options.md`: a table for each group of options, with common options first."""
    fields: dict[str, list[tuple[dataclasses.Field, OptionSpec]]] = {group: [] for group in GROUPS}
    for kind, group in CLASSES.items():
        for field, declared in option_fields(kind):
            fields[declared.group or group].append((field, declared))
    parts = [PAGE_HEAD]
    for group, title in GROUPS.items():
        ordered = sorted(fields[group], key=lambda each: not each[1].common)
        rows = [_row(field, declared) for field, declared in ordered]
        parts.append("\n".join([f"## {title}\n", "| option | what it does |", "|:--|:--|", *rows]) + "\n")
    return "\n".join([*parts, _table_of_transformers()]) + "\n"


def option_fields(kind: type) -> Iterator[tuple[dataclasses.Field, OptionSpec]]:
    """Yields the fields that this package declares in a dataclass, with their declarations."""
    declared = option_specs(kind)
    for field in dataclasses.fields(kind):
        if field.name in declared:
            yield field, declared[field.name]


def annotation(kind: type, name: str) -> str:
    """Returns a field's type as written in the class, because `HfArgumentParser` changes the types of fields."""
    for owner in kind.__mro__:
        spelled = vars(owner).get("__annotations__", {}).get(name)
        if spelled is not None:
            return spelled
    raise AttributeError(name)


def option_facts(field: dataclasses.Field) -> list[str]:
    """Returns sentences that document an option: the help, valid values and default."""
    text = described(field)
    declared = field.metadata["help"].declared
    facts = [text]
    values = ", ".join([*declared.choices, "module:name"] if declared.own else declared.choices)
    if declared.least is not None or declared.above is not None:
        values = declared.range
    told = declared.choices and all(choice in text for choice in declared.choices)
    if values and not told and values not in text:
        facts.append(f"Values: {values}.")
    if declared.default is not None and "Default:" not in text:
        facts.append(f"Default: {declared.default!r}.")
    return facts


def _row(field: dataclasses.Field, declared: OptionSpec) -> str:
    """Returns an option's row in a Markdown table, with its names and documentation."""
    names = [f"`{name.removeprefix('--')}`" for name in (field.name, *field.metadata.get("aliases", ()))]
    facts = option_facts(field)
    if declared.default is None and "Default:" not in facts[0]:
        facts.append("Default: none.")
    text = CODE.sub(r"`\g<0>`", " ".join(facts))
    return f"| {', '.join(names)} | {text.replace('|', chr(92) + '|')} |"


def _table_of_transformers() -> str:
    """Returns a table of the options that `transformers` declares, with this package's defaults."""
    ours = option_specs(SoftInfoNCETrainingArguments)
    original = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    lines = ["## Options of transformers\n", "| option | default | note |", "|:--|:--|:--|"]
    for field in dataclasses.fields(SoftInfoNCETrainingArguments):
        if field.name in ours or not field.init:
            continue
        notes = []
        if field.default != original[field.name]:
            notes.append(f"`{original[field.name]}` in `transformers`")
        if field.name in RANGES:
            notes.append(RANGES[field.name].range)
        if field.name in REFUSED:
            notes.append(f"cannot be turned on: {REFUSED[field.name]}")
        default = getattr(field.default, "value", field.default)
        default = PLAIN.get(field.name) if default is None else default
        shown = "" if default in (None, "", dataclasses.MISSING) else f"`{default}`"
        if field.name in SCHEDULE:
            shown = "[the encoder's](training.md)"
        lines.append(f"| `{field.name}` | {shown} | {'; '.join(notes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    STUB.write_text(stub())
    PAGE.write_text(options_page())
