"""Additional evaluation sets: published files, judged queries, and unusable folders."""

import gzip
import json

import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets

pytestmark = pytest.mark.usefixtures("own_cache")

CODES = {
    'def largest(xs):\n    """Find it."""\n    return max(xs)': 0,
    "def smallest(xs):\n    return min(xs)": 2,
    "def total(xs):\n    return sum(xs)": 1,
}
QUERIES = [
    {"idx": "cosqa-train-1", "doc": "python  sum of a list", "retrieval_idx": 1, "label": 1},
    {"idx": "cosqa-train-2", "doc": "largest number python", "retrieval_idx": 0, "label": 1},
]
COSQA_FILES = ("code_idx_map.txt", "cosqa-retrieval-dev-500.json")
JUDGED_FILES = ("relevance.jsonl", "annotationStore.csv")
PLUS_FILES = ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs_true.json")


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


@pytest.fixture
def cosqa(tmp_path):
    """A folder with CoSQA's files, uncompressed as published."""
    return written(tmp_path / "cosqa", **{COSQA_FILES[0]: CODES, COSQA_FILES[1]: QUERIES})


def judged(folder, *judgments):
    """Writes judgments as `relevance.jsonl` into a new folder."""
    lines = map(json.dumps, numbered(("query", "url", "relevance"), *judgments))
    return written(folder / "judged", **{"relevance.jsonl": "\n".join(lines)})


@pytest.fixture
def pool(rows):
    return Dataset.from_list(rows)


def test_cosqa_gzipped_and_with_both_parts(cosqa):
    codes = cosqa / COSQA_FILES[0]
    (cosqa / "code_idx_map.json.gz").write_bytes(gzip.compress(codes.read_bytes()))
    codes.unlink()
    (cosqa / "cosqa-retrieval-test-500.json").write_text(json.dumps(QUERIES[:1]))
    (cosqa / "cosqa-retrieval-train-19604.json").write_text(json.dumps(QUERIES[:1]))
    both = load(cosqa)
    assert [(name, len(split.queries)) for name, split in both] == [("cosqa-dev", 2), ("cosqa-test", 1)]
    assert both[0][1].corpus is both[1][1].corpus


@pytest.fixture
def cosqa_plus(tmp_path):
    """A folder with CoSQA+'s files. The three queries have two, one and no relevant codes."""
    queries = numbered(("query-idx", "query"), *enumerate([*(row["doc"] for row in QUERIES), "nothing"]))
    codes = numbered(("code", "code-idx"), *CODES.items())
    pairs = [(0, 1, 1), (1, 0, 1), (0, 2, 1), (0, 1, 1), (77, 0, 1), (1, 1, 0), (1, 99, 1)]
    pairs = numbered(("query-idx", "code-idx", "label"), *pairs)
    return written(tmp_path / "plus", **dict(zip(PLUS_FILES, (queries, codes, pairs), strict=True)))


def test_cosqa_plus_has_several_right_codes_for_a_query(cosqa_plus, capsys):
    ((name, found),) = load(cosqa_plus)
    assert name == "plus" and found.judgments.gain == "linear" and len(found.corpus) == 3
    assert graded_rows(found) == [
        ("python  sum of a list", "2", 0, 1.0),
        ("python  sum of a list", "1", 0, 1.0),
        ("largest number python", "0", 1, 1.0),
    ]
    printed = capsys.readouterr().err
    assert "ignored 1 judged functions that are not in the corpus, and skipped 1 of 3 queries" in printed


def test_cosqa_does_not_hide_cosqa_plus(cosqa, cosqa_plus):
    for path in cosqa.iterdir():
        (cosqa_plus / path.name.replace("-dev", "-test")).write_bytes(path.read_bytes())
    with refused("both CoSQA and CoSQA+ have test queries"):
        load(cosqa_plus)


def test_cosqa_plus_reads_files_of_one_set_of_names(cosqa_plus):
    expected = graded_rows(*dict(load(cosqa_plus)).values())
    others = [cosqa_plus / "query.json", cosqa_plus / "gpt4o_augment_query_code_pairs_for_search.json"]
    for path in others:
        path.write_text("[]")
    assert graded_rows(*dict(load(cosqa_plus)).values()) == expected
    for path in others:
        path.unlink()
    # The first published file names, gzipped, with irrelevant pairs.
    names = ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs.json")
    for published, first in zip(PLUS_FILES, names, strict=True):
        (cosqa_plus / f"{first}.gz").write_bytes(gzip.compress((cosqa_plus / published).read_bytes()))
        (cosqa_plus / published).unlink()
    assert graded_rows(*dict(load(cosqa_plus)).values()) == expected


