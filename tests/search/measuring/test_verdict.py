import json
import math
import sys
import textwrap
import time
from functools import partial

import pytest
from git_repositories import FOLDER, Repository, function, grown
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.cli.search_measured import _answers
from soft_trainer.errors import UserError
from soft_trainer.mining.history import history_language
from soft_trainer.search import CodeIndex
from soft_trainer.search.measuring import verdict
from soft_trainer.search.measuring.judged import Measures, history_queries, measures, read_queries, score_search
from soft_trainer.search.measuring.verdict import ExternalSearch, Verdict

LOG3, LOG5 = math.log2(3), math.log2(5)
WORDS = ["lantern", "harbour", "meadow", "thimble", "orchard"]


def repository_of_words(path):
    """Makes a repository whose functions contain words that commits mention. The newest commits change two of them."""
    repository, numbers = Repository(path), [0] * 5

    def files():
        bodies = [function(f"f{i}", f"{word} = {numbers[i]}") for i, word in enumerate(WORDS)]
        return {"kit/one.py": "".join(bodies[:3]), "kit/two.py": "".join(bodies[3:])}

    repository.commit("Start with five functions of words", files())
    for number in range(20):
        position = number % 2 if number >= 15 else number % 5
        numbers[position] = 1000 + number
        repository.commit(f"Set the {WORDS[position]} to the number {number}", files())
    return repository


def test_the_newest_commits_are_queries_to_the_tree_before_them(tmp_path):
    repository_of_words(tmp_path / "repo")
    queries, mined = history_queries(tmp_path / "repo", None, tmp_path / "tree")
    assert [(query.query, *query.targets) for query in queries] == [
        ("Set the harbour to the number 19", "kit/one.py#f1"),
        ("Set the lantern to the number 18", "kit/one.py#f0"),
        ("Set the harbour to the number 17", "kit/one.py#f1"),
    ]
    assert mined.spans["kit/one.py#f1"] == ("kit/one.py", 6, 8)
    text = (tmp_path / "tree/kit/one.py").read_text()
    assert "lantern = 1016" in text and "harbour = 1015" in text
    index = CodeIndex.build(tmp_path / "tree", tmp_path / "index")
    found = score_search(queries, mined, partial(index.search, lexical=True, commits=False))
    index.close()
    assert found["files"] == [Measures(1.0, 1.0, 1.0)] * 3
    assert found["functions"] == [Measures(1.0, 1.0, 1.0)] * 3


@pytest.mark.parametrize(
    ("ranked", "targets", "expected"),
    [
        ("abc", "a", Measures(1.0, 1.0, 1.0)),
        ("bbca", "a", Measures(1 / 3, 0.5, 1.0)),
        ("bc", "a", Measures(0.0, 0.0, 0.0)),
        ("bacd", "ad", Measures(0.5, (1 / LOG3 + 1 / LOG5) / (1 + 1 / LOG3), 1.0)),
        ("bcdefghijklma", "a", Measures(1 / 13, 0.0, 0.0)),
    ],
)  # fmt: skip
def test_measures_by_hand(ranked, targets, expected):
    found = measures(dict.fromkeys(ranked), frozenset(targets))
    assert [found.mrr, found.ndcg, found.recall] == pytest.approx([expected.mrr, expected.ndcg, expected.recall])
    assert measures("aab", frozenset("ab")).ndcg == pytest.approx(1.5 / (1 + 1 / LOG3))  # a repeat takes up a rank


