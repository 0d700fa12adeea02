"""A hundred user mistakes: each gives one line and exit code 2, before the model is loaded."""

import shutil
from pathlib import Path

import datasets
import pytest

from soft_trainer.data.layouts.files import SPLITS
from soft_trainer.encoders.export import export_encoder
from soft_trainer.files import write_rows

SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"
BASE = {
    "language": "python",
    "from_scratch": "32x1",
    "vocabulary_size": 400,
    "query_length": 16,
    "code_length": 32,
    "per_device_train_batch_size": 8,
    "use_cpu": "true",
}
EVALUATED = {"eval_strategy": "epoch"}
# Values that these options do not accept. The message contains the option.
VALUES = {
    "nan": "num_train_epochs alpha score_scale",
    -1: """
        num_train_epochs temperature examples
        data_flow_length distill_weight negatives_per_query learning_rate seed
        data_seed adam_beta1 adam_beta2 neftune_noise_alpha
    """,
    0: """
        per_device_train_batch_size per_device_eval_batch_size
        gradient_cache_chunk_size lora_r logging_steps beta max_train_rows
        vocabulary_size query_length gradient_accumulation_steps
    """,
    "true": "merge_lora fp16 tf32 bf16_full_eval load_best_model_at_end",
}
# Options, and a word that the message must contain. Words in braces are keys of the fixture `places`.
BAD = [
    *(({name: value}, name) for value, names in VALUES.items() for name in names.split()),
    # Numbers.
    ({"learning_rate": "inf"}, "learning_rate"),
    ({"learning_rate": "fast"}, "learning_rate"),
    ({"per_device_train_batch_size": -4}, "per_device_train_batch_size"),
    ({"per_device_train_batch_size": 17}, "dataloader_drop_last"),
    ({"per_device_train_batch_size": 3}, "the smallest N that works is 5; raise per_device_train_batch_size"),
    ({"per_device_train_batch_size": 8, "alpha": 6.0}, "the smallest N that works is 14"),
    ({"lora_r": 4, "lora_dropout": 1}, "lora_dropout"),
    ({"lora_r": 4}, "from scratch"),
    ({"lora_alpha": 8}, "lora_r"),
    (
        {"lora_r": 4, "from_scratch": None, "model_name_or_path": "{adapter}"},
        "is already an adapter",
    ),
    (
        {"from_scratch": None, "model_name_or_path": "{adapter}"},
        "cannot be loaded: /nowhere/base",
    ),
    ({"lora_target_modules": "query"}, "lora_r"),
    ({"matryoshka_dims": "64,16"}, "matryoshka_dims=64"),
    ({"matryoshka_dims": "16,0"}, "matryoshka_dims"),
    ({"matryoshka_dims": "16,16"}, "distinct"),
    (EVALUATED | {"matryoshka_dims": "32,16", "metric_for_best_model": "mrr_32"}, "mrr_16"),
    ({"save_strategy": "best"}, "eval_strategy"),
    ({"floor": 2}, "floor"),
    ({"cancel": "top_k", "cancel_k": -1}, "cancel_k"),
    ({"cancel": "ratio", "cancel_ratio": "nan"}, "cancel_ratio"),
    ({"loss": "kl_regularization", "kl_weight": "nan"}, "kl_weight"),
    ({"max_train_rows": -3}, "max_train_rows"),
    ({"from_scratch": "0x2"}, "from_scratch"),
    ({"from_scratch": "32"}, "256x4"),
    ({"from_scratch": "33x2"}, "from_scratch"),
    # Words.
    ({"learning_rat": 1}, "'learning_rate'"),
    (EVALUATED | {"metric_for_best_model": "eval_mrrr"}, "'mrr'"),
    (EVALUATED | {"metric_for_best_model": "loss"}, 'set metric_for_best_model="mrr"'),
    ({"optim": "adam"}, "optim"),
    ({"lr_scheduler_type": "sine"}, "lr_scheduler_type"),
    ({"lr_scheduler_kwargs": "{two"}, "lr_scheduler_kwargs"),
    (EVALUATED | {"lr_scheduler_type": "reduce_lr_on_plateau"}, '"mode": "max"'),
    ({"train_sampling_strategy": "batch_rebalance"}, "one_language"),
    ({"loss": "hinge"}, "info_nce"),
    ({"cancel": "some"}, "top_k"),
    ({"pooling": "max"}, "mean"),
    ({"score_function": "l2"}, "cosine"),
    ({"profile": "bert"}, "unixcoder"),
    ({"language": ""}, "language"),
    ({"language": "perl", "data_dir": None}, "ruby, python, java, javascript, php, go"),
    ({"language": "perl", "filters": "tests"}, "perl"),
    ({"filters": "short"}, "'short'"),
    ({"query_columns": "title"}, "title"),
    ({"eval_strategy": "sometimes"}, "sometimes"),
    ({"log_level": "loud"}, "log_level"),
    ({"debug": "everything"}, "everything"),
    ({"hub_strategy": "never"}, "never"),
    ({"report_to": "wand"}, "report_to=wand: use none, all or one of azure_ml"),
    ({"report_to": "wandb"}, "report_to=wandb: wandb is not installed; run pip install wandb, or set report_to=none"),
    ({"include_num_input_tokens_seen": "most"}, "include_num_input_tokens_seen"),
    # Estimators.
    ({"estimator": "tfidf"}, "bm25"),
    ({"estimator": "os:getcwd"}, "os:getcwd"),
    ({"estimator": "nowhere:Estimator"}, "nowhere"),
    ({"estimator": "json:JSONDecoder"}, "fit"),
    ({"estimator": ":"}, "estimator"),
    ({"estimator": "tfidf"}, "simcse"),
    ({"estimator": "none", "loss": "soft_info_nce"}, "estimator"),
    ({"estimator": "trained_model"}, "estimator_model"),
    ({"estimator": "trained_model", "estimator_model": "nowhere/here"}, "nowhere/here"),
    ({"bm25_scope": "world"}, "corpus"),
    ({"bm25_idf": "log"}, "okapi, robertson, lucene"),
    ({"bm25_document_column": "words"}, "words"),
    # Hard batches.
    ({"weighting": "positive_aware"}, "initial_model"),
    ({"weighting": "hard"}, "positive_aware"),
    ({"weighting": "positive_aware", "bm25_document_column": "code_tokens", "margin": "nan"}, "margin"),
    ({"estimator": "initial_model"}, "from_scratch"),
    ({"false_negatives": "drop"}, "positives"),
    ({"distill_weight": 1, "distill_temperature": 0}, "distill_temperature"),
    ({"train_sampling_strategy": "similar", "estimator": "none"}, "bm25"),
    ({"train_sampling_strategy": "similar", "group_size": 0}, "group_size"),
    ({"negatives_per_query": 1, "estimator": "none"}, "estimator"),
    ({"merge_ratio": "auto"}, "merge_ratio"),
    ({"merge_ratio": 1.5}, "merge_ratio"),
    # Files and folders.
    ({"config": "nowhere.yaml"}, "nowhere.yaml"),
    ({"config": "{empty}"}, "{empty}"),
    ({"data_dir": "nowhere"}, "nowhere"),
    ({"data_dir": "{file}"}, "{file}"),
    ({"data_dir": None, "source_dir": "nowhere"}, "nowhere"),
    ({"eval_data_dir": "nowhere"}, "nowhere"),
    ({"split_urls": "nowhere"}, "nowhere"),
    ({"output_dir": "{file}"}, "{file}"),
    ({"output_dir": "{file}/out"}, "{file}"),
    ({"resume_from_checkpoint": "nowhere"}, "nowhere"),
    ({"resume_from_checkpoint": "{empty}"}, "{empty}"),
    ({"from_scratch": None, "model_name_or_path": "{empty}"}, "{empty}"),
    ({"from_scratch": None, "model_name_or_path": "{file}"}, "{file}"),
    ({"from_scratch": None, "model_name_or_path": "{untokenised}"}, "tokenizer"),
    ({"from_scratch": None, "model_name_or_path": "nowhere/here"}, "nowhere/here"),
    ({"from_scratch": None, "model_name_or_path": "no such name"}, "no such name"),
    # Rows are read before the Hub is contacted for a model.
    ({"from_scratch": None, "model_name_or_path": "nowhere/here", "data_dir": "{broken}"}, "train.jsonl, row 1"),
    ({"from_scratch": None, "model_name_or_path": "nowhere/here", "data_dir": "{astray}"}, "https://astray"),
    ({"model_name_or_path": "{encoder}"}, "from_scratch"),
    ({"from_scratch": None, "model_name_or_path": "{encoder}", "code_length": 5000}, "code_length"),
    ({"deepspeed": "nowhere.json"}, "deepspeed"),
    ({"accelerator_config": "nowhere.json"}, "nowhere.json"),
    # Precision, processes and meaningless values.
    ({"fp16": "true", "bf16": "true"}, "fp16"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ({"accelerator_config": '{"split_batches": true}'}, "accelerator_config.split_batches"),
    ({"dataloader_num_workers": -7}, "dataloader_num_workers=-7"),
    ({"dataloader_num_workers": 0, "dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor"),
    ({"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "thread"}, "spawn"),
    # The Hub.
    ({"push_to_hub": "true", "hub_model_id": "a/b/c"}, "a/b/c"),
    ({"push_to_hub": "true", "hub_model_id": "someone/something"}, "token"),
    ({"push_data_to_hub": "no slash"}, "no slash"),
]
IDS = ["-".join(f"{name}={value}" for name, value in options.items()) for options, _ in BAD]


@pytest.fixture(scope="module")
def places(_model, tokenizer, profile, rows, tmp_path_factory) -> dict[str, Path]:
    """Paths by name: a file, an empty folder, an encoder, an incomplete encoder, an adapter without base, bad rows."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    encoder = export_encoder(_model, tokenizer, profile, folder / "encoder")
    shutil.copytree(encoder, folder / "untokenised", ignore=shutil.ignore_patterns("*token*", "*vocab*", "*merges*"))
    shutil.copytree(encoder, folder / "adapter", ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere/base"}')
    write_rows({split: rows for split in SPLITS}, folder / "broken")
    (folder / "broken" / "train.jsonl").write_text("{\n")
    write_rows({split: rows for split in SPLITS} | {"test": [rows[0] | {"url": "https://astray"}]}, folder / "astray")
    return {path.name: path for path in folder.iterdir()}


def at(places: dict[str, Path], value):
    """Replaces names in braces by the paths of `places`."""
    braced = isinstance(value, str) and any(f"{{{name}}}" in value for name in places)
    return value.format_map(places) if braced else value


def arguments(places, data_dir, options: dict) -> dict:
    options = BASE | {"data_dir": data_dir} | options
    return {name: at(places, value) for name, value in options.items()}


@pytest.mark.parametrize(("options", "word"), BAD, ids=IDS)
def test_a_bad_input_is_one_line(script, places, data_dir, tmp_path, monkeypatch, options, word):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for loading in ("load_model", "random_model"):
        monkeypatch.setattr(
            f"soft_trainer.training.starting.{loading}", lambda *_, **__: pytest.fail("the model was loaded")
        )
    code, lines = script(**arguments(places, data_dir, options))
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
    assert not any("Traceback" in line for line in lines)
    assert at(places, word) in errors[0]


# Options with which a library fails before the first step, and the start of its error.
LIBRARIES = {
    "ImportError: You have set `use_liger_kernel`": {"use_liger_kernel": "true"},
    "TypeError: get_linear_schedule_with_warmup() got": {"lr_scheduler_kwargs": '{"a": 1}'},
    "ValueError: not enough values": {"optim_args": "a"},
    "ValueError: 'A' is not a valid DynamoBackend": {"torch_compile_backend": "a"},
    "ValueError: --dataloader_prefetch_factor can only": {"dataloader_prefetch_factor": 2},
}


@pytest.mark.parametrize("words", LIBRARIES)
def test_an_error_of_a_library_before_the_first_step_is_one_line(script, data_dir, words):
    code, lines = script(data_dir=data_dir, output_dir="out", **BASE, **LIBRARIES[words])
    assert code == 2 and not any("Traceback" in line for line in lines), lines
    assert lines[-1].startswith(f"error: {words}") and ".py:" in lines[-1]
