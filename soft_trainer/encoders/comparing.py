"""Compares an encoder with sentence-transformers, which defines what its own folders embed."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.profiles import IGNORE_FILES, is_inferred_from_modules
from soft_trainer.encoders.static_numpy import NO_LENGTH
from soft_trainer.errors import UserError
from soft_trainer.hub.files import reading
from soft_trainer.system.packaged import located

LARGEST_COMPARED = 1_000_000_000  # parameters; a larger model would take minutes on a CPU
LONGEST = 256  # tokens
TOLERANCE = 1e-3  # relative; rounding causes 1e-6
TEXTS = (
    "Parse the HTTP header of getURL(String Name)",
    "café, naïve façade: Größe ÜBER alles, Žluťoučký kůň",
    "读取文件的每一行 ファイルを読む",
    " ".join(f"value_{number} = Compute(number + {number})" for number in range(100)),
)


def is_comparable(model: PreTrainedModel, name_or_path: str | Path | None = None, revision: str | None = None) -> bool:
    """Returns True if sentence-transformers defines a loaded model's embeddings, and a comparison takes only seconds.

    Args:
        name_or_path: where the model was loaded from, or None if it came from a `SentenceTransformer`.
    """
    quantized = getattr(model.config, "quantization_config", None) is not None
    if quantized or model.num_parameters() > LARGEST_COMPARED or is_deepspeed_zero3_enabled():
        return False
    if name_or_path is None:
        return model.dtype == torch.float32
    return is_inferred_from_modules(name_or_path, revision)


def compare_with_folder(
    encoder: Encoder, name_or_path: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Compares the embeddings of `TEXTS` with those that sentence-transformers computes from the same files.

    Raises:
        UserError: they differ. The message names the fields that may be the cause.
    """
    if encoder.profile.pooling == "pooler" and getattr(encoder.model, "pooler", None) is None:
        return  # the user chose another pooling
    from sentence_transformers import SentenceTransformer  # slow to import

    with reading(name_or_path, revision), torch.random.fork_rng(devices=[]):
        theirs = SentenceTransformer(
            str(located(name_or_path)),
            device="cpu",
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_kwargs={"dtype": torch.float32},
        )
    compare_encoders(encoder, theirs, str(name_or_path))


def compare_encoders(encoder: Encoder, theirs, name: str) -> None:
    """Compares an encoder's embeddings of `TEXTS` with the embeddings of a `SentenceTransformer`.

    Raises:
        UserError: they differ.
    """
    module = theirs[0]
    kept = {each: getattr(module, each, None) for each in ("max_seq_length", "query_length", "document_length")}
    longest = kept["max_seq_length"] or NO_LENGTH
    profile = encoder.profile
    lengths = {}
    for side, attribute in (("query", "query_length"), ("code", "document_length")):
        own = getattr(profile, f"{side}_length")
        length = kept[attribute] or longest
        if length >= NO_LENGTH:  # sentence-transformers truncates nothing, which a profile does for few encoders
            length = own
        setattr(module, attribute, min(length, LONGEST))
        lengths[f"{side}_length"] = min(own, LONGEST)
    module.max_seq_length = min(longest, LONGEST)
    profile = profile.replace(**lengths)
    ours = Encoder(encoder.model, encoder.tokenizer, profile)
    try:
        for encode, expected in (
            (ours.encode_queries, theirs.encode_query),
            (ours.encode_codes, theirs.encode_document),
        ):
            found = encode(TEXTS).cpu()
            right = expected(list(TEXTS), convert_to_tensor=True, show_progress_bar=False).cpu()
            difference = _difference(found, right)
            if difference:
                raise UserError(
                    f"{name}: sentence-transformers gives other embeddings ({difference}). Likely cause: a field or "
                    "the code of a module, or the tokenizer's files, such as padding_side=left, because this package "
                    f"pads on the right{IGNORE_FILES}"
                )
    finally:
        for attribute, length in kept.items():
            setattr(module, attribute, length)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Describes how embeddings, Tensor[n, d], differ. Returns "" if they are equal up to rounding."""
    if found.shape != expected.shape:
        return f"{expected.shape[1]} dimensions, not {found.shape[1]}"
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
    if errors.max() <= TOLERANCE:
        return ""
    return f"by up to {errors.max():.2g} of their length"
