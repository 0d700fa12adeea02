"""Token columns: sliced, joined and selected rows, padding, and pickling."""

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from refusals import refused

from soft_trainer.data import tokens
from soft_trainer.data.columns import row_texts, text_column
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.tokens import TokenColumn, token_column, tokenized
from soft_trainer.encoders.encoding import pad, tokenize
from soft_trainer.encoders.profiles import EncoderProfile


def lists(column: TokenColumn) -> list[list[int]]:
    return [column[row].tolist() for row in range(len(column))]


# ---- Ragged columns ----

RAGGED = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10]]


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows,
        lambda rows: rows.select(range(1, 4)),
        lambda rows: concatenate_datasets([rows.select(range(3, 5)), rows, rows.select(range(2))]),
        lambda rows: rows.select([]),
    ],
    ids=["whole", "slice", "several chunks", "no rows"],
)
def test_a_column_of_a_data_set_is_that_of_its_view(view):
    rows = view(Dataset.from_dict({"ids": RAGGED}))
    column = TokenColumn(rows, "ids")
    assert lists(column) == rows["ids"][:]
    assert column.lengths.tolist() == [len(ids) for ids in rows["ids"]]


def test_a_column_on_disk_pickles_as_its_path(tmp_path):
    """Data workers that are not forked receive the column as a pickle."""
    lists_of_ids = [list(range(row % 60)) for row in range(5000)]
    Dataset.from_dict({"ids": lists_of_ids, "other": ["x" * 50] * 5000}).save_to_disk(tmp_path)
    rows = load_from_disk(tmp_path)
    views = {"whole": rows, "slice": rows.select(range(100, 4900)), "joined": concatenate_datasets([rows, rows])}
    for view in views.values():
        column = TokenColumn(view, "ids")
        data = pickle.dumps(column)
        assert len(data) < 20_000
        copy = pickle.loads(data)
        assert lists(copy) == view["ids"][:] and copy.lengths.tolist() == column.lengths.tolist()


@pytest.mark.slow
def test_graphs_on_disk_pickle_as_their_path(write_folder, rows, tokenizer):
    many = [row | {"code": f"{row['code']} + {number}"} for number in range(100) for row in rows]
    train = load_folder(write_folder(train=many))["train"]
    graphs = token_column(train, "code", EncoderProfile(data_flow_length=8, code_columns=("code",)), tokenizer)
    data = pickle.dumps(graphs)
    copy = pickle.loads(data)
    assert len(data) < 20_000 and len(copy) == len(many) and copy.lengths.tolist() == graphs.lengths.tolist()
    for row in (0, 700, 2399):
        ours, theirs = ({name: ids.tolist() for name, ids in each[row].items()} for each in (copy, graphs))
        assert ours == theirs


def test_code_without_a_language_is_not_parsed(dataset, tokenizer):
    with refused("no column 'language', which an encoder with data flow needs"):
        token_column(dataset.remove_columns("language"), "code", EncoderProfile(data_flow_length=8), tokenizer)


# ---- Padding ----