@pytest.mark.parametrize(
    ("files", "number", "content", "words"),
    [
        ("cosqa", 0, None, ["CoSQA also needs code_idx_map.txt"]),
        ("cosqa", 1, None, ["CoSQA also needs cosqa-retrieval-dev*.json"]),
        ("cosqa", 0, "{", ["code_idx_map.txt: not valid JSON"]),
        ("cosqa", 0, "[]", ["code_idx_map.txt: expected a mapping, not []"]),
        ("cosqa", 0, "{}", ["code_idx_map.txt: no rows"]),
        ("cosqa", 0, '{"a": 1, "b": 0, "c": 0}', ["code_idx_map.txt: two functions have the same number"]),
        ("cosqa", 1, "[]", ["no rows"]),
        ("cosqa", 1, '[{"doc": 3, "retrieval_idx": 0}]', ["entry 1", "not in the published format"]),
        ("cosqa", 1, '[{"doc": "x", "retrieval_idx": 0, "label": 0}]', ["no query has a relevant function"]),
        ("cosqa", 1, '[{"doc": "x", "retrieval_idx": 9}]', ["entry 1: retrieval_idx 9 is not in code_idx_map"]),
        ("cosqa", 1, '[{"doc": " ", "retrieval_idx": 0}]', ["entry 1: the query is blank"]),
        ("cosqa_plus", 0, None, ["CoSQA+ also needs", PLUS_FILES[0]]),
        ("cosqa_plus", 0, '[{"query-idx": 0, "query": null}]', ["entry 1: query is None, expected a string"]),
        ("cosqa_plus", 1, "[]", [f"{PLUS_FILES[1]}: no rows"]),
        ("cosqa_plus", 1, '[{"code-idx": 1, "code": "a"}, {"code-idx": 1, "code": "b"}]', ["the same code-idx"]),
        (
            "cosqa_plus",
            2,
            '[{"query-idx": 0, "code-idx": 1, "label": 0}]',
            ["none of 3 queries has a relevant function"],
        ),
        ("tmp_path", 0, '{"query": "x", "url": "y"}', ["row 1: not in the published format: KeyError('relevance')"]),
        ("tmp_path", 0, '{"query": "x", "url": "y", "relevance": -1}', ["row 1: relevance is -1"]),
        ("tmp_path", 0, '{"query": "x", "url": "y", "relevance": 5000}', ["row 1: relevance is 5000", "0 to 1000"]),
        ("tmp_path", 0, '{"query": "x", "url": "y", "relevance": NaN}', ["row 1: relevance is nan"]),
        (
            "tmp_path",
            0,
            '{"query": 3, "url": "y", "relevance": 1}',
            ["row 1: not in the published format: AttributeError"],
        ),
        ("tmp_path", 0, '{"query": "x", "url": " ", "relevance": 1}', ["row 1: query 'x' or url ' ' is blank"]),
        ("tmp_path", 0, '{"query": "x", "url": "y", "relevance": 1}', ["none of 1 queries", "in the corpus of 24"]),
        ("tmp_path", 1, "Language,Query,GitHubUrl\nPython,sort,somewhere\n", ["row 1", "'Relevance'"]),
    ],
)
def test_files_with_something_wrong(files, number, content, words, pool, request):
    folder = request.getfixturevalue(files)
    path = folder / {"cosqa": COSQA_FILES, "cosqa_plus": PLUS_FILES, "tmp_path": JUDGED_FILES}[files][number]
    path.unlink() if content is None else path.write_text(content)
    with refused(folder, *words):
        load(folder, pool)


