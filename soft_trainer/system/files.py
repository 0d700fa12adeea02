"""Defines the file names in an output folder, writes files atomically, locks files, reads JSON and JSON Lines."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import IO, TextIO

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from soft_trainer.errors import UserError

# ---- The files of an output folder ----

RECORD = "run.json"
DEPENDS_ON = "depends on"  # the key of the run fingerprint in a run's record and in a checkpoint's marker
RECORD_FORMAT = 4  # of `run.json`; earlier formats contain local paths or lack results
NUMBERS = "all_results.json"
TRAINING_PICTURE = "training.png"  # loss and MRR by step, which the card shows
PROFILE_FILE = "soft_trainer.json"
# The file names of peft.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Patterns of the weight files of a whole encoder and of an adapter. A repository has one or the other.
WHOLE_FILES = ("config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MERGED_ADAPTER = "adapter"  # the subfolder for the adapter if the folder has the merged encoder
# Exports of the weights. They are removed when the weights change.
ONNX_FILES = ("onnx/model.onnx", "onnx/settings.json", "onnx/tokenizer.json")
WEIGHT_FILES = (*WHOLE_FILES, *ADAPTER_FILES, *(f"{MERGED_ADAPTER}/{name}" for name in ADAPTER_FILES))
TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja
    vocab.json vocab.txt merges.txt spiece.model tokenizer.model sentencepiece.bpe.model
""".split()
# The rows that are mined from a tree.
ROW_FILES = ("train.jsonl.gz", "valid.jsonl.gz", "test.jsonl.gz", "codebase.jsonl.gz")
UNMERGED = "unmerged"  # the subfolder for the trained encoder if the output folder has the merged one
CARD = "README.md"
PREVIOUS_CARD = f"{CARD}.previous"  # a card that the user had edited before another run replaced it
WRITTEN = "<!-- Written by soft_trainer."  # starts the last line of a card; the templates contain it
RANKS = "ranks-*.parquet"
_RESERVED = re.compile(r'[%/\\:*?"<>|\x00-\x1f]')  # characters that some file systems refuse in a file name
CHECKPOINTS = "checkpoint-*"
SETTINGS_FILE = "config_sentence_transformers.json"
SENTENCE_TRANSFORMERS_FILES = (
    *("modules.json", "sentence_bert_config.json", SETTINGS_FILE, "soft_trainer_static.py"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
)
ENCODER_FILES = (PROFILE_FILE, *WEIGHT_FILES, *ONNX_FILES, *TOKENIZER_FILES, *SENTENCE_TRANSFORMERS_FILES)
# The files of an evaluation's results, and all files that a training run writes at its end.
RESULT_FILES = (RECORD, NUMBERS, "eval_results.json", RANKS)
TRAINING_FILES = (
    *(*ENCODER_FILES, *RESULT_FILES, "train_results.json", CARD, TRAINING_PICTURE),
    *("training_args.json", "trainer_state.json"),
)

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError)


