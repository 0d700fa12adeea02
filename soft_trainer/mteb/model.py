"""Makes an encoder of `load_encoder` a model of mteb."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.languages import PROGRAMMING_LANGS
from mteb.models import ModelMeta
from mteb.types import PromptType
from torch import Tensor

from soft_trainer.dataflow import LANGUAGES
from soft_trainer.encoders.encoding import Encoder, comparable
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.repository import published_name
from soft_trainer.terminal import print_on_main

_CODE = "-Code"  # the end of a programming language's name in mteb


class MtebEncoder:
    """An encoder as mteb calls it. It keeps the profile: both prefixes and lengths, pooling, data flow and score.

    Documents of a task are encoded as codes. Queries, and the texts of tasks without queries, are encoded as queries.
    An encoder with data flow needs the language of the code, which it takes from the task. If a task names no language
    or several, its code is read as plain tokens, up to the combined length of code and data flow.

    Args:
        encoder: what `load_encoder` returned, or the folder or Hub name to load.
        revision, options: as in `load_encoder`, which raises UserError.
        bf16: compute in bfloat16. Embeddings are float32 anyway.
        name: the folder or Hub name that results are filed under. Default: where the encoder was loaded from; of one
            with an adapter that is its base.
    """

    def __init__(
        self,
        encoder: Encoder | str | Path,
        revision: str | None = None,
        *,
        bf16: bool = False,
        name: str | None = None,
        **options,
    ):
        self.encoder = encoder if isinstance(encoder, Encoder) else load_encoder(encoder, revision, **options)
        name = name or (encoder.model.config._name_or_path if isinstance(encoder, Encoder) else encoder)
        self.mteb_model_meta = _model_meta(str(name), revision, self.encoder)
        self._bf16 = bf16
        self._told: set[str] = set()

    def encode(
        self,
        inputs,
        *,
        task_metadata: TaskMetadata,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        batch_size: int = 64,
        show_progress_bar: bool = False,
        **_,
    ) -> Tensor:
        """Computes the embeddings Tensor[n, d] of all texts, in float32 on the CPU.

        Args:
            inputs: a `DataLoader` whose batches have the texts in `text`.
            task_metadata, hf_subset: identify the language of the code.
            prompt_type: `document` for code, otherwise the texts are queries.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        with torch.autocast(self.encoder.model.device.type, torch.bfloat16, enabled=self._bf16):
            if prompt_type == PromptType.document:
                language = code_language(task_metadata, hf_subset)
                reader = self._reader_of(language, task_metadata.name)
                embeddings = reader.encode_codes(texts, language, batch_size, show_progress_bar)
            else:
                embeddings = self.encoder.encode_queries(texts, batch_size, show_progress_bar)
        return embeddings.float().cpu()

    def similarity(self, embeddings1, embeddings2) -> Tensor:
        """Computes the scores Tensor[B, N] of embeddings [B, d] against embeddings [N, d], without the scale."""
        return self._comparable(embeddings1) @ self._comparable(embeddings2).T

    def similarity_pairwise(self, embeddings1, embeddings2) -> Tensor:
        """Computes the scores Tensor[n] of pairs: row i of the first, [n, d], with row i of the second."""
        return (self._comparable(embeddings1) * self._comparable(embeddings2)).sum(-1)

    def _comparable(self, embeddings) -> Tensor:
        return comparable(self.encoder.profile, torch.atleast_2d(torch.as_tensor(embeddings)))

    def _reader_of(self, language: str | None, task: str) -> Encoder:
        """Returns the encoder, which reads plain tokens where it has no data flow of the language."""
        profile = self.encoder.profile
        if not profile.data_flow_length or language in LANGUAGES:
            return self.encoder
        if task not in self._told:
            print_on_main(f"{task}: no single language with data flow; code is read as plain tokens")
            self._told.add(task)
        plain = profile.replace(data_flow_length=0, code_length=profile.code_length + profile.data_flow_length)
        return dataclasses.replace(self.encoder, profile=plain)


def code_language(task_metadata: TaskMetadata, subset: str) -> str | None:
    """Returns the programming language of a task's subset, None if the task names none or several."""
    codes = task_metadata.hf_subsets_to_langscripts.get(subset, [])
    languages = [code.removesuffix(_CODE) for code in codes if code.endswith(_CODE)]
    return languages[0] if len(languages) == 1 else None


def language_code(language: str | None) -> str:
    """Returns mteb's name for a programming language, or English for one that it does not know."""
    name = {"cpp": "c++", "csharp": "c#", "tsx": "typescript"}.get(language, language)
    return name + _CODE if name in PROGRAMMING_LANGS else "eng-Latn"


def _model_meta(name: str, revision: str | None, encoder: Encoder) -> ModelMeta:
    """Describes the model for mteb's files. mteb requires an owner, so a folder becomes `local/FOLDER`."""
    profile = encoder.profile
    published = published_name(name)
    on_hub = published.count("/") == 1 and not Path(published).exists()
    known = {
        "name": published if on_hub else f"local/{Path(name).resolve().name if name else 'encoder'}",
        "revision": revision,
        "n_parameters": encoder.model.num_parameters(),
        "max_tokens": max(profile.query_length, profile.code_length + profile.data_flow_length),
        "embed_dim": encoder.model.config.hidden_size,
        "similarity_fn_name": profile.score_function,
        "use_instructions": bool(profile.query_prefix or profile.code_prefix),
        "framework": ["PyTorch", "Transformers"],
    }
    # Built from a dict, so that pydantic checks the values; `create_empty` has the names of all fields.
    return ModelMeta(**ModelMeta.create_empty().model_dump() | {k: v for k, v in known.items() if v is not None})
