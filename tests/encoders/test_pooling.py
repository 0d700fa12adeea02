"""Pooling and prompts against sentence-transformers' own modules, on the same ids."""

import pytest
import torch
from refusals import refused
from transformers.modeling_outputs import BaseModelOutput

from soft_trainer.encoders.encoding import embed, encode, pad, prompt_length, tokenize
from soft_trainer.encoders.loading import Encoder
from soft_trainer.encoders.pooling import pool
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator

THEIRS = {"mean": "mean", "cls": "cls", "last_token": "lasttoken"}
COLUMNS = {"query": "docstring", "code": "code"}
TEXTS = ["read a file", "x", "sort a list with quick sort " * 9, ""]


def padded(lengths: list[int], side: str) -> torch.Tensor:
    """An attention mask whose rows have these lengths, padded on one side."""
    place = torch.arange(max(lengths))
    mask = (place < torch.tensor(lengths)[:, None]).long()
    return mask if side == "right" else mask.flip(1)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("prompt", [0, 2])
@pytest.mark.parametrize("pooling", THEIRS)
def test_pooling_is_that_of_sentence_transformers(pooling, prompt, side):
    from sentence_transformers.sentence_transformer.modules import Pooling

    states, mask = torch.randn(4, 6, 8), padded([6, 3, 4, 5], side)
    theirs = Pooling(8, THEIRS[pooling], include_prompt=not prompt)
    features = {"token_embeddings": states, "attention_mask": mask, "prompt_length": prompt}
    expected = theirs(features)["sentence_embedding"]
    counted = mask * (mask.cumsum(1) > prompt)
    ours = pool(EncoderProfile(pooling=pooling), BaseModelOutput(states), counted)
    torch.testing.assert_close(ours, expected)


def test_a_text_without_a_token_to_pool_is_zero_and_not_nan():
    mask = torch.tensor([[1, 1], [0, 0]])
    mean = pool(EncoderProfile(), BaseModelOutput(torch.randn(2, 2, 8)), mask)
    assert mean[1].eq(0).all() and mean.isfinite().all()


# ---- Prompts ----


def test_prompts_follow_the_special_tokens_of_the_prefix():
    profile = PROFILES["unixcoder"].with_prompts("find: ", None)
    assert profile.query_prefix == "<encoder-only></s>find: "
    assert profile.code_prefix == PROFILES["unixcoder"].code_prefix
    assert profile.with_prompts("").query_prefix == PROFILES["unixcoder"].query_prefix
    assert EncoderProfile(query_prefix="query: ").with_prompts("search: ").query_prefix == "search: "
    graphs = PROFILES["graphcodebert"]
    assert graphs.with_prompts("find: ").query_prefix == "find: "
    with pytest.raises(UserError, match="^code_prompt='code: ': codes .* data flow take no prompt$"):
        graphs.with_prompts(code="code: ")


@pytest.fixture
def prompted(model, tokenizer, profile):
    """Model, tokenizer and a profile whose prompts are left out of the pooling."""
    prompts = {"query_prefix": "query: ", "code_prefix": "</s>"}
    return model.eval(), tokenizer, profile.replace(include_prompt=False, **prompts)


def test_prompt_length_counts_the_tokens_before_a_text(prompted):
    _, tokenizer, profile = prompted
    assert prompt_length(tokenizer, profile.replace(include_prompt=True), "query") == 0
    assert prompt_length(tokenizer, profile.replace(query_prefix=""), "query") == 0
    assert prompt_length(tokenizer, profile, "code") == 2  # <s> </s>
    assert prompt_length(tokenizer, profile, "query") == len(tokenizer("query: ")["input_ids"]) - 1


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_prompts_are_left_out_of_the_pooling_and_stay_in_the_attention(prompted, pooling):
    model, tokenizer, profile = prompted
    profile = profile.replace(pooling=pooling)
    skipped = prompt_length(tokenizer, profile, "query")
    ids = tokenize(tokenizer, TEXTS, profile.query_prefix, profile.query_length)
    together = encode(model, profile, pad(ids, tokenizer.pad_token_id, skipped))
    for row, text in enumerate(ids):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([text])).last_hidden_state[0, skipped:]
        expected = {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}[pooling]
        torch.testing.assert_close(together[row], expected, atol=1e-5, rtol=0)
    batched = embed(model, profile, ids, tokenizer.pad_token_id, 2, prompt_length=skipped)
    torch.testing.assert_close(batched, together, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunk_by_length": False}, {"gradient_cache_chunk_size": 3}], ids=str)
def test_training_evaluation_and_estimators_leave_the_same_tokens_out(prompted, dataset, options, trainer_of):
    model, tokenizer, profile = prompted
    arguments = {"model": model, "encoder": profile}
    trainer = trainer_of(estimator=None, max_steps=1, arguments=arguments, **options)
    encoder = Encoder(model, tokenizer, profile)
    texts = {side: [" ".join(tokens) for tokens in dataset[f"{column}_tokens"]] for side, column in COLUMNS.items()}
    expected = {"query": encoder.encode_queries(texts["query"]), "code": encoder.encode_codes(texts["code"])}
    batch = next(iter(trainer.get_train_dataloader()))
    estimator = TrainedModelEstimator("none", cache_dir=None)
    for side, rows in expected.items():
        embeddings = trainer.embeddings(model, getattr(batch, side)).detach()
        torch.testing.assert_close(embeddings, rows[batch.rows], atol=1e-5, rtol=0)
        rows = torch.nn.functional.normalize(rows)
        torch.testing.assert_close(trainer.embed_rows(dataset, side), rows, atol=1e-5, rtol=0)
        encoded = torch.tensor(estimator.encode_rows(dataset, side, encoder))
        torch.testing.assert_close(encoded, rows, atol=1e-5, rtol=0)
    assert len(batch.code.chunks) > 1 or not options.get("gradient_cache_chunk_size")
    trainer.train()


def test_prompts_that_cannot_be_left_out_are_refused(prompted, trainer_of):
    for values in ({"pooling": "pooler"}, {"data_flow_length": 8}):
        with pytest.raises(UserError, match="^include_prompt=False: .*use pooling mean or cls$"):
            EncoderProfile(include_prompt=False, **values)
    with refused("data_collator: does not know which tokens are the prompt's"):
        trainer_of(arguments={"encoder": prompted[2], "data_collator": lambda features: {}})
