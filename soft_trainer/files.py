"""Whole files: written aside, then renamed; checkpoints that count only when they are complete."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main

MARKER = "complete.json"
RECORD, NUMBERS = "run.json", "all_results.json"


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it to `path` at the end.

    A reader sees the old file or the new one, never half of one. If the body raises, `path` stays as it was and the
    file beside it is removed.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8 as a whole file."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value) -> None:
    """Write `value` as indented JSON as a whole file."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_results(folder: str | Path, record: Mapping, **parts: Mapping[str, float]) -> None:
    """Write what a run found: its record, and its numbers in the files that `transformers` examples write.

    `PART_results.json` holds the numbers of a part, `all_results.json` those of all parts, `run.json` the record. The
    record is written last, so that a folder that has one is finished.
    """
    folder = Path(folder)
    for part, numbers in parts.items():
        if numbers:
            write_json(folder / f"{part}_results.json", dict(numbers))
    write_json(folder / NUMBERS, {name: number for numbers in parts.values() for name, number in numbers.items()})
    write_json(folder / RECORD, record)


def record_path(folder: str | Path) -> Path:
    """The file of a run's record: `run.json`, or `all_results.json` in a folder of version 0.1."""
    folder = Path(folder)
    return folder / RECORD if (folder / RECORD).is_file() else folder / NUMBERS


def write_rows(rows: Mapping[str, Iterable[dict]], folder: str | Path) -> None:
    """Write rows as `SPLIT.jsonl.gz` into `folder`. All splits are written aside before the first is renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, split in rows.items():
            aside = stack.enter_context(written_aside(folder / f"{name}.jsonl.gz"))
            # No file name and no time in the header: the same rows give the same bytes.
            with open(aside, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
                for row in split:
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


@contextmanager
def reporting_disk_errors(folder: str | Path) -> Iterator[None]:
    """Turn a disk that is full or cannot be written into one line that names the folder and what is free.

    Raises:
        UserError: writing failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # `torch.save` reports a full disk as a plain RuntimeError of its archive writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.is_dir())
        free = shutil.disk_usage(there).free / 2**20
        raise UserError(
            f"cannot save to {folder}: {str(error).splitlines()[0]}; {free:,.0f} MiB are free there. What was saved "
            "before is as it was: make room or choose another output_dir"
        ) from error


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """`reporting_disk_errors` for a checkpoint: one that could not be finished is removed."""
    try:
        with reporting_disk_errors(folder):
            (Path(folder) / MARKER).unlink(missing_ok=True)
            yield
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark_complete(folder: str | Path) -> None:
    """Record the size of every file of a checkpoint, as the last thing that is written into it."""
    folder = Path(folder)
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    sizes.pop(MARKER, None)
    write_json(folder / MARKER, sizes)


def is_complete(folder: str | Path) -> bool:
    """Whether every file is there in the size that was recorded."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def newest_complete(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint of a run, None where there is none; a half-written one is named in a warning."""
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints  # slow to import

    if not Path(output_dir).is_dir():
        return None
    for checkpoint in reversed(sort_checkpoints(str(output_dir), PREFIX_CHECKPOINT_DIR)):
        if is_complete(checkpoint):
            return str(checkpoint)
        print_on_main(f"warning: {checkpoint} is not whole (its run was stopped while writing it) and is passed over")
    return None


def last_checkpoint(args) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means: a folder, or the last of the output folder for `last`.

    Raises:
        UserError: a folder that does not exist.
    """
    wanted = args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", "no"):
        return None
    if str(wanted).lower() in ("true", "last", "yes"):
        found = newest_complete(args.output_dir)
        if found is None:
            print_on_main(f"{args.output_dir} holds no whole checkpoint to resume from: starting at the first step")
        return found
    if not Path(wanted).is_dir():
        raise UserError(
            f"resume_from_checkpoint={wanted}: no such folder; `last` takes the newest of the output folder"
        )
    return str(wanted)
