"""Loads data sets from the Hub, from their files or from the Hub's Parquet conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HTTPError

from soft_trainer.encoders.hub_files import hub_or_cache, not_cached
from soft_trainer.errors import UserError
from soft_trainer.terminal import shortened

PARQUET_BRANCH = "refs/convert/parquet"  # of converted data sets; its files are CONFIGURATION/SPLIT/0000.parquet


def load_published(name: str, configuration: str | None = None, revision: str | None = None) -> DatasetDict:
    """Loads the splits of a data set on the Hub, or of one configuration of that data set.

    `datasets` no longer runs loading scripts. If a data set needs one, or lacks the configuration, the Hub's Parquet
    conversion is read.

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
    """Returns local copies of the Hub's Parquet files, keyed by split, or {} if it has none for this configuration."""
    pattern = f"{configuration}/*/*.parquet"
    try:
        folder = snapshot_download(name, repo_type="dataset", revision=PARQUET_BRANCH, allow_patterns=pattern)
    except (OSError, HTTPError):  # the branch does not exist; the caller raises the first error
        return {}
    files: dict[str, list[str]] = {}
    for path in sorted(Path(folder).glob(pattern)):
        files.setdefault(path.parent.name, []).append(str(path))
    return files


def is_public(name: str) -> bool:
    """Returns True if anybody can read a data set on the Hub, and False if the Hub cannot be asked."""
    try:
        return not HfApi(token=False).dataset_info(name).gated
    except (OSError, HTTPError):  # private data sets do not exist for somebody without a token
        return False


@contextmanager
def reading_hub(name: str) -> Iterator[None]:
    """Turns any error into one line with the data set's name and the alternatives to the Hub.

    Raises:
        UserError: the body failed.
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
                f"{name} cannot be read from the Hub: {reason}; set HF_TOKEN for a private data set, or train without "
                f"the Hub: data_dir takes a folder of rows, source_dir a source tree"
            ) from error
