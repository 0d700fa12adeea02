"""Loads data sets from the Hub, from their original files or from the Hub's Parquet conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HTTPError

from soft_trainer.errors import UserError
from soft_trainer.hub.files import hub_or_cache, not_cached
from soft_trainer.system.terminal import shortened

PARQUET_BRANCH = "refs/convert/parquet"  # the Hub's conversion of a data set: CONFIGURATION/SPLIT/0000.parquet


def load_published(name: str, configuration: str | None = None, revision: str | None = None) -> DatasetDict:
    """Loads the splits of a data set on the Hub, or of one of its configurations.

    `datasets` no longer runs loading scripts. If a data set needs a script, or lacks the configuration, the Hub's
    Parquet conversion is read instead.

    Raises:
        UserError: the data set cannot be read.
    """
    with reading_hub(f"{name} ({configuration})" if configuration else name):
        try:
            return load_dataset(name, configuration, revision=revision)
        except (RuntimeError, ValueError) as error:  # a loading script, or no such configuration
            files = _converted_files(name, configuration or "default")
            if not files:
                raise error
            return load_dataset("parquet", data_files=files)


def _converted_files(name: str, configuration: str) -> dict[str, list[str]]:
    """Downloads the Hub's Parquet conversion of a configuration, if any. Returns paths keyed by split."""
    pattern = f"{configuration}/*/*.parquet"
    try:
        folder = snapshot_download(name, repo_type="dataset", revision=PARQUET_BRANCH, allow_patterns=pattern)
    except (OSError, HTTPError):  # the branch does not exist; the caller raises the first error
        return {}
    files: dict[str, list[str]] = {}
    for path in sorted(Path(folder).glob(pattern)):
        files.setdefault(path.parent.name, []).append(str(path))
    return files


@contextmanager
def reading_hub(name: str) -> Iterator[None]:
    """Turns any error while reading a data set from the Hub into a one-line UserError that suggests alternatives.

    Raises:
        UserError: the `with` block raised an exception.
    """
    with hub_or_cache():
        try:
            yield
        except Exception as error:  # `datasets` raises the errors of a dozen libraries
            if constants.HF_HUB_OFFLINE:
                raise UserError(not_cached(name)) from error
            cause = error
            if isinstance(error, DatasetGenerationError):
                cause = error.__cause__ or error
            reason = shortened(str(cause), 200) or type(error).__name__
            raise UserError(
                f"{name} cannot be read from the Hub ({reason}). Set HF_TOKEN for a private data set, or train "
                "without the Hub (set data_dir to a folder of rows, or source_dir to a source tree)"
            ) from error
