"""Runs transformers for search without torch: exports each encoder once into the user's cache, by its content.

The export imports torch. Every later index and search with the encoder imports only onnxruntime and `tokenizers`.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from soft_trainer.encoders.onnx_session import FILES, OnnxSession, has_onnxruntime, normalized
from soft_trainer.errors import UserError
from soft_trainer.files import ADAPTER_CONFIG, TOKENIZER_FILES, WHOLE_FILES, read_json, write_json
from soft_trainer.fingerprints import file_fingerprint, fingerprint
from soft_trainer.search.index.store import cache_dir
from soft_trainer.terminal import print_on_main

FORMAT = 1
SETTINGS = "settings.json"
TOKENIZER = "tokenizer.json"
# Files that decide an encoder's embeddings, besides weights and tokenizer.
OTHERS = (
    *("soft_trainer.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    "[0-9]_*/config.json",
)
# int8 is used if the mean cosine between its embeddings of a sample of pieces and those of float32 reaches this.
LEAST_COSINE = 0.97
SAMPLE = 64  # pieces


class OnnxSearchEncoder:
    """An exported encoder for search. Its embeddings, float32[n, d], are compared by dot product.

    Args:
        name: the folder or Hub name that identifies the encoder in an index.
        folder: the folder of the export.
        precision: "float32" or "int8". None means that `choose` decides.
    """

    def __init__(self, name: str, folder: Path, truncate_dim: int | None = None, precision: str | None = None):
        from tokenizers import Tokenizer  # imported here, so that a search by words does not wait for it

        self.name = name
        self.truncate_dim = truncate_dim
        self.precision = precision or "float32"
        self.undecided = precision is None
        self._folder = folder
        self._settings = read_json(folder / SETTINGS)
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._session = self._open(self.precision)
        dimensions = self._settings["dimensions"]
        if truncate_dim is not None and not 1 <= truncate_dim <= dimensions:
            raise UserError(f"truncate_dim={truncate_dim}: must be a whole number from 1 to {dimensions}")

    @property
    def identity(self) -> str:
        """The fingerprint of the encoder's files and of the precision."""
        return fingerprint("onnx", FORMAT, self._folder.name, self.precision)

    def choose(self, texts: list[str]) -> None:
        """Chooses int8 if its embeddings of sampled pieces are close to those of float32, and prints the result."""
        self.undecided = False
        if not texts:
            return
        exact = normalized(self._session.encode(texts, "code"))
        session = self._open("int8")
        cosine = float((normalized(session.encode(texts, "code")) * exact).sum(1).mean())
        chosen = "float32"
        if cosine >= LEAST_COSINE:
            chosen = "int8"
            self.precision = chosen
            self._session = session
        print_on_main(f"weights: {chosen} (mean cosine of int8 with float32: {cosine:.3f} on {len(texts)} pieces)")

    def queries(self, texts: list[str]) -> np.ndarray:
        """Embeds queries."""
        return self._comparable(self._session.encode(texts, "query"))

    def codes(self, texts: list[str], languages: list[str]) -> np.ndarray:
        """Embeds pieces of code. Languages are ignored."""
        return self._comparable(self._session.encode(texts, "code"))

    def _open(self, precision: str) -> OnnxSession:
        path = self._folder / FILES[precision]
        return OnnxSession(path, self._tokenizer, self._settings, self.truncate_dim or self._settings["truncate_dim"])

    def _comparable(self, embeddings: np.ndarray) -> np.ndarray:
        if self._settings["score_function"] == "cosine":
            return normalized(embeddings)
        return embeddings


def open_onnx(name: str, truncate_dim: int | None = None, precision: str | None = None) -> OnnxSearchEncoder | None:
    """Opens an encoder's export, and makes it first if necessary.

    Returns:
        The encoder, or None if torch must run it: onnxruntime is missing, there is an accelerator, or the encoder
        cannot be exported.
    """
    if not has_onnxruntime():
        return None
    folder = export_folder(name)
    if folder is None or not (folder / SETTINGS).is_file():
        folder = _export(name)
    if folder is None:
        return None
    return OnnxSearchEncoder(name, folder, truncate_dim, precision)


def export_folder(name: str) -> Path | None:
    """Returns the folder of an encoder's export, which need not exist. None for an adapter, and without local files.

    Args:
        name: a folder, or a Hub name whose files are cached.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache  # slow to import

        cached = None
        with suppress(ValueError):
            cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    if (folder / ADAPTER_CONFIG).is_file() or not (folder / "config.json").is_file():
        return None
    found = set()
    for pattern in (*WHOLE_FILES, *TOKENIZER_FILES, *OTHERS):
        found.update(folder.glob(pattern))
    files = {path.relative_to(folder).as_posix(): file_fingerprint(path) for path in sorted(found)}
    return cache_dir() / "onnx" / fingerprint(FORMAT, files)


def _export(name: str) -> Path | None:
    """Exports an encoder into the cache. Returns the folder, or None if torch must run the encoder."""
    # These import torch, which is needed only here.
    import torch

    from soft_trainer.encoders.loading import load_encoder
    from soft_trainer.encoders.onnx import check_exportable, write_onnx
    from soft_trainer.encoders.onnx_encoder import session_settings

    if torch.accelerator.is_available():
        return None
    encoder = load_encoder(name, device="cpu")
    folder = export_folder(name)  # loading may have downloaded the files
    if folder is None:
        return None
    print_on_main(f"{name}: exporting to ONNX, once")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        check_exportable(encoder, name)
        with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as aside:
            for path in write_onnx(encoder, Path(aside), int8=True):
                path.replace(folder / path.name)
            tokenizer = json.loads(encoder.tokenizer.backend_tokenizer.to_str()) | {
                "truncation": None,
                "padding": None,
            }
            write_json(folder / TOKENIZER, tokenizer)
    except UserError as error:
        print_on_main(f"without ONNX: {error}")
        return None
    settings = session_settings(encoder.tokenizer, encoder.profile) | {"truncate_dim": encoder.truncate_dim}
    write_json(folder / SETTINGS, settings | {"dimensions": encoder.model.config.hidden_size})
    return folder