def test_the_command_prints_files_and_functions(tmp_path, capsys):
    repository_of_words(tmp_path / "repo")
    run_command(["evaluate-search", "--history", str(tmp_path / "repo"), "--output", str(tmp_path / "out.jsonl")])
    out = capsys.readouterr().out
    lines = [line.split("|")[1:7] for line in out.splitlines() if line.startswith(("| level", "| files", "| func"))]
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header[:2] == ["level", "search by"]
    assert rows == [
        [level, name, "3", mrr, "1.000", against]
        for level in ("files", "functions")
        for name, mrr, against in (
            ("words", "1.000", ""),
            ("words + memory", "1.000", "+0.000 (+0.000 to +0.000)"),
        )
    ]
    assert out.splitlines()[-1] == (
        "Does commit memory help? It makes no difference: MRR of functions +0.000 (+0.000 to +0.000)."
    )
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first["reciprocal_ranks"]["words"] == 1.0 and first["functions"] == ["kit/one.py#f1"]
    with pytest.raises(UserError, match="give one of --queries .*--folder or --history"):
        run_command(["evaluate-search", "--history", "x", "--folder", "y"])
    for option in ("--language", "--external"):
        with pytest.raises(UserError, match="no effect without --history"):
            run_command(["evaluate-search", option, "go", "--folder", "y"])


def verdict_of(models=(), **ranks):
    """Returns a verdict whose systems have these reciprocal ranks."""
    measured = {
        name.replace("_", " + "): {
            level: [Measures(rank, 0.0, 0.0) for rank in own] for level in ("files", "functions")
        }
        for name, own in ranks.items()
    }
    return Verdict([None] * len(ranks["words"]), "c" * 40, measured, [], models)


@pytest.mark.parametrize(
    ("memory", "answer"),
    [
        ([0.5] * 40, "Does commit memory help? Yes: MRR of functions +0.100 (+0.100 to +0.100)."),
        ([0.1, 1.0] * 3, "Does commit memory help? 6 queries are too few to tell: MRR of functions +0.150 ("),
        ([0.1] * 10, "Does commit memory help? No, it finds less: MRR of functions -0.300 ("),
        ([0.1] * 9, "Does commit memory help? 9 queries are too few to tell: MRR of functions -0.300 ("),
        ([0.4] * 6, "Does commit memory help? It makes no difference: MRR of functions +0.000 ("),
    ],
)
def test_whether_memory_helps(memory, answer):
    (line,) = _answers(verdict_of(words=[0.4] * len(memory), words_memory=memory))
    assert line.startswith(answer)


def test_each_step_is_compared_with_the_step_before_it():
    ranks = {"words": [0.1] * 12, "words_memory": [0.2] * 12, "base_memory": [0.6] * 12, "mine_memory": [0.5] * 12}
    memory, encoder, training = _answers(verdict_of(("base", "mine"), **ranks))
    assert memory.startswith("Does commit memory help? Yes: MRR of functions +0.100")
    assert encoder.startswith("Does base add to words and memory? Yes: MRR of functions +0.400")
    assert training.startswith("Does mine find more than base, the previous model? No, it finds less: MRR")
    assert "list the encoder before training first" in _answers(verdict_of(("mine",), **ranks))[-1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"relevant": "a.py"}, "queries.jsonl, row 2: relevant='a.py': expected a list of paths"),
        ({"relevant": ["a.py"], "secondary": [1]}, "queries.jsonl, row 2: secondary=[1]: expected a list of paths"),
        ({"relevant": []}, "queries.jsonl, row 2: relevant=[]: expected at least one path"),
        ({}, "queries.jsonl, row 2: expected a judged query with repo, query and relevant: 'relevant'"),
        ({"relevant": ["a.py"], "query": 5}, "queries.jsonl, row 2: query=5: expected a non-empty string"),
        ({"relevant": ["a.py"], "query": " "}, "queries.jsonl, row 2: query=' ': expected a non-empty string"),
        ({"relevant": ["a.py"], "repo": ["a"]}, "queries.jsonl, row 2: repo=['a']: expected a non-empty string"),
        ({"relevant": ["a.py"], "repo": "../a"}, "row 2: repo='../a': expected the name of a folder inside the trees"),
        ({"relevant": ["a.py"], "repo": "/a"}, "row 2: repo='/a': expected the name of a folder inside the trees"),
    ],
)
def test_a_query_without_a_text_or_a_list_of_paths_is_refused(tmp_path, row, message):
    rows = [{"repo": "a", "query": "one", "relevant": ["a.py"]}, {"repo": "a", "query": "two"} | row]
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with refused(message):
        read_queries(path)


