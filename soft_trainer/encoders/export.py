"""Writes an encoder to a folder that `AutoModel`, `SentenceTransformer` and `soft_trainer.load_encoder` can load."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from soft_trainer.encoders.adapters import check_apart_from_base, has_adapter, merge_adapter, save_adapter
from soft_trainer.encoders.loading import pooling_layer
from soft_trainer.encoders.packing import first_position
from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static_numpy import NO_LENGTH
from soft_trainer.encoders.static_torch import StaticConfig
from soft_trainer.system.files import (
    MERGED_ADAPTER,
    ONNX_FILES,
    SETTINGS_FILE,
    WEIGHT_FILES,
    reporting_disk_errors,
    use_umask,
    write_json,
)
from soft_trainer.system.packaged import STATIC_CODE


def export_encoder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: EncoderProfile,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    merge: bool = False,
) -> Path:
    """Writes an encoder's weights, configuration, tokenizer, profile and sentence-transformers files to a folder.

    If the model has an adapter, only the adapter is written, and loading the folder requires the adapter's base. With
    `merge`, the merged model is written instead, and the adapter goes to the subfolder `adapter`.

    Everything is first written to a temporary folder inside `folder`, and then moved into place file by file. If the
    disk is full or writing is interrupted, the earlier files stay unchanged.

    Args:
        state_dict: the weights to save instead of the model's weights, as gathered by sharded training.
        merge: whether to merge the adapter into the model.

    Returns:
        The folder.

    Raises:
        UserError: the disk is full, the folder cannot be written to, or the folder contains the adapter's base.
    """
    folder = Path(folder)
    if has_adapter(model):
        check_apart_from_base(model, folder)
    with reporting_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as aside:
            _write(model, tokenizer, profile, Path(aside), state_dict, merge)
            use_umask(aside)
            written = set()
            for path in Path(aside).rglob("*"):
                if path.is_file():
                    target = folder / path.relative_to(aside)
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)
                    written.add(target)
        # Otherwise, AutoModel would load an adapter onto weights that an earlier run left in the folder, and
        # SentenceTransformer would load an ONNX export of those weights.
        for pattern in (*WEIGHT_FILES, *ONNX_FILES):
            for path in {*folder.glob(pattern)} - written:
                path.unlink()
    return folder


def _write(model, tokenizer, profile: EncoderProfile, aside: Path, state_dict, merge: bool) -> None:
    if first := first_position(model):  # from its padding, which Trainer replaces by the tokenizer's
        model.config.pad_token_id = first - 1
    if isinstance(model.config, StaticConfig):
        classes = {"AutoConfig": "StaticConfig", "AutoModel": "StaticModel"}
        model.config.auto_map = {name: f"{STATIC_CODE.stem}.{kind}" for name, kind in classes.items()}
        model.config.prompt_length = model.weigh.after(tokenizer, profile.code_prefix).prompt_length
        shutil.copy(STATIC_CODE, aside)
    # The weights keep the model's parameter names, which Trainer needs to resume.
    if not has_adapter(model):
        model.save_pretrained(aside, state_dict=state_dict, save_original_format=False)
    elif merge:
        merge_adapter(copy.deepcopy(model)).save_pretrained(aside, save_original_format=False)
        (aside / MERGED_ADAPTER).mkdir()
        save_adapter(model, aside / MERGED_ADAPTER)
    else:
        save_adapter(model, aside, state_dict)
    if tokenizer.is_fast:  # otherwise, the file would keep the truncation of the tokenizer's last call
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    saved_length = tokenizer.model_max_length
    longest = max(profile.query_length, profile.code_length)
    if longest < NO_LENGTH:
        tokenizer.model_max_length = longest
    tokenizer.save_pretrained(aside)
    tokenizer.model_max_length = saved_length
    for file, content in sentence_transformers_files(model, profile).items():
        (aside / file).parent.mkdir(exist_ok=True)
        write_json(aside / file, content)
    profile.save(aside)


def sentence_transformers_files(model: PreTrainedModel, profile: EncoderProfile) -> dict[str, object]:
    """Returns the additional files that `SentenceTransformer` reads, as JSON values keyed by file name.

    `encode_query` truncates to `query_length`, `encode_document` to `code_length`, and plain `encode` to the longer of
    the two, which is also the tokenizer's `model_max_length`. A profile that pools with the model's pooler has no
    pooling module. A static encoder has only `StaticModule`.
    """
    settings = {
        "prompts": {"query": profile.query_prefix, "document": profile.code_prefix},
        "default_prompt_name": None,
        "similarity_fn_name": profile.score_function,
    }
    if profile.truncate_dim:
        settings["truncate_dim"] = profile.truncate_dim
    files: dict[str, object] = {SETTINGS_FILE: settings}
    if isinstance(model.config, StaticConfig):
        return files | {"modules.json": _modules([(f"{STATIC_CODE.stem}.StaticModule", "")])}
    longest = max(profile.query_length, profile.code_length)
    transformer = {"max_seq_length": longest, "do_lower_case": profile.lower_case}
    if profile.query_length != profile.code_length:
        transformer |= {"query_length": profile.query_length, "document_length": profile.code_length}
    if options := pooling_layer(type(model), profile):
        transformer["model_args"] = options
    modules = [("sentence_transformers.models.Transformer", "")]
    pooling = POOLINGS[profile.pooling]
    if pooling.key is None:
        text = {"method": "forward", "method_output_name": pooling.output}
        transformer |= {"modality_config": {"text": text}, "module_output_name": "sentence_embedding"}
    else:
        modules.append(("sentence_transformers.models.Pooling", "1_Pooling"))
        # All releases of sentence-transformers read these older keys.
        files["1_Pooling/config.json"] = {
            "word_embedding_dimension": model.config.hidden_size,
            **{each.key: each is pooling for each in POOLINGS.values() if each.key},
            "include_prompt": profile.include_prompt,
        }
    if profile.normalize:
        modules.append(("sentence_transformers.models.Normalize", f"{len(modules)}_Normalize"))
    return files | {"sentence_bert_config.json": transformer, "modules.json": _modules(modules)}


def _modules(kinds: Sequence[tuple[str, str]]) -> list[dict]:
    """Returns the content of `modules.json`, from the class and the folder of each module."""
    return [{"idx": index, "name": str(index), "path": path, "type": kind} for index, (kind, path) in enumerate(kinds)]
