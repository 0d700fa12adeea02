"""Texts are encoded, pooled and scored, with the same pooling and prompts as in sentence-transformers."""

import numpy as np
import pytest
import torch
from refusals import refused
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from soft_trainer.encoders.encoding import (
    Encoder,
    distinct_rows,
    embed,
    encode,
    pad,
    pool,
    prompt_length,
    score,
    tokenize,
)
from soft_trainer.encoders.pooling import POOLINGS, PackedStates
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.encoders.static_torch import static_model
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator

THEIRS = {name: pooling.mode for name, pooling in POOLINGS.items() if pooling.mode}
COLUMNS = {"query": "docstring", "code": "code"}
TEXTS = ["sort a list with quick sort", "", "read", "def mean(numbers): return sum(numbers) / len(numbers) " * 4]


# ---- Texts to ids ----


def test_ids_have_special_tokens_and_are_cut_but_not_padded(tokenizer):
    ids = tokenize(tokenizer, TEXTS, max_length=12)
    for text, cut in zip(TEXTS, ids, strict=True):
        whole = tokenizer.encode(text)
        assert cut == (whole if len(whole) <= 12 else [*whole[:11], tokenizer.eos_token_id])
    assert ids[1] == [tokenizer.bos_token_id, tokenizer.eos_token_id]


# ---- Token vectors to embeddings ----


def padded(lengths: list[int], side: str) -> torch.Tensor:
    """Returns an attention mask with rows of these lengths, padded on the left or right."""
    position = torch.arange(max(lengths))
    mask = (position < torch.tensor(lengths)[:, None]).long()
    return mask if side == "right" else mask.flip(1)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("prompt", [0, 2])
@pytest.mark.parametrize("pooling", THEIRS)
def test_every_form_of_a_pooling_is_that_of_sentence_transformers(pooling, prompt, side):
    from sentence_transformers.sentence_transformer.modules import Pooling

    states, mask = torch.randn(4, 6, 8), padded([6, 3, 4, 5], side)
    theirs = Pooling(8, THEIRS[pooling], include_prompt=not prompt)
    features = {"token_embeddings": states, "attention_mask": mask, "prompt_length": prompt}
    expected = theirs(features)["sentence_embedding"]
    counted = mask * (mask.cumsum(1) > prompt)
    ours = pool(EncoderProfile(pooling=pooling), BaseModelOutput(states), counted)
    torch.testing.assert_close(ours, expected)
    if side == "right":
        exported = POOLINGS[pooling].exported(states.numpy(), counted.bool().numpy())
        torch.testing.assert_close(torch.from_numpy(exported).float(), expected)
        borders = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int()
        packed = PackedStates(states[mask.bool()], borders, borders[:-1].long() + prompt)
        torch.testing.assert_close(POOLINGS[pooling].packed(None, packed), expected)


@pytest.mark.parametrize("pooling", [*THEIRS, "pooler"])
def test_embeddings_are_in_float32_and_normalised_on_request(pooling):
    states, mask = torch.randn(2, 3, 4).bfloat16(), padded([3, 1], "right")
    outputs = BaseModelOutputWithPooling(states, pooler_output=states[:, 2])
    embeddings = pool(EncoderProfile(pooling=pooling), outputs, mask)
    assert embeddings.dtype == torch.float32
    assert pooling != "pooler" or torch.equal(embeddings, states[:, 2].float())
    normalised = pool(EncoderProfile(pooling=pooling, normalize=True), outputs, mask)
    torch.testing.assert_close(normalised, torch.nn.functional.normalize(embeddings, dim=1))


def test_the_mean_of_many_half_precision_vectors_is_taken_in_float32():
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    hidden[0, 0, 0] = 256.0
    mean = pool(EncoderProfile(), BaseModelOutput(hidden), torch.ones(1, 4096, dtype=torch.long))
    assert mean.item() == pytest.approx((256 + 4095) / 4096, rel=1e-6)


# ---- Embeddings to scores ----


def test_scores():
    queries, codes = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [6.0, 8.0], [0.0, -1.0]])
    dot = score(EncoderProfile(score_scale=2.0), queries, codes)
    assert dot.tolist() == [[6.0, 100.0, -8.0], [0.0, 32.0, -4.0]]
    cosine = score(EncoderProfile(score_function="cosine", score_scale=10.0), queries, codes)
    torch.testing.assert_close(cosine, torch.tensor([[6.0, 10.0, -8.0], [0.0, 8.0, -10.0]]))


def test_scores_are_not_rounded_by_autocast():
    torch.manual_seed(0)
    queries, codes = torch.randn(3, 64), torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score(EncoderProfile(), queries, codes)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, queries @ codes.T)
    assert score(EncoderProfile(), queries.double(), codes.double()).dtype == torch.float64


# ---- Any number of texts ----


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_embed_gives_every_text_its_embedding_in_the_order_given(model, tokenizer, profile, rows, batch_size):
    ids = tokenize(tokenizer, [row["code"] for row in rows[:10]] + ["x"], max_length=32)
    embeddings = embed(Encoder(model, tokenizer, profile), ids, "code", batch_size)
    model.eval()
    with torch.no_grad():
        expected = torch.cat([encode(model, profile, pad([row], tokenizer.pad_token_id)) for row in ids])
    torch.testing.assert_close(embeddings, expected, atol=1e-6, rtol=1e-5)
    assert not embeddings.requires_grad


