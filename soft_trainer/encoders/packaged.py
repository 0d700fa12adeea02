"""Provides `base`, a static encoder that comes with the package and needs neither torch nor a download.

`base` is MiniLM, distilled by `benchmarks/base_encoder.py` over common words of code. Its folder in the package holds
its vectors as int8 with one scale per word. The first use writes a folder with float32 vectors to the user's cache,
which every library can load.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from soft_trainer.errors import UserError
from soft_trainer.files import read_json
from soft_trainer.fingerprints import folder_fingerprint

BASE = "base"
PACKAGED = Path(__file__).with_name(BASE)
EXPANDED = Path(HF_HOME) / "soft_trainer" / BASE  # one folder for each version of `base`
WEIGHTS = "model.safetensors"
VECTORS = ("word_embedding.weight", "embeddings")  # the names of the vectors in `AutoModel` and in model2vec
INT8 = "int8"  # the names of the packaged vectors and their scales, float32[V]
SCALES = "scales"


def located(name_or_path: str | Path) -> str | Path:
    """Returns the folder of the packaged encoder for `base`, and any other name or path (such as `./base`) unchanged.

    Raises:
        UserError: the user's cache cannot be written to.
    """
    if str(name_or_path) == BASE:
        return _expanded()
    return name_or_path


@cache
def _expanded() -> Path:
    """Returns the folder of `base` with float32 vectors, in the user's cache. Writes the folder if it is missing."""
    from safetensors.numpy import load_file, save_file  # imported here, so that a search by words does not wait

    folder = EXPANDED / folder_fingerprint(PACKAGED)
    if folder.is_dir():
        return folder
    try:
        EXPANDED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=EXPANDED) as place:
            aside = Path(place) / BASE
            shutil.copytree(PACKAGED, aside)
            tensors = load_file(aside / WEIGHTS)
            scales = tensors.pop(SCALES)
            for name in VECTORS:
                tensors[name] = tensors[INT8] * scales[:, None]
            del tensors[INT8]
            save_file(tensors, aside / WEIGHTS, {"format": "pt"})
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except OSError as error:
        raise UserError(
            f"{EXPANDED}: base cannot be written there ({error.strerror}); set HF_HOME to another folder"
        ) from error
    return folder


def common_words() -> dict[str, float]:
    """Returns the vocabulary of `base`, common code words, as `{word: frequency}`. Frequencies follow Zipf's law."""
    vocabulary = read_json(PACKAGED / "tokenizer.json")["model"]["vocab"]
    words = [word for word in vocabulary if not word.startswith("[")]  # others are special tokens
    return {word: 1 / (rank + 1) for rank, word in enumerate(words)}
