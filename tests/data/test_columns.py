"""Finding the query, code and id columns among columns with any names."""

import json
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data import column_names
from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.holdout import PARTITION, REPOSITORIES
from soft_trainer.data.load import read_source, training_split
from soft_trainer.data.make_splits import Context
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data


@pytest.fixture
def answers(tmp_path):
    """A JSON Lines file with 200 questions and answers from 20 web pages."""
    rows = []
    for number in range(200):
        row = {"question": f"add {number}", "answer": f"x + {number}", "url": f"https://example.org/{number % 20}"}
        rows.append(row | {"number": number, "body": f"def f(x): return x + {number}"})
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_web_page_of_a_row_is_not_an_id(answers):
    splits = load_rows(answers)
    pairs = splits["test"].to_pairs()
    assert pairs["code"][:] == [query.replace("add", "x +") for query in pairs["docstring"]] and len(pairs) == 20
    assert splits["train"].judgments.relevant.nnz == 160


def test_a_named_column_is_the_id(answers):
    test = load_rows(answers, id_column="number")["test"]
    assert {*test.queries["url"]} <= set(map(str, range(200)))
    with refused("pages.jsonl, row 21", "url 'https://example.org/0' belongs to a different function in", "row 1"):
        load_rows(answers, id_column="url")
    with refused("id_column=name: no such column"):
        load_rows(answers, id_column="name")
    frame = pd.read_json(answers, lines=True).assign(number=["7", " ", *map(str, range(198))])
    with refused("the data frame, row 2: the id, column 'number', is missing or empty"):
        load_rows(frame, id_column="number")


@pytest.mark.parametrize("first", [2**63, 2**64 + 5, -(2**63) - 40, 10**30])
@pytest.mark.parametrize("form", ["list", "jsonl", "frame", "mixed"])
def test_ids_of_any_size_are_read(tmp_path, first, form):
    numbers = [7 if form == "mixed" and n == 0 else first + n for n in range(30)]
    rows = [{"query": f"adds {n}", "code": f"x + {n}", "key": number} for n, number in enumerate(numbers)]
    source = {"test": pd.DataFrame(rows) if form == "frame" else rows}
    if form == "jsonl":
        source = tmp_path / "test.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = load_rows(source, id_column="key")["test"]
    assert test.corpus["url"][:] == list(map(str, numbers))


def test_the_column_that_was_named_is_read_whatever_the_profile_prefers(answers, tmp_path):
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row | {"original_string": "other", "language": "python"}) + "\n" for row in rows]
    path.write_text("".join(lines))
    arguments = DataArguments(data_dir=str(path), query_column="question", code_column="body")
    train = load_data(arguments, PROFILES["graphcodebert"])["train"]
    assert "original_string" not in train.corpus.column_names
    assert all(code.startswith("def f(x)") for code in train.corpus["code"])


def test_rows_without_a_code_are_matched_by_url(tmp_path):
    train = [{"query": f"q{n}", "code": f"c{n}"} for n in range(4)]
    parts = {"train": train, "test": [{"query": "q", "url": "u2"}], "codebase": [{"code": "x", "url": "u2"}]}
    for name, rows in parts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = read_source(tmp_path, Context(needed=("train",)))["test"]
    assert test.queries["url"][:] == test.corpus["url"][:] == ["u2"]


def test_a_split_describes_its_content(answers):
    splits = load_rows(answers)
    test = splits["test"]
    assert list(splits) == ["train", "valid", "test"] and len(test) == 20 and len(test.corpus) == 40
    assert repr(test) == (
        "Split(20 queries, 40 functions, 20 pairs; queries: docstring ('question'), number, body, url; "
        "corpus: code ('answer'), number, body, url)"
    )
    pairs = test.to_pandas()
    assert pairs["docstring"].tolist() == test.queries["docstring"][:]
    number = pairs["docstring"].str.removeprefix("add ")
    assert (pairs["code"] == "x + " + number).all() and "grade" not in pairs


