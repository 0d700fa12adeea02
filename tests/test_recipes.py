"""Every recipe is valid and trains for two steps on tiny rows."""

import dataclasses
import re
from pathlib import Path

import pytest

from soft_trainer import load_rows
from soft_trainer.encoders.export import export_encoder
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.options.parse import parse
from soft_trainer.options.recipes import read_recipe

ROOT = Path(__file__).parents[1]
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
# A study has many runs; tests/studies/test_study.py covers studies.
OTHERS = set((ROOT / "recipes").rglob("*.yaml")) - set(LAUNCHES)
RECIPES = [path for path in sorted(OTHERS) if "runs" not in read_recipe(path)]
RUNS = [path for path in RECIPES if path.name != "base.yaml"]
# Options that make any recipe small and local. The batch size is the minimum for BM25's alpha and beta.
TINY = {
    "source_dir": "",
    "model_name_or_path": "",
    "from_scratch": "32x1",
    "vocabulary_size": 400,
    "max_steps": 2,
    "per_device_train_batch_size": 5,
    "use_cpu": "true",
    "disable_tqdm": "true",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes"))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_recipe_names_options_that_exist(path, tmp_path):
    from soft_trainer.options.fields import DataArguments
    from soft_trainer.options.model import ModelArguments
    from soft_trainer.options.training import SoftInfoNCETrainingArguments

    parsed = parse(
        (ModelArguments, DataArguments, SoftInfoNCETrainingArguments),
        ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "true"],
    )
    options = read_recipe(path)
    assert options
    assert parsed[-1].learning_rate == options.get("learning_rate", parsed[-1].learning_rate)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "paper").glob("*/base.yaml")), ids=name)
def test_the_paper_names_its_settings_so_that_no_later_default_changes_them(path, tmp_path):
    # Studies set the options of the methods. The other options are for batches and embeddings outside the paper.
    by_method = {"loss", "alpha", "beta", "temperature", "cancel_k", "cancel_ratio"}
    absent = {"margin", "gather_negatives", "matryoshka_dims", "group_size", "distill_temperature", "teacher"}
    without_effect = {"gradient_cache_chunk_size"}
    options = {field.name for field in dataclasses.fields(SoftInfoNCEOptions) if not field.name.startswith("negative")}
    recipe = read_recipe(path)
    assert options - by_method - absent - without_effect <= recipe.keys()
    assert {"train_sampling_strategy", "negatives_per_query", "bm25_idf", "bm25_scope"} <= recipe.keys()
    study = read_recipe(ROOT / "recipes" / "paper" / "overall.yaml")
    for method in study["runs"].values():
        assert method["estimator"] == "none" or {"alpha", "beta", "temperature"} <= method.keys()


@pytest.mark.parametrize("path", LAUNCHES, ids=name)
def test_a_launch_recipe_is_one_that_accelerate_takes(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(path))
    assert config.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU, "FSDP", "DEEPSPEED")
    assert config.mixed_precision in ("fp16", "bf16")
    assert (config.num_processes > 1) == (config.distributed_type != DistributedType.NO)


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=name)
def test_a_recipe_trains(path, script, data_dir, tmp_path, model, tokenizer, profile):
    options = TINY | {"data_dir": data_dir, "output_dir": tmp_path / "out", "language": "python"}
    recipe = read_recipe(path)
    estimator = "trained_model" if "teacher" in recipe else recipe.get("estimator")
    if estimator in ("initial_model", "trained_model"):  # needs a trained encoder
        encoder = export_encoder(model, tokenizer, profile, tmp_path / "encoder")
        options |= {"from_scratch": "", "model_name_or_path": encoder, "estimator_cache_dir": tmp_path / "rows"}
    if "teacher" in recipe:
        options["teacher"] = encoder
    elif estimator == "trained_model":
        options["estimator_model"] = encoder
    code, lines = script(config=path, **options)
    assert code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert any(re.match(r"\| test +\| encoder after training", line) for line in lines)


def test_the_paper_rows_are_filtered_as_graphcodebert_filters_them(write_folder, rows, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes" / "paper")
    import graphcodebert_rows

    link = {"docstring": "see http://a.b", "docstring_tokens": ["see", "http://a.b", "now"]}
    broken = {"code": "def broken(:\n    return"}
    code = "def f(x):\n    y = x  # a comment\n    return y"
    train = [rows[0], rows[1] | link, rows[2] | broken, rows[3] | {"code": code}]
    tested = [rows[5] | link, rows[6]]
    folder = write_folder(train=train, valid=[rows[4]], test=tested, codebase=[rows[4], *tested])
    monkeypatch.setattr("sys.argv", ["", str(folder), str(tmp_path / "out"), "--languages", "python"])
    graphcodebert_rows.main()
    written = load_rows(tmp_path / "out" / "python")
    assert written["train"].queries["url"][:] == [rows[0]["url"], rows[3]["url"]]
    assert "comment" not in written["train"].corpus["code"][1] and written["train"].corpus["code_tokens"][1][-1] == "y"
    assert written["test"].queries["url"][:] == [rows[6]["url"]]
    assert {*written["test"].corpus["url"]} == {row["url"] for row in rows[4:7]}  # the corpus is not filtered