def cache_dir() -> Path:
    """Returns the package's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soft_trainer"


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path next to `path` for the `with` block to write to, then renames the file to `path`.

    Readers see either the old file or the complete new one. If the block raises an exception, `path` stays unchanged
    and the temporary file is removed.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def lock_file(file: IO | int, wait: bool = False) -> bool:
    """Locks an open file or descriptor until it is closed. Returns False if another process has locked it.

    Args:
        wait: True to wait for that process. Where there are no locks, as on Windows and on some file systems, returns
            True at once.
    """
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        pass
    return True


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically, as UTF-8."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def ranks_file(name: str, system: str) -> str:
    """Returns the name of the file with the ranks of a set of queries: `ranks-test-trained.parquet`.

    Users choose the names of sets. Characters that a file name cannot contain are percent-encoded, so that different
    sets have different files: the set `org/name` has `ranks-org%2Fname-trained.parquet`.
    """
    name = _RESERVED.sub(lambda found: f"%{ord(found[0]):02X}", name)
    return f"ranks-{name}-{system}.parquet"


def use_umask(folder: str | Path) -> None:
    """Gives the files in a folder the modes of new files. safetensors makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def check_writable(folder: str | Path, named: str) -> None:
    """Raises UserError if a folder cannot be created or written to.

    Args:
        named: the start of the error message, an option and its value such as `output_dir=runs/a`.
    """
    absolute = Path(folder).absolute()
    # `Path.exists` would raise an error below a folder that the user may not enter.
    there = next(path for path in (absolute, *absolute.parents) if os.path.exists(path))
    if not there.is_dir():
        raise UserError(f"{named}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"{named}: {there} is not writable")


def signed(card: str) -> str:
    """Returns a card with a hash of its text in its last line, `WRITTEN`, which shows later edits."""
    text, line, end = card.rpartition(WRITTEN)
    hashed = hashlib.sha256(text.encode()).hexdigest()[:8]
    return text + line + re.sub("( [0-9a-f]{8})? -->", f" {hashed} -->", end)


def is_edited(card: str) -> bool:
    """Returns True if a person has written or changed a card."""
    below = card.rpartition(WRITTEN)[2].partition("-->")[2]
    return WRITTEN not in card or signed(card) != card or below.strip() != ""


def keep_edited_card(folder: str | Path) -> None:
    """Renames the card in a folder, if there is one and a person has written or changed it."""
    path = Path(folder) / CARD
    if path.is_file() and is_edited(path.read_text(encoding="utf-8", errors="replace")):
        path.replace(path.with_name(PREVIOUS_CARD))


def write_json(path: str | Path, value) -> None:
    """Writes a value to a file atomically, as indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_results(folder: str | Path, record: Mapping, **parts: Mapping[str, float]) -> None:
    """Writes a run's metrics and its record to a folder, with the same file names as the `transformers` examples.

    `PART_results.json` has the metrics of one part, such as `train` or `eval`, and `all_results.json` has the metrics
    of all parts. The record, `run.json`, is written last.
    """
    folder = Path(folder)
    everything = {}
    for part, numbers in parts.items():
        everything |= numbers
        if numbers:
            write_json(folder / f"{part}_results.json", dict(numbers))
    write_json(folder / NUMBERS, everything)
    write_json(folder / RECORD, dict(record))


def files_matching(folder: str | Path, patterns: Iterable[str]) -> list[str]:
    """Returns the files in a folder that match any of the glob patterns, as sorted paths relative to the folder."""
    folder = Path(folder)
    found = set()
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.is_file():
                found.add(path.relative_to(folder).as_posix())
    return sorted(found)


def is_finished(record: Mapping) -> bool:
    """Returns True if a record belongs to a run that has ended: it has results, which may be empty."""
    return "results" in record


def unfinished(folder: str | Path) -> str | None:
    """Returns a message about what to do with an interrupted run's folder, or None for any other folder."""
    folder = Path(folder)
    if not (folder / RECORD).is_file() or is_finished(read_json(folder / RECORD)):
        return None
    checkpoints = sorted(folder.glob(CHECKPOINTS), key=lambda path: path.stat().st_mtime)
    named = f", or name a checkpoint, such as {checkpoints[-1]}" if checkpoints else ""
    return f"this run was interrupted; rerun its command to finish it{named}"


def check_free(folder: str | Path, patterns: Iterable[str]) -> None:
    """Raises UserError if a folder already contains a file that would be overwritten.

    Args:
        patterns: glob patterns of the files that will be written.
    """
    held = files_matching(folder, patterns)
    if held:
        more = f" and {len(held) - 4} more" if len(held) > 4 else ""
        raise UserError(
            f"output_dir={folder}: has {', '.join(held[:4])}{more}, which would be overwritten; set another "
            "--output_dir, or --overwrite true"
        )


def write_rows(rows: Mapping[str, Iterable[dict]], folder: str | Path) -> None:
    """Writes rows to `folder`, one file per split such as `train.jsonl.gz`. No file appears until all are complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name, split in rows.items():
            aside = stack.enter_context(written_aside(folder / f"{name}.jsonl.gz"))
            # Without a file name and a time in the gzip header, equal rows give equal bytes.
            with open(aside, "wb") as raw, gzip.GzipFile("", "wb", 4, raw, mtime=0) as file:
                for row in split:
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def uncompressed_name(name: str) -> str:
    """Strips the ending of a compressed file from its name: `train.jsonl.gz` becomes `train.jsonl`."""
    path = PurePath(name)
    return path.stem if path.suffix in COMPRESSIONS else name


def open_bytes(path: str | Path) -> IO[bytes]:
    """Opens a plain or compressed file (.gz, .bz2, .xz or .zst) for reading. See `UNREADABLE` for errors."""
    ending = PurePath(path).suffix
    if ending == ".gz":
        return gzip.open(path)
    if ending == ".bz2":
        return bz2.open(path)
    if ending == ".xz":
        return lzma.open(path)
    if ending == ".zst":
        import pyarrow as pa  # slow to import

        return pa.input_stream(str(path), compression="zstd")
    return open(path, "rb")


@contextmanager
def open_text(path: str | Path, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a plain or compressed UTF-8 text file for the `with` block to read.

    Raises:
        UserError: the file cannot be read, or a line is not in UTF-8. The message gives the first such line.
    """
    try:
        with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError:
        raise UserError(_not_utf8(path)) from None
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _not_utf8(path: str | Path) -> str:
    """Returns the error message for a text file that is not in UTF-8, with the first line that cannot be decoded."""
    unit = "row" if ".jsonl" in str(path).lower() else "line"
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}, {unit} {number}: cannot be read in UTF-8 ({error}); save it as UTF-8"
    return f"{path}: cannot be read in UTF-8; save it as UTF-8"


