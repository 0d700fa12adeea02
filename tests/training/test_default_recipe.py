"""The defaults for an encoder that is already trained for search or similarity."""

import pytest

from soft_trainer.hub.export import export_encoder
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import parse
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.training.building import build_profile, take_default_recipe

CHOSEN = {"estimator": "initial_model", "train_sampling_strategy": "similar", "weighting": "positive_aware"}
CHOSEN |= {"learning_rate": 6e-5, "num_train_epochs": 1, "warmup_steps": 0.1}


@pytest.fixture(scope="module")
def encoder_dir(_model, tokenizer, profile, tmp_path_factory):
    return export_encoder(_model, tokenizer, profile, tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture
def options_after(tmp_path, encoder_dir):
    """Returns the options of a run after its defaults were chosen, only those of the recipe."""

    def choose(*words: str, model=encoder_dir) -> dict:
        words = [*words, *(["--model_name_or_path", str(model)] if model else []), "--use_cpu", "true"]
        types = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
        model_args, data_args, args = parse(types, [*words, "--output_dir", str(tmp_path)])
        take_default_recipe(model_args, data_args, args, build_profile(model_args))
        return {name: getattr(data_args if hasattr(data_args, name) else args, name) for name in CHOSEN}

    return choose


def test_an_encoder_of_sentences_gets_hard_batches_and_a_line_says_so(options_after, capsys):
    assert options_after() == CHOSEN
    assert "--estimator initial_model --train_sampling_strategy similar" in capsys.readouterr().err


def test_what_is_given_stays(options_after):
    assert options_after("--learning_rate", "1e-5", "--num_train_epochs=3") == CHOSEN | {
        "learning_rate": 1e-5,
        "num_train_epochs": 3,
    }
    assert options_after("--learning-rate", "1e-5") == CHOSEN | {"learning_rate": 1e-5}
    assert options_after("--gradient_cache_chunk_size", "8") == CHOSEN
    assert options_after("--distill_weight", "0.3") == CHOSEN


@pytest.mark.parametrize(
    "words",
    [
        ["--estimator", "bm25"],
        ["--estimator", "none"],
        ["--alpha", "1.3"],
        ["--train_sampling_strategy", "random"],
        ["--negatives_per_query", "1"],
        ["--score_function", "dot"],
        ["--per_device_train_batch_size", "8"],  # no two groups of similar rows
        ["--do_predict", "true"],
    ],
)
def test_whoever_chooses_gets_the_other_defaults(options_after, words):
    chosen = options_after(*words)
    assert chosen["weighting"] == "eq4" and chosen["learning_rate"] == 2e-5 and chosen["num_train_epochs"] == 10


def test_other_encoders_keep_theirs(options_after, encoder_dir, tmp_path):
    assert options_after("--from_scratch", "32x1", model=None)["estimator"] == "bm25"
    for file in ("config.json", "soft_trainer.json"):
        (tmp_path / "plain" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "plain" / file).write_bytes((encoder_dir / file).read_bytes())
    assert options_after(model=tmp_path / "plain")["estimator"] == "bm25"  # not saved for sentence-transformers


def test_arguments_made_in_python_are_left_alone(encoder_dir, tmp_path):
    model_args, data_args = ModelArguments(model_name_or_path=str(encoder_dir)), DataArguments()
    args = SoftInfoNCETrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    take_default_recipe(model_args, data_args, args, build_profile(model_args))
    assert data_args.estimator == "bm25" and args.train_sampling_strategy == "random"
