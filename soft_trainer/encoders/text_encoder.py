"""Opens an encoder with the lightest runtime that can run it: static, ONNX Runtime or torch.

Static encoders and ONNX Runtime import neither torch nor transformers. The export to ONNX imports torch. Each encoder
is exported once. The export is kept in the user's cache under a hash of the encoder's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from soft_trainer.encoders.onnx import SETTINGS, OnnxEncoder, has_onnxruntime
from soft_trainer.encoders.static_numpy import StaticEncoder, is_static_folder
from soft_trainer.errors import UserError
from soft_trainer.system.files import ADAPTER_CONFIG, cache_dir
from soft_trainer.system.fingerprints import encoder_file_hashes, fingerprint
from soft_trainer.system.packaged import located
from soft_trainer.system.terminal import print_on_main

FORMAT = 4  # of exports in the cache


class TextEncoder(Protocol):
    """The interface of an encoder for search. Dot products of embeddings are the scores, up to a constant factor.

    Attributes:
        dimensions: the number of dimensions of an embedding.
        fingerprint: a hash that changes if the embedding of any text would change.
        runtime: what computes the embeddings: "torch", "static" or "onnx".
    """

    dimensions: int
    fingerprint: str
    runtime: str

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts. Returns float32[n, d].

        Args:
            side: "query", "code" or "chunk" (a part of a file, which begins with its path). It determines the
                prompt, the maximum length and a static encoder's weights.
            languages: the language of each function. Only encoders with data flow use languages.
        """


def open_encoder(name: str | Path, truncate_dim: int | None = None, light: bool = True) -> TextEncoder:
    """Opens the packaged `base` or any other encoder, from its folder or the Hub.

    Args:
        truncate_dim: the number of leading dimensions to keep. By default, the same number as for `load_encoder`.
        light: whether to avoid torch if possible. Static encoders never need torch. Other encoders are exported to
            ONNX if onnxruntime is installed and there is no accelerator.

    Raises:
        UserError: the encoder cannot be loaded, or it has fewer dimensions than `truncate_dim`.
    """
    folder = local_folder(name)
    light = light and (folder is None or not (folder / ADAPTER_CONFIG).is_file())
    if folder and is_static_folder(folder):
        return StaticEncoder(folder, truncate_dim)
    light = light and has_onnxruntime()
    if light and folder and (_export_of(folder) / SETTINGS).is_file():
        return OnnxEncoder(_export_of(folder), truncate_dim)
    # These import torch.
    from transformers.utils import logging

    from soft_trainer.encoders.loading import load_encoder

    logging.set_verbosity_error()  # no report on weights
    logging.disable_progress_bar()
    try:
        encoder = load_encoder(name, truncate_dim=truncate_dim, compare=False)
    except UserError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{name}: the encoder needs code from its repository, but search never runs such code"
        ) from error
    folder = local_folder(name)  # loading may have downloaded it
    if folder and is_static_folder(folder):
        return StaticEncoder(folder, truncate_dim)
    exported = _export(encoder, str(name)) if light else None
    return OnnxEncoder(exported, truncate_dim) if exported else encoder


def local_folder(name: str | Path) -> Path | None:
    """Returns an encoder's folder or its snapshot in the Hub's cache, or None if it has not been downloaded."""
    folder = Path(located(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import errors, try_to_load_from_cache  # slow to import, and a folder does not need it

    try:
        cached = try_to_load_from_cache(str(name), "config.json")
    except errors.HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _export_of(folder: Path) -> Path:
    """Returns the cache folder for an encoder's ONNX export. The folder may not exist yet."""
    return cache_dir() / "onnx" / fingerprint(FORMAT, encoder_file_hashes(folder))


def _export(encoder, name: str) -> Path | None:
    """Exports a loaded encoder to the cache. Returns the folder, or None if only torch can run the encoder."""
    # These import torch, which has been imported for the encoder.
    import torch

    from soft_trainer.encoders.onnx_export import write_onnx
    from soft_trainer.encoders.profiles import resolve_profile

    source = local_folder(name)  # loading may have downloaded it
    if source is None or (source / ADAPTER_CONFIG).is_file() or torch.accelerator.is_available():
        return None
    print_on_main(f"{name}: exporting to ONNX (only once)")
    encoder = replace(encoder, truncate_dim=None, profile=resolve_profile(source))  # serves every truncate_dim
    folder = _export_of(source)
    try:
        write_onnx(encoder, folder)
    except UserError as error:
        print_on_main(f"running without ONNX: {error}")
        return None
    return folder