def test_python_s_rows_say_what_their_columns_were_called():
    rows = pd.DataFrame({"ask": ["a", "b"], "reply": ["x", "y"], "key": ["1", "2"], "bad": [["y"], ["z"]]})
    split = training_split(rows, "train_dataset", ColumnNames("ask", "reply", "key", negatives="bad"))
    assert "queries: docstring ('ask'), url ('key')" in repr(split)
    assert split.judgments.negatives.nnz == 2 and split.corpus["code"][:] == ["x", "y", "z"]


def test_a_wrong_pair_is_refused_and_negatives_have_the_names_of_sentence_transformers(capsys):
    rows = pd.DataFrame(
        {"anchor": ["a", "b"], "positive": ["f", "g"], "negative": ["h", None], "negative_1": ["g", ""]}
    )
    split = training_split(rows)
    assert split.corpus["code"][:] == ["f", "g", "h"]
    assert split.judgments.negatives.nonzero()[1].tolist() == [1, 2]
    assert "train_dataset: reading hard negatives in negative, negative_1\n" in capsys.readouterr().err
    for labels in (["1", "0"], [True, False], [0.9, 0.1], ["True", "False"]):
        with refused(f"column 'label' is {labels[1] if labels[0] != 0.9 else 0.9}"):
            training_split(rows.assign(label=labels))
    training_split(rows.assign(label=["bug", "feature"], score=[3, -1]))
    assert "ignoring column 'score'" in capsys.readouterr().err


# ---- Lists ----


def with_several(number: int = 20) -> list[dict]:
    """Returns rows with two positives and two negatives each. Their repositories decide the splits."""
    rows = []
    for n in range(number):
        positives = [f"x + {n}", f"add(x, {n})"]
        negatives = [f"x - {n}", "x + 0" if n else "x * 0"]  # `x + 0` is a positive of row 0
        rows.append({"query": f"adds {n}", "pos": positives, "neg": negatives, "repo": f"r{n % 10}"})
    return rows


@pytest.mark.parametrize("kind", ["list", "frame", "rows.jsonl", "rows.parquet"])
def test_a_list_of_positives_is_several_relevant_codes_of_one_query(tmp_path, kind, capsys):
    rows = with_several()
    source = {"list": rows, "frame": pd.DataFrame(rows)}.get(kind, tmp_path / kind)
    if kind == "rows.jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "rows.parquet":
        pd.DataFrame(rows).to_parquet(source)
    splits = load_rows(source)
    assert "reading queries from column 'query' and functions from 'pos'" in capsys.readouterr().err
    assert sum(map(len, splits.values())) == 20
    for split in splits.values():
        codes = split.corpus["code"]
        assert len(split.judgments) == 2 * len(split) and "query_row" not in split.corpus.column_names
        for query, relevant in zip(split.queries["docstring"], split.judgments.relevant, strict=True):
            number = query.removeprefix("adds ")
            assert {codes[code] for code in relevant.indices} == {f"x + {number}", f"add(x, {number})"}
            assert relevant.data.tolist() == [1, 1]


def test_negatives_of_rows_with_several_positives_belong_to_the_query():
    split = training_split(with_several(3))
    codes = split.corpus["code"]
    assert split.queries["docstring"][:] == ["adds 0", "adds 1", "adds 2"]
    assert split.judgments.pairs().tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [2, 4], [2, 5]]
    named = [sorted(codes[code] for code in row.indices) for row in split.judgments.negatives]
    assert named == [["x * 0", "x - 0"], ["x + 0", "x - 1"], ["x + 0", "x - 2"]]


def test_a_code_that_two_positives_name_is_ranked_once():
    rows = [{"query": f"adds {n}", "positives": ["sum(x)", f"x + {n}"]} for n in range(4)]
    splits = load_rows({"train": rows[:2], "test": rows[2:]})
    assert splits["test"].corpus["code"][:] == ["sum(x)", "x + 2", "x + 3"]
    assert splits["test"].judgments.relevant.toarray().tolist() == [[1, 1, 0], [1, 0, 1]]


