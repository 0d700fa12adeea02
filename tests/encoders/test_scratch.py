"""A tokenizer is trained on the rows, and a small encoder gets random weights."""

import pytest
import torch
from transformers import AutoTokenizer

from soft_trainer.encoders.encoding import encode, pad, tokenize
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import parse_size, random_model, train_tokenizer

UNIXCODER = PROFILES["unixcoder"].replace(query_length=8, code_length=12)


def test_a_size_is_a_multiple_of_32_and_a_number_of_layers(tokenizer, profile):
    assert parse_size("256x4") == (256, 4) and parse_size("64x0") == (64, 0)
    for hidden in (32, 64, 352):
        config = random_model(f"{hidden}x1", tokenizer, profile).config
        assert (config.hidden_size, config.num_hidden_layers) == (hidden, 1)


def test_ids_keep_every_character_and_one_name_in_several_spellings_has_one_in_tokens(tokenizer):
    for text in ("sort a list", "def f(x):\n\treturn 'é😀'", "\x00 ~"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).split() == text.split()
    spellings = tokenizer(["read lines", "readLines", "read_lines", "Read lines", "ReadLines"])["input_ids"]
    assert all(ids == spellings[0] for ids in spellings)
    assert tokenizer("readlines")["input_ids"] != spellings[0]


def test_the_tokenizer_learns_from_its_texts(rows, profile):
    texts = ["quicksort quicksort quicksort"] * 50
    learned, other = train_tokenizer(texts, profile, 400), train_tokenizer(["unrelated words"], profile, 400)
    assert len(learned("quicksort")["input_ids"]) == 3 < len(other("quicksort")["input_ids"])
    assert learned.get_vocab() == train_tokenizer(texts, profile, 400).get_vocab()
    assert len(train_tokenizer((row["code"] for row in rows), profile, 300)) == 300  # no more than asked for


def test_a_special_token_of_a_prefix_is_one_token_and_stays_one_after_saving(tmp_path, rows):
    tokenizer = train_tokenizer([row["code"] for row in rows], UNIXCODER, 400)
    [ids] = tokenize(tokenizer, ["def f"], UNIXCODER.code_prefix, 12)
    start = tokenizer.convert_tokens_to_ids(["<s>", "<encoder-only>", "</s>"])
    assert ids == [*start, *tokenizer("def f", add_special_tokens=False)["input_ids"], start[-1]]
    assert len(set(start)) == 3
    tokenizer.save_pretrained(tmp_path)
    texts = [UNIXCODER.code_prefix + row["docstring"] for row in rows]
    assert AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"] == tokenizer(texts)["input_ids"]


@pytest.mark.parametrize("lengths", [(40, 12), (12, 40)])
def test_the_longest_text_fits(tokenizer, profile, lengths):
    profile = profile.replace(query_length=lengths[0], code_length=lengths[1])
    model = random_model("32x1", tokenizer, profile).eval()
    ids = tokenize(tokenizer, ["def f(x): return x " * 30], max_length=40)
    assert len(ids[0]) == 40
    assert encode(model, profile, pad(ids, tokenizer.pad_token_id)).shape == (1, 32)


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_every_parameter_gets_a_gradient(tokenizer, profile, pooling):
    profile = profile.replace(pooling=pooling)
    model = random_model("32x2", tokenizer, profile)
    inputs = pad(tokenize(tokenizer, ["sort a list", "read"], max_length=32), tokenizer.pad_token_id)
    encode(model, profile, inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.isfinite(torch.cat([parameter.grad.flatten() for parameter in model.parameters()])).all()
