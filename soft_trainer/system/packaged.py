"""Provides `base`, a static encoder that comes with the package and needs neither torch nor a download.

`base` was distilled from MiniLM over common code words by `benchmarks/base_encoder.py`. The package contains int8
vectors with one scale per word. The first use writes a folder with float32 vectors, which every library can load, to
the user's cache.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from soft_trainer.errors import UserError
from soft_trainer.system.files import read_json, use_umask
from soft_trainer.system.fingerprints import folder_fingerprint

BASE = "base"
PACKAGED = Path(__file__).parents[1] / "encoders" / BASE
# Code in a static encoder's folder, which other libraries run if they may (`trust_remote_code=True`). It imports ours.
STATIC_CODE = Path(__file__).parents[1] / "encoders" / "soft_trainer_static.py"
EXPANDED = Path(HF_HOME) / "soft_trainer" / BASE  # one folder for each version of `base`
WEIGHTS = "model.safetensors"
VECTORS = "embeddings.weight"  # the name of the tensor
INT8 = "int8"  # the names of the packaged vectors and their scales, float32[V]
SCALES = "scales"


def located(name_or_path: str | Path) -> str | Path:
    """Returns the packaged encoder's folder for `base`. Any other name or path, such as `./base`, stays unchanged.

    Raises:
        UserError: the user's cache cannot be written to.
    """
    if str(name_or_path) == BASE:
        return _expanded()
    return name_or_path


@cache
def _expanded() -> Path:
    """Returns the folder of `base` in the user's cache, with float32 vectors. Creates the folder if it is missing."""
    from safetensors.numpy import load_file, save_file  # imported here, so that a search by words does not wait

    folder = EXPANDED / folder_fingerprint(PACKAGED)
    if folder.is_dir():
        return folder
    try:
        EXPANDED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=EXPANDED) as temporary:
            aside = Path(temporary) / BASE
            shutil.copytree(PACKAGED, aside)
            shutil.copy(STATIC_CODE, aside)
            tensors = load_file(aside / WEIGHTS)
            vectors = tensors[INT8] * tensors[SCALES][:, None]
            save_file({VECTORS: vectors}, aside / WEIGHTS, {"format": "pt"})
            use_umask(aside)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except OSError as error:
        raise UserError(
            f"{EXPANDED}: cannot write the encoder `base` there ({error.strerror}); set HF_HOME to another folder"
        ) from error
    return folder


def common_words() -> dict[str, float]:
    """Returns the words in the vocabulary of `base` as `{word: frequency}`. Frequencies follow Zipf's law."""
    vocabulary = read_json(PACKAGED / "tokenizer.json")["model"]["vocab"]
    frequencies = {}
    for word in vocabulary:
        if not word.startswith("["):  # special tokens do
            frequencies[word] = 1 / (len(frequencies) + 1)
    return frequencies