def test_commits_after_the_cut_do_not_vote(tmp_path, monkeypatch):
    repository_of_words(tmp_path / "repo")
    read = []
    monkeypatch.setattr(verdict.CodeIndex, "remember", lambda self, *_, **given: read.append(given))
    found = verdict.compare_searches(tmp_path / "repo")
    assert [given.get("tip") for given in read] == [None, found.cut]
    index = CodeIndex.build(tmp_path / "repo")
    monkeypatch.undo()
    index.remember(repository=str(tmp_path / "repo"), tip=found.cut)
    subjects = [subject for (subject,) in index.database.execute("SELECT subject FROM commits")]
    assert len(subjects) == 18 and "Set the lantern to the number 16" in subjects
    assert not any(query.query in subjects for query in found.queries)


def external(tmp_path, body, words="{query}"):
    """Returns the search function of a program with this body, which runs in `tmp_path`."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(body))
    return partial(ExternalSearch(f"{sys.executable} {program} {words}").search, str(tmp_path))


@pytest.mark.slow
def test_another_program_is_a_search(tmp_path):
    body = """
        import os, sys
        assert sys.argv[1:] == ["one", "a'; touch stolen; $(touch stolen)"], sys.argv
        print(f"./kit/one.py:7:def f\\n{os.getcwd()}/kit/two.py:3\\n\\nkit/three.py")
        """
    search = external(tmp_path, body, "one {query}")
    assert search("a'; touch stolen; $(touch stolen)") == [
        ("kit/one.py", 7, 7), ("kit/two.py", 3, 3), ("kit/three.py", 0, 0),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", ["import sys; print('a.py'); sys.exit(2)", "import time; print('a.py', flush=True); time.sleep(60)"]
)
def test_a_program_that_fails_or_hangs_finds_nothing_and_is_counted(tmp_path, monkeypatch, body):
    monkeypatch.setattr(verdict, "SECONDS", 0.5)
    search = ExternalSearch(f"{sys.executable} -c '{body.replace(chr(39), chr(34))}' {{query}}")
    started = time.monotonic()
    assert search.search(str(tmp_path), "words\0of a query") == [] and search.failures == 1
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rg words", r"must contain \{query\}"),
        ("no_such_program_here {query}", "program .no_such_program_here. not found"),
        ("rg '{query}", "No closing quotation"),
        ("", r"must contain \{query\}"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused_first(command, message):
    with pytest.raises(UserError, match=message):
        ExternalSearch(command)


def test_the_language_is_that_of_most_files(tmp_path):
    repository = grown(tmp_path / "repo")
    files = {f"{name}.go": "package a\n" for name in "abc"} | {"a.py": "x = 1\n", "vendor/b.py": "", "c.rs": ""}
    repository.commit("Write it in another language", files)
    assert history_language(tmp_path / "repo") == "go"
    text = Repository(tmp_path / "text")
    text.commit("Write a text of words", {"a.md": "words\n"})
    with pytest.raises(UserError, match="no source file"):
        history_language(tmp_path / "text")


def test_names_that_leave_the_folder_are_not_written(tmp_path):
    repository = repository_of_words(tmp_path / "repo")
    git = repository.git
    blob = git.create_blob(b"stolen = 1\n")
    hostile = git.odb.write(
        2, b"".join(b"100644 " + name + b"\0" + bytes(blob.raw) for name in (b"..", b".git", b"a\\b"))
    )
    others = [("kit2", FOLDER, hostile)]
    for number in range(30, 34):
        repository.commit(
            f"Set the {WORDS[0]} to the number {number}",
            {"kit/one.py": function("f0", f"lantern = {number}"), "kit/two.py": function("f3")},
            others=others,
        )
    history_queries(tmp_path / "repo", "python", tmp_path / "tree")
    assert sorted(path.name for path in (tmp_path / "tree").rglob("*")) == ["kit", "one.py", "two.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["repo", "tree"]
