"""Additional evaluation sets: judged queries, and unusable folders."""

import json

import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets

pytestmark = pytest.mark.usefixtures("own_cache")


def load(folder, codebase=None, **arguments):
    arguments = DataArguments(eval_data_dir=str(folder), **({"language": "python"} | arguments))
    return [*load_evaluation_sets(arguments, EncoderProfile(), codebase).items()]


def written(folder, **files):
    """Writes files into a new folder: strings unchanged, other values as JSON."""
    folder.mkdir()
    for name, value in files.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def numbered(columns, *rows):
    return [dict(zip(columns, row, strict=True)) for row in rows]


def graded_rows(split):
    """Returns (query, url, query index, grade) for every relevant pair."""
    right = split.judgments.relevant.tocoo()
    return [
        (split.queries[query]["docstring"], split.corpus[code]["url"], query, grade)
        for query, code, grade in zip(right.row.tolist(), right.col.tolist(), right.data.tolist(), strict=True)
    ]


def judged(folder, *judgments):
    """Writes judgments as `relevance.jsonl` into a new folder."""
    lines = map(json.dumps, numbered(("query", "url", "relevance"), *judgments))
    return written(folder / "judged", **{"relevance.jsonl": "\n".join(lines)})


@pytest.fixture
def pool(rows):
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"query": "x", "url": "y"}', ["row 1: relevance is None"]),
        ('{"query": "x", "url": "y", "relevance": -1}', ["row 1: relevance is -1"]),
        ('{"query": "x", "url": "y", "relevance": NaN}', ["row 1: relevance is nan"]),
        ('{"query": 3, "url": "y", "relevance": 1}', ["row 1: expected a query and a url", "3 and 'y'"]),
        ('{"query": "x", "url": " ", "relevance": 1}', ["row 1: expected a query and a url", "'x' and ' '"]),
        ('{"query": "x", "url": "y", "relevance": 1}', ["no query has a relevant function"]),
    ],
)
def test_files_with_something_wrong(content, words, pool, tmp_path):
    (tmp_path / "relevance.jsonl").write_text(content)
    with refused(tmp_path, *words):
        load(tmp_path, pool)


def test_rows_of_another_project_several_folders_and_a_folder_s_own_codebase(tmp_path, data_dir, rows, pool):
    (tmp_path / "own").mkdir()
    own = judged(tmp_path / "own", ("sort", rows[0]["url"], 1))
    found = load(f"{own}, {data_dir}/", pool)
    assert [name for name, _ in found] == ["judged", data_dir.name]
    judgments = found[1][1].judgments
    assert (*judgments.relevant.shape, judgments.graded) == (4, 24, False)
    folder = judged(tmp_path, ("sort", rows[0]["url"], 1))
    (folder / "codebase.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    ((name, found),) = load(folder, pool)  # the folder has a codebase, too
    assert len(found.corpus) == 5


def test_judged_queries_have_the_mean_grade_of_each_code(tmp_path, rows, pool, capsys):
    url = [row["url"] for row in rows]
    folder = judged(
        tmp_path,
        ("sort  things", url[1], 1),
        ("sort things", url[0], 3),
        ("nothing fits", url[4], 0),
        ("write it", url[2], 2),
        ("sort things", url[1], 2),
        ("write it", "elsewhere", 3),
    )
    ((name, found),) = load(folder, pool)
    assert found.judgments.graded and name == "judged" and found.corpus is pool
    assert graded_rows(found) == [
        ("sort things", url[0], 0, 3.0),
        ("sort things", url[1], 0, 1.5),
        ("write it", url[2], 1, 2.0),
    ]
    assert not found.judgments.relevant.shape[0] > 2 and found.judgments.negatives is None
    said = capsys.readouterr().err
    assert "ignored 1 judged functions" in said
    assert "judged: 2 queries (test) and 24 functions" in said


def test_judged_queries_need_a_corpus(tmp_path):
    with refused("neither the folder nor the run has a codebase"):
        load(judged(tmp_path, ("x", "y", 1)))


def test_a_wrong_folder_is_told_what_was_looked_for(tmp_path):
    with refused("nowhere: no such folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "train.jsonl").touch()
    with refused("relevance.jsonl", "test.jsonl", "The folder contains train.jsonl"):
        load(tmp_path / "wrong")


def lines_of(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"codebase.jsonl": lines_of({"code": "x", "url": "u"})}, "rows: no rows of train, valid or test"),
        (
            {
                "relevance.jsonl": lines_of({"query": "x", "url": "u", "relevance": 1}),
                "codebase.jsonl": lines_of({"code": "x"}),
            },
            "relevance.jsonl refers to functions by url, but the codebase has no urls",
        ),
    ],
)
def test_a_missing_column_is_named(files, words, tmp_path):
    with refused(words):
        load(written(tmp_path / "rows", **files))


def test_options_name_the_columns(tmp_path):
    files = {"test.csv": "ask,reply\na,x\nb,y\n"}
    ((_, found),) = load(written(tmp_path / "rows", **files), query_column="ask", code_column="reply")
    assert (found.queries["docstring"][:], found.corpus["code"][:]) == (["a", "b"], ["x", "y"])


def test_two_sets_of_one_name_are_refused(tmp_path, data_dir, rows, pool):
    folder = judged(tmp_path, ("sort", rows[0]["url"], 1))
    with refused("another set is already called judged; rename"):
        load(f"{folder},{folder}", pool)
    with refused("another set is already called test; rename"):
        load(folder.rename(tmp_path / "test"), pool)
    with refused("another set is already called test-go; rename"):
        load((tmp_path / "test").rename(tmp_path / "test-go"), pool, language="go")
