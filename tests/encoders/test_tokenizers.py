"""Tokenizers without padding, with an end token, in pure Python, or that pad or truncate on the left all work."""

import json

import pytest
import torch
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from soft_trainer.data.tokens import token_column, tokenized
from soft_trainer.encoders.encoding import prompt_length, tokenize, tokenize_with_lengths
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import add_padding_token, prepare_tokenizer
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile

END = "<|endoftext|>"
TEXTS = ["read a file", "write", "sort a list of numbers " * 9]


@pytest.fixture
def decoder_tokenizer(rows):
    """Returns a tokenizer like Qwen3-Embedding's: it ends every text with a token, and has no padding token."""
    words = sorted({word for row in rows for word in (*row["docstring_tokens"], *row["code_tokens"])})
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", END, *words])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=END)


@pytest.fixture
def decoder(decoder_tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(decoder_tokenizer), head_dim=8, intermediate_size=32, **sizes)
    return Qwen3Model(config).eval()


PROFILE = EncoderProfile(pooling="last_token", query_length=8, code_length=12)


def test_the_end_token_survives_the_cut(decoder_tokenizer):
    for side in ("right", "left"):
        decoder_tokenizer.truncation_side = side
        ids, lengths = tokenize_with_lengths(decoder_tokenizer, TEXTS, "", 8)
        assert [row[-1] for row in ids] == [1, 1, 1] and [len(row) for row in ids] == [4, 2, 8]
        assert lengths == [4, 2, 46]


def test_without_a_padding_token_it_takes_its_end_token(decoder, decoder_tokenizer, tmp_path, same_everywhere):
    size = len(decoder_tokenizer)
    prepare_tokenizer(decoder_tokenizer, PROFILE)
    assert decoder_tokenizer.pad_token == END and len(decoder_tokenizer) == size
    export_encoder(decoder, decoder_tokenizer, PROFILE, tmp_path)
    ours = same_everywhere(tmp_path, TEXTS)
    assert ours.tokenizer.pad_token == END and len(ours.tokenizer) == size == ours.model.config.vocab_size
    alone = torch.cat([ours.encode_queries([text]) for text in TEXTS])
    torch.testing.assert_close(ours.encode_queries(TEXTS), alone, atol=1e-5, rtol=0)


def test_a_tokenizer_that_cannot_work_is_refused(decoder_tokenizer):
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    with refused("no padding token and no special token ", "set tokenizer.pad_token"):
        add_padding_token(PreTrainedTokenizerFast(tokenizer_object=words))
    with refused("query_prompt: 10 tokens", " query_length=8; shorten the prompt"):
        prepare_tokenizer(decoder_tokenizer, PROFILE.with_prompts("find " * 9))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_padding_and_cut_changes_no_embedding(decoder, decoder_tokenizer, side, tmp_path, same_everywhere):
    decoder_tokenizer.padding_side = decoder_tokenizer.truncation_side = side
    decoder_tokenizer.init_kwargs |= {"padding_side": side, "truncation_side": side}  # as its published file says
    profile = PROFILE.with_prompts("find ")
    prepare_tokenizer(decoder_tokenizer, profile)
    ids = tokenize(decoder_tokenizer, TEXTS, profile.query_prefix, 8)
    first = decoder_tokenizer("find")["input_ids"][0]
    assert [row[0] for row in ids] == [first] * 3 and [row[-1] for row in ids] == [1] * 3
    export_encoder(decoder, decoder_tokenizer, profile, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "right"
    same_everywhere(tmp_path, TEXTS)


def test_prefix_token_keeps_its_id(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    number = content["model"]["vocab"]["<encoder-only>"] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    published = type(tokenizer).from_pretrained(tmp_path)
    assert number not in published("<encoder-only>")["input_ids"]
    size = len(published)
    for _ in range(2):
        prepare_tokenizer(published, PROFILES["unixcoder"])
        assert published("<encoder-only>x")["input_ids"][1] == number
        assert len(published) == size


def test_a_missing_prefix_token_is_refused_but_a_prompt_that_begins_with_a_tag_stays_text(tokenizer):
    with refused("unixcoder", "<encoder-only>"):
        prepare_tokenizer(tokenizer, PROFILES["unixcoder"])
    prepare_tokenizer(tokenizer, PROFILES["auto"].with_prompts("<query> "))
    assert "<query>" not in tokenizer.all_special_tokens


# ---- Tokenizers written in Python ----


@pytest.mark.slow
def test_a_tokenizer_written_in_python_trains_and_loads(dataset, trainer_of, same_everywhere):
    tokenizer = ByT5Tokenizer()
    profile = EncoderProfile(query_length=24, code_length=24, query_prefix="q: ", include_prompt=False)
    ids, lengths = tokenize_with_lengths(tokenizer, TEXTS, "", 10)
    assert lengths == [len(text.encode()) + 1 for text in TEXTS] and [len(row) for row in ids] == [10, 6, 10]
    assert prompt_length(tokenizer, profile, "query") == 3
    assert tokenized(dataset, "query", profile, tokenizer)[0]["length"] == len("q: sort a list with quick sort") + 1
    assert len(token_column(dataset, "code", profile, tokenizer)) == len(dataset)
    torch.manual_seed(0)
    config = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    arguments = {"model": T5EncoderModel(config), "processing_class": tokenizer, "encoder": profile}
    trainer = trainer_of(estimator=None, max_steps=2, arguments=arguments)
    trainer.train()
    trainer.save_model()
    same_everywhere(trainer.args.output_dir, TEXTS)
