"""Distils encoders into static encoders, which train in a minute on a laptop and are as fast as lexical search."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.static_torch import count_words, distilled
from soft_trainer.errors import UserError
from soft_trainer.hub.files import lasting_name
from soft_trainer.source.source_files import SKIPPED_FOLDERS
from soft_trainer.system.files import ENCODER_FILES, RECORD, check_free, check_writable
from soft_trainer.system.packaged import common_words

SNIFFED = 8192  # bytes at the start of a file; a zero byte among them marks a binary file


def distil_static(
    model: str | Path,
    output_dir: str | Path,
    dimensions: int = 256,
    texts: str | Path | None = None,
    vocabulary_size: int = 32768,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Path:
    """Distils a static encoder from `model` and writes it to a folder; see `soft_trainer.encoders.static_torch`.

    The profile records `model` as the static encoder's teacher, which training uses by default.

    Args:
        model: a folder or a name on the Hub, as for `load_encoder`.
        output_dir: the folder to write to.
        dimensions: the number of dimensions of an embedding.
        texts: a file or a folder, such as a source tree. The lower-case parts of identifiers that occur in it twice or
            more become the vocabulary. By default, the vocabulary is common code words.
        vocabulary_size: the maximum number of words.
        trust_remote_code: whether to run code that comes with the model. Read it first.
        overwrite: whether to replace an encoder in the folder. `model` itself cannot be replaced.

    Returns:
        The folder.

    Raises:
        UserError: the encoder cannot be loaded or distilled, the texts do not exist, or the folder contains an encoder
            or the record of a run, or cannot be written to.
    """
    check_writable(output_dir, f"output_dir={output_dir}")
    if Path(model).exists() and Path(model).resolve() == Path(output_dir).resolve():
        raise UserError(
            f"output_dir={output_dir}: this is the folder of the encoder to distil; set another output_dir"
        )
    if (Path(output_dir) / RECORD).exists():
        raise UserError(
            f"output_dir={output_dir}: the folder has the {RECORD} of another encoder; set another output_dir"
        )
    if not overwrite:
        check_free(output_dir, ENCODER_FILES)
    if texts is not None and not Path(texts).exists():
        raise UserError(f"texts={texts}: no such file or folder")
    encoder = load_encoder(model, trust_remote_code=trust_remote_code)
    words = common_words() if texts is None else count_words(_lines(Path(texts)))
    static = distilled(encoder, words, dimensions, vocabulary_size, progress=True)
    profile = static.profile.replace(teacher=lasting_name(model), teacher_identity=encoder.fingerprint)
    return export_encoder(static.model, static.tokenizer, profile, output_dir)


def _lines(source: Path) -> Iterator[str]:
    """Yields the lines of a file, or of all text files below a folder. Invalid UTF-8 is replaced.

    Gzipped files are read. Binary files are skipped, as are version-control folders, installed packages and caches.
    """
    paths = []
    if source.is_file():
        paths = [source]
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        paths += [Path(folder, name) for name in sorted(names)]
    for path in filter(Path.is_file, paths):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            if b"\0" in file.read(SNIFFED):
                continue
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from file