LISTS = [
    ({"query": "a", "code": ["x", "y"]}, {}, "column 'code' contains lists of text"),
    ({"query": ["a", "b"], "code": "x"}, {}, "column 'query' contains lists of text"),
    (
        {"query": "a", "lines": ["x", "y"]},
        {"query_column": "query", "code_column": "lines"},
        "column 'lines' contains lists of text",
    ),
    ({"query": "a", "pos": []}, {}, "row 1: column 'pos' is missing or empty"),
    ({"query": "a", "pos": ["x", None]}, {}, "row 1: column 'pos' contains ['x', None]; expected text"),
]


@pytest.mark.parametrize(("row", "options", "message"), LISTS)
def test_other_lists_are_refused(row, options, message):
    with refused(message):
        load_rows({"train": [row, row]}, **options)


def test_lists_of_tokens_stay_tokens():
    row = {"docstring_tokens": ["adds", "two numbers"], "code_tokens": ["x", "+", "y"]}
    split = training_split([row])
    assert split.corpus["code_tokens"][:] == [["x", "+", "y"]] and len(split.judgments) == 1
    split = training_split([{"q": "a", "my_tokens": ["x", "y z"]}], "rows", ColumnNames("q", "my_tokens"))
    assert split.corpus["code_tokens"][:] == [["x", "y z"]]


# ---- Unused columns ----

UNUSED = [
    ({"query": "a", "code": "x", "wrong_negatives": ["y"]}, ["wrong_negatives"]),
    ({"query": "a", "code": "x", "hard_negatives": ["y"], "hard_negative_1": "z"}, []),
    ({"query": "a", "code": "x", "codes": "y", "Negative": "z"}, ["codes", "Negative"]),
    ({"query": "a", "code": "x", "positive_2": "y", "text": "z"}, ["positive_2", "text"]),
    ({"docstring": "a", "code": "x", "pos": ["y"]}, ["pos"]),
    ({"query": "a", "code": "x", "repo": "r", "path": "p.py", "language": "python", "url": "u"}, []),
    ({"query": "a", "code": "x", "negative": "y", "negative_7": "z"}, []),
]


@pytest.mark.parametrize("kind", ["list", "folder"])
@pytest.mark.parametrize(("row", "unused"), UNUSED)
def test_unused_columns_that_look_like_recognised_ones_are_named(tmp_path, capsys, kind, row, unused):
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    read_source({"train": [row]} if kind == "list" else tmp_path, Context(needed=("train",)))
    said = [line for line in capsys.readouterr().err.splitlines() if "not using" in line]
    assert len(said) == bool(unused)
    if unused:
        assert f": not using {', '.join(map(repr, unused))}; the recognised columns are docstring, " in said[0]


def test_the_page_lists_the_names_that_are_read():
    answers = {}
    for query, code in column_names.PAIRS:
        answers.setdefault(query, []).append(code)
    sides = [((query,), codes) for query, codes in answers.items()]
    sides.append((column_names.QUERY_COLUMNS, column_names.CODE_COLUMNS))
    groups = [(*column_names.NEGATIVE_NAMES, "negative_2"), ("url",), ("language", "path")]
    groups.insert(1, (column_names.SCORES, *chain.from_iterable(column_names.SCORES_OF)))
    groups += [(*REPOSITORIES, PARTITION), column_names.LABELS]
    quoted = [" with ".join(", ".join(map("`{}`".format, names)) for names in side) for side in sides]
    quoted += [", ".join(map("`{}`".format, names)) for names in groups]
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = page.split("| column | meaning |\n|:--|:--|\n")[1].split("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ").removesuffix(" ...") for line in table.splitlines()] == quoted
