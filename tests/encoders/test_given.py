"""The trainer accepts an encoder by name or as an object, and rows with the usual column names."""

import pytest
from datasets import Dataset
from refusals import refused
from sentence_transformers import SentenceTransformer

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder


@pytest.fixture
def arguments(tmp_path):
    return SoftInfoNCETrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, use_cpu=True, save_strategy="no"
    )


@pytest.fixture
def pairs(rows):
    return Dataset.from_list([{"anchor": row["docstring"], "positive": row["code"]} for row in rows])


@pytest.mark.parametrize("kind", ["folder", "sentence-transformers", "encoder"])
def test_a_folder_or_another_encoder_trains_on_its_usual_columns(encoder_dir, profile, arguments, pairs, kind):
    model = encoder_dir
    if kind == "sentence-transformers":
        model = SentenceTransformer(str(encoder_dir), device="cpu")
    elif kind == "encoder":
        model = load_encoder(encoder_dir, device="cpu")
    trainer = SoftInfoNCETrainer(model, arguments, pairs, pairs)
    assert trainer.encoder.pooling == profile.pooling and trainer.encoder.score_function == profile.score_function
    trainer.train()
    assert trainer.evaluate()["eval_pool_size"] == len(pairs)
    named = pairs.rename_columns({"anchor": "my words", "positive": "my code"})
    columns = {"query_column": "my words", "code_column": "my code"}
    again = SoftInfoNCETrainer(encoder_dir, arguments, named, named, **columns)
    assert again.train_dataset[:] == trainer.train_dataset[:]
    assert again.predict(named).metrics["test_pool_size"] == len(pairs)


@pytest.mark.parametrize("kind", ["folder", "sentence-transformers", "encoder", "model"])
def test_a_dict_changes_the_inferred_profile(encoder_dir, tokenizer, profile, arguments, pairs, kind):
    encoder = load_encoder(encoder_dir, device="cpu")
    models = {"folder": encoder_dir, "encoder": encoder, "model": encoder.model}
    models["sentence-transformers"] = SentenceTransformer(str(encoder_dir), device="cpu")
    changes = {"query_length": 8, "score_scale": 10, "query_prompt": "find: ", "pooling": "cls"}
    trainer = SoftInfoNCETrainer(models[kind], arguments, pairs, processing_class=tokenizer, encoder=changes)
    found = trainer.encoder
    assert (found.query_length, found.score_scale, found.pooling, found.query_prefix) == (8, 10, "cls", "find: ")
    assert (found.code_length, found.score_function) == (profile.code_length, profile.score_function)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lenght": 8}, "encoder: no setting 'query_lenght'; did you mean 'query_length'?"),
        ({"lora_r": 8}, "encoder: no setting 'lora_r'"),
        ({"query_length": "8"}, "query_length='8': must be of type int"),
        ({"pooling": "max"}, "pooling='max': use one of mean"),
        ({"query_length": 64}, "query_length=64: the model reads at most"),
    ],
)
def test_wrong_changes_are_refused(encoder_dir, arguments, pairs, changes, message):
    with refused(message):
        SoftInfoNCETrainer(encoder_dir, arguments, pairs, encoder=changes)


def test_options_of_the_encoder_are_no_arguments_of_a_trainer(encoder_dir, arguments, pairs):
    with refused("query_length: an option of the encoder", "encoder={'query_length': VALUE}"):
        SoftInfoNCETrainer(encoder_dir, arguments, pairs, query_length=8)


def test_a_token_without_a_vector_is_refused_before_training(encoder_dir, arguments, pairs):
    encoder = load_encoder(encoder_dir, device="cpu")
    tokens = len(encoder.tokenizer)
    encoder.tokenizer.add_tokens(["<new>", "<other>"])
    with refused(f"the tokenizer has {tokens + 2:,} tokens, but the model has vectors for only {tokens:,}; call"):
        SoftInfoNCETrainer(encoder, arguments, pairs)
    encoder.model.resize_token_embeddings(tokens + 2)
    SoftInfoNCETrainer(encoder, arguments, pairs)