def test_one_text_in_place_of_a_list_is_refused(model, tokenizer, profile):
    encoder = Encoder(model, tokenizer, profile)
    for encode_texts in (encoder.encode_queries, encoder.encode_codes):
        with refused("'sort a list': expected a list of texts"):
            encode_texts("sort a list")


@pytest.mark.parametrize("training", [True, False])
def test_embed_is_without_dropout_and_leaves_the_mode_as_it_was(model, tokenizer, profile, training):
    model.config.hidden_dropout_prob = 0.5
    model.train(training)
    ids = tokenize(tokenizer, TEXTS, max_length=32)
    first, second = (embed(Encoder(model, tokenizer, profile), ids, "code") for _ in range(2))
    assert torch.equal(first, second)
    assert model.training is training


# ---- Prompts ----


def test_prompts_follow_the_special_tokens_of_the_prefix():
    profile = PROFILES["unixcoder"].with_prompts("find: ", None)
    assert profile.query_prefix == "<encoder-only></s>find: "
    assert profile.code_prefix == PROFILES["unixcoder"].code_prefix
    assert profile.with_prompts("").query_prefix == PROFILES["unixcoder"].query_prefix
    assert EncoderProfile(query_prefix="query: ").with_prompts("search: ").query_prefix == "search: "
    graphs = PROFILES["graphcodebert"]
    assert graphs.with_prompts("find: ").query_prefix == "find: "
    with refused("code_prompt='code: ': an encoder that reads data flow cannot use a prompt"):
        graphs.with_prompts(code="code: ")


@pytest.fixture
def prompted(model, tokenizer, profile):
    """Returns a model, its tokenizer and a profile whose prompts are excluded from pooling."""
    prompts = {"query_prefix": "query: ", "code_prefix": "</s>"}
    return model.eval(), tokenizer, profile.replace(include_prompt=False, **prompts)


def test_prompt_length_counts_the_tokens_before_a_text(prompted):
    _, tokenizer, profile = prompted
    assert prompt_length(tokenizer, profile.replace(include_prompt=True), "query") == 0
    assert prompt_length(tokenizer, profile.replace(query_prefix=""), "query") == 0
    assert prompt_length(tokenizer, profile, "code") == 2  # <s> </s>
    assert prompt_length(tokenizer, profile, "query") == len(tokenizer("query: ")["input_ids"]) - 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_cache_chunk_size": 3}], ids=str)
def test_training_evaluation_and_estimators_leave_the_same_tokens_out(prompted, dataset, options, trainer_of):
    model, tokenizer, profile = prompted
    arguments = {"model": model, "encoder": profile}
    trainer = trainer_of(estimator=None, max_steps=1, arguments=arguments, **options)
    encoder = Encoder(model, tokenizer, profile)
    texts = {side: [" ".join(tokens) for tokens in dataset[f"{column}_tokens"]] for side, column in COLUMNS.items()}
    expected = {"query": encoder.encode_queries(texts["query"]), "code": encoder.encode_codes(texts["code"])}
    batch = next(iter(trainer.get_train_dataloader()))
    with trainer.running():
        found = dict(zip(("query", "code"), trainer.embeddings(model, batch), strict=True))
    estimator = TrainedModelEstimator("none", cache_dir=None)
    for side, rows in expected.items():
        torch.testing.assert_close(found[side].detach(), rows[batch.rows], atol=1e-5, rtol=0)
        rows = torch.nn.functional.normalize(rows)
        torch.testing.assert_close(trainer.embed_rows(dataset, side), rows, atol=1e-5, rtol=0)
        encoded = torch.tensor(estimator.encode_rows(dataset, side, encoder))
        torch.testing.assert_close(encoded, rows, atol=1e-5, rtol=0)
    assert len(batch.passes) > 1 or not options.get("gradient_cache_chunk_size")
    trainer.train()


def test_prompts_that_cannot_be_excluded_are_refused(prompted, trainer_of):
    with refused("data_collator: a custom collator cannot tell which tokens belong to the prompt"):
        trainer_of(arguments={"encoder": prompted[2], "data_collator": lambda features: {}})


def test_an_own_collator_of_a_static_encoder_is_refused(tokenizer, trainer_of):
    static = static_model(tokenizer, 32)
    with refused("data_collator: a static encoder weighs tokens in its own collator; drop data_collator"):
        trainer_of(arguments={"model": static, "encoder": PROFILES["static"], "data_collator": lambda features: {}})


def test_rows_of_equal_tokens_are_found():
    items = [np.array([1, 2]), np.array([1]), np.array([1, 2]), np.array([], dtype=np.int64), np.array([1])]
    firsts, groups = distinct_rows(items)
    assert firsts.tolist() == [0, 1, 3]
    assert groups.tolist() == [0, 1, 0, 2, 1]
    graphs = [{"a": np.array([1]), "b": np.array([2, 3])}, {"a": np.array([1, 2]), "b": np.array([3])}]
    assert distinct_rows(graphs)[0].tolist() == [0, 1]