def test_rows_of_another_project_several_folders_and_a_folder_s_own_codebase(cosqa, tmp_path, data_dir, rows, pool):
    found = load(f"{cosqa}, {data_dir}/")
    assert [name for name, _ in found] == ["cosqa", data_dir.name]
    judgments = found[1][1].judgments
    assert (*judgments.relevant.shape, judgments.gain) == (4, 24, None)
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
    assert found.judgments.gain == "linear" and name == "judged" and found.corpus is pool
    assert graded_rows(found) == [
        ("sort things", url[0], 0, 3.0),
        ("sort things", url[1], 0, 1.5),
        ("write it", url[2], 1, 2.0),
    ]
    assert not found.judgments.relevant.shape[0] > 2 and found.judgments.negatives is None
    said = capsys.readouterr().err
    assert "ignored 1 judged functions" in said and "1 of 3 queries" in said
    assert "judged: 2 queries (test) and 24 functions" in said


def test_codesearchnet_annotations_of_one_language(tmp_path, rows, pool):
    url = [row["url"] for row in rows]
    (tmp_path / "annotationStore.csv").write_text(
        "Language,Query,GitHubUrl,Relevance,Notes\n"
        f'Python,Sort a List,{url[0]},3,"a comma, and ""quotes"" in\na note"\n'
        f"Python,sort a list,{url[0]},2,\n"
        f"Python,sort a list,{url[3]},1,\n"
        f"Go,sort a list,{url[2]},3,\n"
    )
    ((name, found),) = load(tmp_path, pool)
    assert graded_rows(found) == [("sort a list", url[0], 0, 2.5), ("sort a list", url[3], 0, 1.0)]
    assert found.judgments.gain == "exponential"
    ((_, both),) = load(tmp_path, pool, language="go,python")
    assert [number for _, _, number, _ in graded_rows(both)] == [0, 0, 1]
    with pytest.raises(UserError, match="none of 0 queries .* the run's language"):
        load(tmp_path, pool, language="ruby")


def test_judged_queries_need_a_corpus(tmp_path):
    with refused("neither the folder nor the run has a codebase"):
        load(judged(tmp_path, ("x", "y", 1)))


def test_a_wrong_folder_is_told_what_was_looked_for(tmp_path):
    with refused("nowhere: no such folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "train.jsonl").touch()
    names = ("cosqa-retrieval-dev", "code_idx_map.txt", "annotationStore.csv", "relevance.jsonl", "test.jsonl")
    with refused(*names, "The folder contains train.jsonl"):
        load(tmp_path / "wrong")


def test_two_files_of_one_part_and_two_sets_of_one_name_are_refused(cosqa, tmp_path):
    with refused("another set is already called cosqa; rename"):
        load(f"{cosqa},{cosqa}")
    with refused("another set is already called test"):
        load(cosqa.rename(tmp_path / "test"))
    (tmp_path / "test/cosqa-retrieval-dev-99.json").write_text(json.dumps(QUERIES[:1]))
    with refused("cosqa-retrieval-dev-500.json and cosqa-retrieval-dev-99.json both contain rows of valid"):
        load(tmp_path / "test")


def test_a_set_is_not_called_like_the_test_of_a_source(cosqa, tmp_path, data_dir):
    (tmp_path / "own").mkdir()
    with refused("another set is already called test-own; rename"):
        load(cosqa.rename(tmp_path / "test-own"), data_dir=f"{data_dir},{tmp_path / 'own'}")


def test_one_reader_of_json_names_what_it_cannot_read(cosqa):
    codes = cosqa / COSQA_FILES[0]
    with gzip.open(f"{codes}.gz", "wt") as file:
        json.dump(CODES, file)
    codes.unlink()
    (cosqa / COSQA_FILES[1]).write_bytes(b'[{"doc": "caf\xe9"}]')
    with refused(f"{COSQA_FILES[1]}, line 1: cannot be read in UTF-8", "save it as UTF-8"):
        load(cosqa)
    (cosqa / f"{COSQA_FILES[0]}.gz").write_bytes(b"\x1f\x8b no gzip")
    with refused(f"{COSQA_FILES[0]}.gz: cannot be read: "):
        load(cosqa)


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


def test_half_of_a_pair_of_code_units_is_replaced(cosqa):
    (cosqa / COSQA_FILES[1]).write_text(json.dumps([QUERIES[0] | {"doc": "cut \ud83d"}]))
    ((name, found),) = load(cosqa)
    assert found.queries["docstring"][:] == ["cut ?"]
