"""Loads data sets from the Hub, from their own files or from the Hub's Parquet conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError

from soft_trainer.errors import UserError, name_option
from soft_trainer.terminal import shortened

PARQUET_BRANCH = "refs/convert/parquet"  # of converted data sets; its files are CONFIGURATION/SPLIT/0000.parquet


def load_published(name: str, configuration: str | None = None) -> DatasetDict:
    """Loads the splits of a data set on the Hub, or those of one of its configurations.

    `datasets` no longer runs loading scripts. If a data set needs one, or lacks the configuration, the Hub's own
    Parquet conversion is read.

    Raises:
        UserError: the data set cannot be read.
    """
    with reading_hub(f"{name} ({configuration})" if configuration else name):
        try:
            return load_dataset(name, configuration)
        except (RuntimeError, ValueError) as error:  # a loading script, or no such configuration
            files = _converted_files(name, configuration or "default")
            if not files:
                raise error
            return load_dataset("parquet", data_files=files)


def _converted_files(name: str, configuration: str) -> dict[str, list[str]]:
    """Returns local copies of the Hub's Parquet files, keyed by split, or {} if it has none for this configuration."""
    pattern = f"{configuration}/*/*.parquet"
    try:
        folder = snapshot_download(name, repo_type="dataset", revision=PARQUET_BRANCH, allow_patterns=pattern)
    except (OSError, HTTPError):  # there is no such branch; the caller raises the first error
        return {}
    files: dict[str, list[str]] = {}
    for path in sorted(Path(folder).glob(pattern)):
        files.setdefault(path.parent.name, []).append(str(path))
    return files


@contextmanager
def reading_hub(name: str) -> Iterator[None]:
    """Turns any error into one line that names the data set and the alternatives to the Hub.

    Raises:
        UserError: the body failed.
    """
    try:
        yield
    except Exception as error:  # `datasets` raises the errors of a dozen libraries
        if isinstance(error, DatasetGenerationError):
            cause = error.__cause__
        else:
            cause = error
        reason = shortened(str(cause or error), 200) or type(error).__name__
        raise UserError(
            f"{name} cannot be read from the Hub: {reason}; set HF_TOKEN for a private data set, or train without the "
            f"Hub: {name_option('data_dir')} takes a folder of rows, {name_option('source_dir')} a source tree"
        ) from error
