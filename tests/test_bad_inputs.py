"""A user's mistakes in every input of the script: each gives one line and exit code 2, before the model is loaded.

`options/test_refused.py` has the mistakes in options that no file, row or encoder decides.
"""

import shutil
from pathlib import Path

import datasets
import pytest

from soft_trainer.data.folders import SPLITS
from soft_trainer.encoders.export import export_encoder
from soft_trainer.system.files import write_rows

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
PRETRAINED = {"from_scratch": None}
# Options, and words that the message must contain. Names in braces are keys of the fixture `paths`.
BAD = [
    # The recipe and the shell.
    ({"learning_rate": "fast"}, "learning_rate"),
    # The rows.
    (
        {"max_train_rows": 4, "loss": "soft_info_nce"},
        "N=4 functions, too few",
    ),
    # Rows are read before the Hub is contacted for a model.
    (PRETRAINED | {"model_name_or_path": "nowhere/here", "data_dir": "{broken}"}, "train.jsonl, row 1"),
    (PRETRAINED | {"model_name_or_path": "nowhere/here", "data_dir": "{astray}"}, "https://astray"),
    # The encoder and the estimator.
    (PRETRAINED | {"model_name_or_path": "nowhere/here"}, "nowhere/here"),
    (PRETRAINED | {"model_name_or_path": "{untokenised}"}, "tokenizer"),
    (PRETRAINED | {"model_name_or_path": "{encoder}", "code_length": 5000}, "code_length"),
    (PRETRAINED | {"model_name_or_path": "{adapter}"}, "cannot be loaded: /nowhere/base"),
    (PRETRAINED | {"model_name_or_path": "{adapter}", "lora_r": 4}, "is already an adapter"),
    ({"from_scratch": "33x2"}, "from_scratch='33x2': expected HIDDENxLAYERS"),
    ({"estimator": "initial_model"}, "from_scratch=32x1, the encoder starts with random weights"),
    ({"estimator": "trained_model", "estimator_model": "nowhere/here"}, "nowhere/here"),
    # The output folder, the Hub and the machine.
    ({"output_dir": "{file}/out"}, "{file}"),
    ({"resume_from_checkpoint": "{empty}"}, "{empty}: not a complete checkpoint"),
    ({"push_to_hub": "true", "hub_model_id": "a/b/c"}, "a/b/c"),
    ({"push_to_hub": "true", "hub_model_id": "someone/something"}, "token"),
    ({"deepspeed": "nowhere.json"}, "deepspeed"),
]
IDS = ["-".join(f"{name}={value}" for name, value in options.items()) for options, _ in BAD]


@pytest.fixture(scope="module")
def paths(_model, tokenizer, profile, rows, tmp_path_factory) -> dict[str, Path]:
    """Paths by name: a file, an empty folder, an encoder, an incomplete encoder, an adapter without base, bad rows."""
    folder = tmp_path_factory.mktemp("paths")
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


def at(paths: dict[str, Path], value):
    """Replaces names in braces by the paths of `paths`."""
    braced = isinstance(value, str) and any(f"{{{name}}}" in value for name in paths)
    return value.format_map(paths) if braced else value


def arguments(paths, data_dir, options: dict) -> dict:
    options = BASE | {"data_dir": data_dir} | options
    return {name: at(paths, value) for name, value in options.items()}


@pytest.mark.parametrize(("options", "word"), BAD, ids=IDS)
def test_a_bad_input_is_one_line(script, paths, data_dir, tmp_path, monkeypatch, options, word):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for loading in ("load_model", "random_model"):
        monkeypatch.setattr(
            f"soft_trainer.run.starting.{loading}", lambda *_, **__: pytest.fail("the model was loaded")
        )
    code, lines = script(**arguments(paths, data_dir, options))
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
    assert not any("Traceback" in line for line in lines)
    assert at(paths, word) in errors[0]


# Options with which a library fails before the first step, and the start of its error.
LIBRARIES = {
    "TypeError: get_linear_schedule_with_warmup() got": {"lr_scheduler_kwargs": '{"a": 1}'},
}


@pytest.mark.parametrize("words", LIBRARIES)
def test_an_error_of_a_library_before_the_first_step_is_one_line(script, data_dir, words):
    code, lines = script(data_dir=data_dir, output_dir="out", **BASE, **LIBRARIES[words])
    assert code == 2 and not any("Traceback" in line for line in lines), lines
    assert lines[-1].startswith(f"error: {words}") and ".py:" in lines[-1]