def read_json(path: str | Path, kind: type = dict):
    """Reads a plain or compressed JSON file. Raises UserError unless the file contains a `kind`, a dict or a list."""
    try:
        with open_text(path) as file:
            values = _parsed(file.read(), _row if kind is list else dict)
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, kind):
        raise UserError(f"{path}: expected a {'list' if kind is list else 'mapping'}, not {values!r:.40}")
    return values


def read_json_lines(path: str | Path, replace: bool = True) -> Iterator[tuple[str, dict]]:
    """Yields (location, object) for each line of a plain or compressed JSON Lines file.

    The location, such as `train.jsonl, row 3`, is for error messages.

    Args:
        replace: whether to replace lone surrogates with `?`.

    Raises:
        UserError: the file cannot be read as UTF-8, or a line is not a JSON object. The message gives the file and the
            row.
    """
    location = path
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                location = f"{path}, row {number}"
                if line.strip():
                    value = _parsed(line, _row) if replace else json.loads(line, object_pairs_hook=_row)
                    if not isinstance(value, dict):
                        raise UserError(f"{location}: expected a JSON object, not {type(value).__name__}")
                    yield location, value
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{location}: not valid JSON ({error})") from None


def _row(pairs: list[tuple[str, object]]) -> dict:
    """Makes a row from the names and values of a JSON object. Raises ValueError if two values have the same name."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two values are called {max(names, key=names.count)!r}; rename one of them")
    return row


def _parsed(text: str, make: Callable[[list[tuple[str, object]]], dict]):
    """Parses JSON. Replaces a lone surrogate, left where a text was cut in the middle of a character, with `?`."""
    value = json.loads(text, object_pairs_hook=make)
    if "\\ud" in text.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


@contextmanager
def reporting_disk_errors(folder: str | Path) -> Iterator[None]:
    """Turns an error while writing to `folder` into a one-line UserError that gives the free disk space.

    Raises:
        UserError: a write in the `with` block failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        absolute = Path(folder).absolute()
        free = shutil.disk_usage(next(path for path in (absolute, *absolute.parents) if path.is_dir())).free / 2**20
        # `torch.save` reports a full disk as a plain RuntimeError, usually from its archive writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error) and free >= 1:
            raise
        raise UserError(
            f"cannot save to {folder}: {str(error).splitlines()[0]} ({free:,.0f} MiB free). Everything saved earlier "
            "is intact. Free some space if the disk is full, or choose another output_dir"
        ) from error
