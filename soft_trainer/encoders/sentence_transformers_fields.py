"""Lists the fields of sentence-transformers' files: which a profile applies, and which do not affect embeddings.

A field with a list is supported only with these values. Fields that no list contains come from other releases; the
comparison at loading shows whether they matter.
"""

from __future__ import annotations

from collections.abc import Mapping

from soft_trainer.errors import UserError

SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
# Earlier releases named the file after the model.
TRANSFORMER_FILES = (
    TRANSFORMER_FILE,
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")),
    "sentence_xlnet_config.json",
)
_IGNORED = """
    processing_kwargs.chat_template unpad_inputs
    model_kwargs.add_pooling_layer model_kwargs.attn_implementation model_kwargs.device_map model_kwargs.dtype
    model_kwargs.low_cpu_mem_usage model_kwargs.torch_dtype model_kwargs.trust_remote_code model_kwargs.use_safetensors
    processor_kwargs.padding_side processor_kwargs.trust_remote_code processor_kwargs.use_fast
    config_kwargs.trust_remote_code config_kwargs.use_cache
"""


def _each(names: str, effect: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), effect)


APPLIED = "applied"
NO_EFFECT = "no effect on embeddings in float32"
_TRANSFORMER = {
    **_each("max_seq_length query_length document_length do_lower_case modality_config module_output_name", APPLIED),
    **_each("processor_kwargs.model_max_length", APPLIED),
    **_each(_IGNORED, NO_EFFECT),
    "transformer_task": ["feature-extraction"],
    "query_expansion": [None],
    "tokenizer_name_or_path": [None],
    "processing_kwargs": [{}, None],
    "processing_kwargs.text": [{}],
    "processing_kwargs.common": [{}],
}
_SETTINGS = {
    **_each("prompts similarity_fn_name truncate_dim", APPLIED),
    # `encode_query` and `encode_document` use their own prompts.
    **_each("default_prompt_name __version__", NO_EFFECT),
    "model_type": ["SentenceTransformer"],
}
_POOLING_MODES = """
    pooling_mode pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens
    pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken
"""
_POOLING = {
    **_each(_POOLING_MODES, APPLIED),
    **_each("include_prompt", APPLIED),
    **_each("embedding_dimension word_embedding_dimension", NO_EFFECT),
}
_NORMALIZE = {
    "module_input_name": ["sentence_embedding"],
    "module_output_name": ["sentence_embedding", None],
}
FIELDS = {"Transformer": _TRANSFORMER, "settings": _SETTINGS, "Pooling": _POOLING, "Normalize": _NORMALIZE}
# Keyword arguments by the names of earlier releases. A field that neither name has in the table is refused.
_EARLIER = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}


def flat_fields(content: Mapping) -> dict[str, object]:
    """Returns the fields of a module's configuration. Keyword arguments become fields such as `model_kwargs.dtype`."""
    fields = {}
    for name, value in content.items():
        if isinstance(value, Mapping) and name.endswith(("_args", "_kwargs")):
            fields |= {f"{_EARLIER.get(name, name)}.{key}": each for key, each in value.items()}
        else:
            fields[name] = value
    return fields


def check_fields(kind: str, file: str, content: Mapping) -> list[str]:
    """Checks a file's fields against the table, and returns those that the table does not have.

    Args:
        kind: a key of `FIELDS`.

    Raises:
        UserError: a profile cannot express a field. The message starts with the file.
    """
    unknown = []
    for name, value in flat_fields(content).items():
        effect = FIELDS[kind].get(name)
        if effect is None and "kwargs." in name:
            effect = []
        if effect is None:
            unknown.append(f"{file}: {name}={value!r}")
        elif isinstance(effect, list) and value not in effect:
            raise UserError(f"{file}: {name}={value!r} is not supported")
    return unknown