def test_padding_is_to_the_longest_on_the_right():
    batch = pad([[5, 6, 7], [8], [9, 1]], pad_token_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1], [9, 1, 1]]
    # The text's last token has the same id as padding, and still counts.
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    batch = pad([[5, 6, 7], [8, 9]], pad_token_id=0, prompt_length=1)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["pooling_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]  # without the prompt


# ---- Choice of column and text ----


def test_the_first_column_that_exists_is_read_and_its_tokens_joined_by_one_space():
    rows = Dataset.from_dict({"docstring": ["a"], "title": ["b"]})
    assert text_column(rows, ("docstring_tokens", "docstring", "title"), "query") == "docstring"
    assert text_column(rows, ("title", "docstring"), "query") == "title"
    with refused("title", "docstring_tokens or summary", "query_column"):
        text_column(rows, ("docstring_tokens", "summary"), "query")


@pytest.mark.parametrize(
    "values, texts",
    [
        (["as it  is", "", None], ["as it  is", "", ""]),
        ([["sort", "a", "list"], [], None, ["é", ""]], ["sort a list", "", "", "é "]),
    ],
)
def test_a_text_is_as_it_is_and_tokens_are_joined_by_one_space(values, texts):
    order = np.random.default_rng(0).permutation(len(values) * 1500)
    rows = Dataset.from_dict({"text": values * 1500})
    assert list(row_texts(rows, "text")) == texts * 1500
    assert list(row_texts(rows.select(order), "text")) == [texts[row % len(texts)] for row in order]


# ---- Tokenised data sets ----


@pytest.mark.parametrize("longest", [6, 12, 200])
@pytest.mark.parametrize("side, column", [("query", "docstring_tokens"), ("code", "code_tokens")])
def test_ids_are_the_tokenizers_and_length_is_before_the_cut(dataset, tokenizer, profile, side, column, longest):
    found = tokenized(dataset, side, profile.replace(**{f"{side}_length": longest}), tokenizer)
    for row, words in zip(found, dataset[column], strict=True):
        whole = tokenizer(" ".join(words))["input_ids"]
        assert row["length"] == len(whole)
        cut = whole if len(whole) <= longest else [*whole[: longest - 1], tokenizer.eos_token_id]
        assert row["ids"] == cut


def test_a_prefix_stands_before_every_text(dataset, tokenizer, profile):
    found = tokenized(dataset, "query", profile.replace(query_prefix="sort a ", query_length=64), tokenizer)
    assert found[3]["ids"] == tokenizer("sort a " + dataset[3]["docstring"])["input_ids"]


def test_a_shuffled_or_chosen_view_keeps_its_order(dataset, tokenizer, profile):
    whole = tokenized(dataset, "code", profile, tokenizer)["ids"][:]
    chosen = tokenized(dataset.select([7, 2, 19]), "code", profile, tokenizer)
    assert lists(TokenColumn(chosen, "ids")) == [whole[7], whole[2], whole[19]]
    shuffled = dataset.shuffle(seed=3)
    again = tokenized(shuffled, "code", profile, tokenizer)
    positions = [dataset["url"][:].index(url) for url in shuffled["url"]]
    assert lists(TokenColumn(again, "ids")) == [whole[position] for position in positions]
    assert positions != sorted(positions)


@pytest.mark.parametrize("on_disk", [True, False])
def test_several_processes_give_the_ids_of_one(write_folder, rows, tokenizer, profile, monkeypatch, on_disk):
    many = [row | {"docstring_tokens": [*row["docstring_tokens"], str(number)]} for number, row in enumerate(rows * 5)]
    train = load_folder(write_folder(train=many), ["train"])["train"] if on_disk else Dataset.from_list(many)
    expected = tokenize(tokenizer, [" ".join(row["docstring_tokens"]) for row in many], "", profile.query_length)
    monkeypatch.setattr(tokens, "processes_for", lambda rows, least: 2)
    column = token_column(train, "query", profile, tokenizer)
    assert lists(column) == expected
    assert lists(pickle.loads(pickle.dumps(column))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("side", ["query", "code"])
def test_several_processes_tokenise_rows_that_were_joined_side_by_side(rows, tokenizer, profile, monkeypatch,
                                                                       tmp_path, side):  # fmt: skip
    Dataset.from_list(rows * 20).to_parquet(tmp_path / "rows.parquet")
    train = Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    queries = ["docstring", "docstring_tokens"]
    pairs = concatenate_datasets([train.select_columns(queries), train.remove_columns(queries)], axis=1)
    monkeypatch.setattr(tokens, "cached_dataset", lambda made_from, build: build(None))
    monkeypatch.setattr(tokens, "processes_for", lambda rows, least: 2)
    column = {"query": "docstring_tokens", "code": "code_tokens"}[side]
    texts = [" ".join(row[column]) for row in rows * 20]
    expected = tokenize(tokenizer, texts, "", getattr(profile, f"{side}_length"))
    assert tokenized(pairs, side, profile, tokenizer)["ids"][:] == expected
