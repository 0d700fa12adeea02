"""In a search, commits vote for the functions that they changed."""

import json
import os
import re

import numpy as np
import pytest
from git_repositories import FOLDER, LINK, SUBMODULE, Repository, function

from soft_trainer.search import CodeIndex, Search
from soft_trainer.search.commits import memory, reading
from soft_trainer.search.commits.memory import CommitMemory, choose_weight
from soft_trainer.search.commits.reading import State
from soft_trainer.search.index import store
from soft_trainer.search.ranking.ranking import parse_query
from soft_trainer.search.ranking.results import Commit
from soft_trainer.search.serving import served_index

pytestmark = pytest.mark.usefixtures("voting")


class Tree(Repository):
    """A repository with a working tree. Its functions and its commits use different words for the same subject."""

    def __init__(self, path):
        super().__init__(path)
        self.files = {f"src/f{i}.py": function(f"f{i}", f"value += {i}") for i in range(4)}
        self.save("Start with the first functions of all")

    def save(self, message, drop=(), **options):
        for name in drop:
            del self.files[name]
            (self.path / name).unlink()
        for name, text in self.files.items():
            (self.path / name).parent.mkdir(exist_ok=True, parents=True)
            (self.path / name).write_text(text)
        return self.commit(message, self.files, **options)

    def change(self, number, message, **options):
        self.files[f"src/f{number}.py"] = function(f"f{number}", f"value += {self.time}")
        return self.save(message, **options)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "tree")


def found(index, query):
    """Returns the name of each function that a query finds, and True if commits voted for it."""
    return [(result.name, bool(result.commits)) for result in index.search(query)]


def test_a_function_that_no_word_finds_is_found_by_its_commits(tree):
    commit = tree.change(2, "Light the lantern before the harbour opens (#12)")
    index = CodeIndex.build(tree.path)
    search = Search([index])
    for commits, expected in ((True, ["words", "commits"]), (False, ["words"])):
        assert len(search.search("lantern of the harbour f1", commits=commits)) > 0 and search.ranked_by == expected
    search.similar("src/f2.py", 1)
    assert search.ranked_by == ["words"]  # commits do not vote for similar code
    assert found(index, "lantern of the harbour") == [("f2", True)]
    told = Commit(str(commit)[:10], "2023-11-15", "Light the lantern before the harbour opens")
    assert index.search("lantern")[0].commits == (told,)
    assert index.search("zzzqqq lanthorn") == []


def test_commits_are_read_as_they_come(tree):
    index = CodeIndex.build(tree.path)
    assert index.statistics()["commits"]["read"] == 1 and index.search("lantern") == []
    first = tree.change(2, "Light the lantern before the harbour opens")
    tree.change(1, "Paint the thimble with the colour of meadows")
    index.update()
    assert index.statistics()["commits"]["read"] == 3
    assert found(index, "lantern") == [("f2", True)] and found(index, "thimble") == [("f1", True)]
    tree.git.set_head(first)  # as `git checkout`, or a rebase that leaves a commit out
    index.update()
    assert index.statistics()["commits"]["read"] == 2
    assert found(index, "lantern") == [("f2", True)] and index.search("thimble") == []
    tree.git.set_head("refs/heads/main")
    index.update()
    assert found(index, "thimble") == [("f1", True)]


def test_a_history_that_was_replaced_is_read_anew(tree, tmp_path):
    tree.change(2, "Light the lantern before the harbour opens")
    index = CodeIndex.build(tree.path)
    state = State.of(index.database)
    state.head = "1" * 40  # the collector of garbage has taken it
    state.save(index.database)
    tree.change(1, "Paint the thimble with the colour of meadows")
    index.update()
    assert found(index, "lantern") == [("f2", True)] and index.statistics()["commits"]["read"] == 3


def test_renames_are_followed_and_deleted_functions_forgotten(tree):
    tree.change(2, "Light the lantern before the harbour opens")
    tree.change(1, "Paint the thimble with the colour of meadows")
    tree.files["src/g.py"] = tree.files["src/f2.py"]
    tree.save("Move the second one to another file", drop=["src/f2.py"])
    tree.files["src/f2.py"] = function("f2", "value -= 70")
    tree.save("Write something else where it was before")
    index = CodeIndex.build(tree.path)
    assert [result.path for result in index.search("lantern")] == ["src/g.py"]
    tree.save("Remove what nobody needs any more", drop=["src/f1.py"])
    index.update()
    assert index.search("thimble") == []


def test_a_rename_on_another_branch_is_followed(tree):
    base = tree.git.head.target
    tree.files["src/g.py"] = tree.files["src/f2.py"]
    renamed = tree.save("Move the second one to another file", drop=["src/f2.py"])
    files = {f"src/f{i}.py": function(f"f{i}", f"value += {i}") for i in range(4)}
    files["src/f2.py"] = function("f2", "value += 12")
    side = tree.commit("Light the lantern before the harbour opens", files, [base], branch="refs/heads/side")
    tree.save("Merge the branch of the lantern", parents=[renamed, side])
    index = CodeIndex.build(tree.path)
    assert [result.path for result in index.search("lantern")] == ["src/g.py"]


@pytest.mark.parametrize(
    ("message", "author"),
    [
        ("Revert the lantern of the harbour", "Ann"),
        ("Bump lantern from 1.2 to 1.3", "Ann"),
        ("Light the lantern of the harbour", "dependabot[bot]"),
        ("Lantern", "Ann"),
    ],
)
def test_commits_that_mining_leaves_out_do_not_vote(tree, message, author):
    tree.change(2, message, author=author)
    assert CodeIndex.build(tree.path).search("lantern") == []


def test_a_commit_of_many_functions_does_not_vote_and_merges_neither(tree):
    tree.files["src/more.py"] = "".join(function(f"g{i}", f"value += {i}") for i in range(6))
    tree.save("Add a lantern to every house of the harbour")
    head = tree.git.head.target
    side = tree.commit("Write about nothing in particular", {}, [head], branch="refs/heads/side")
    tree.change(1, "Merge the thimble into the meadow", parents=[head, side])
    index = CodeIndex.build(tree.path)
    assert index.search("lantern") == [] and index.search("thimble") == []


def test_a_folder_of_a_repository_has_its_part(tree):
    tree.files["other/x.py"] = function("x", "value += 9")
    tree.save("Sew the meadow into the orchard")
    tree.change(2, "Light the lantern before the harbour opens")
    index = CodeIndex.build(tree.path / "src")
    assert [result.path for result in index.search("lantern")] == ["f2.py"] and index.search("orchard") == []


def test_a_folder_that_git_ignores_has_no_history(tree):
    tree.files |= {".gitignore": ".venv/\nignored/\n"}
    tree.change(2, "Light the lantern before the harbour opens")
    for folder in (".venv/lib", "ignored"):
        (tree.path / folder).mkdir(parents=True)
        (tree.path / folder / "f2.py").write_text(tree.files["src/f2.py"])
        index = CodeIndex.build(tree.path / folder)
        assert "commits" not in index.statistics() and index.search("lantern") == []
    assert CodeIndex.build(tree.path / "src").search("lantern")


def test_the_memory_is_turned_off_and_on_again(tree, command):
    tree.change(2, "Light the lantern before the harbour opens")
    assert "2 commits read, 2 of them can vote" in command("index", tree.path)[1]
    code, out, _ = command("index", tree.path, "--history", "false")
    assert code == 0 and "commits" not in out
    assert command("search", "--folder", tree.path, "lantern")[0] == 1
    assert "commits" not in command("index", tree.path)[1]  # it is remembered
    command("index", tree.path, "--history", "true")
    out = command("search", "--folder", tree.path, "lantern", "--json")[1]
    assert json.loads(out)["commits"][0]["subject"] == "Light the lantern before the harbour opens"


def test_a_missing_object_costs_its_commit_alone(tree, command):
    tree.change(2, "Light the lantern before the harbour opens")
    blob = tree.git.revparse_single("HEAD:src/f2.py").id
    tree.change(2, "Paint the thimble with the colour of meadows")
    tree.change(1, "Sew the orchard into a coat of autumn")
    (tree.path / ".git/objects" / str(blob)[:2] / str(blob)[2:]).unlink()
    code, _, err = command("index", tree.path)
    assert code == 0 and "skipped 2 of 4 commits, because objects are missing" in err
    index = CodeIndex.open(store.find_index_dir(tree.path))
    assert index.search("lantern") == [] and found(index, "orchard") == [("f1", True)] and index.search("f3")


def test_a_repository_that_cannot_be_opened_is_one_line(tree, command):
    (tree.path / ".git/config").write_text("[core\n")
    code, _, err = command("index", tree.path)
    assert code == 0 and err.count("\n") == 1 and "New commits were not read" in err
    assert command("search", "--folder", tree.path, "f2")[0] == 0
    (tree.path / "empty").mkdir()
    Repository(tree.path / "empty")
    assert "has no commit" in command("index", tree.path / "empty")[2]


def test_hostile_commits_do_no_harm(tree):
    git = tree.git
    tree.change(2, f"Light the lantern {'x' * 1_000_000} \x1b[31m")
    others = [("link", LINK, git.create_blob(b"src")), ("sub", SUBMODULE, git.head.target)]
    tree.save("Add a submodule of meadows and a link", others=others)
    many = git.TreeBuilder()
    blob = git.create_blob(b"def g(value):\n    return value\n")
    for number in range(10_000):
        many.insert(f"g{number}.py", blob, 0o100644)
    tree.save("Add a thimble for every house", others=[("many", FOLDER, many.write())])
    raw = git.read(git.head.target)[1].replace(b"Add a thimble for every house", b"Sew the orchard \xfcber alles")
    git.references["refs/heads/main"].set_target(git.odb.write(1, raw))
    index = CodeIndex.build(tree.path)
    subject = index.search("lantern")[0].commits[0].subject
    assert len(subject) <= reading.MAX_SUBJECT and index.search("thimble") == []


def test_served_indexes_read_new_commits_in_another_process(tree, monkeypatch):
    started, alive = [], []

    class Process:
        def __init__(self, target, args, daemon):
            self.run = lambda: target(*args)

        def start(self):
            started.append(1)
            self.run()

        def is_alive(self):
            return bool(alive)

    monkeypatch.setattr(served_index.multiprocessing, "get_context", lambda _: type("Spawn", (), {"Process": Process}))
    monkeypatch.setattr(served_index, "CHECK_SECONDS", -1)
    served = served_index.ServedIndex(Search([CodeIndex.build(tree.path)]))
    assert served.search("lantern", 10)[0] == [] and len(started) == 1
    tree.change(2, "Light the lantern before the harbour opens")
    (tree.path / ".git/logs").mkdir(exist_ok=True)
    (tree.path / ".git/logs/HEAD").write_text("moved\n")
    alive.append(1)  # the first process still reads, and would not read a commit that was made since
    served.search("anything", 10)
    assert len(started) == 1
    alive.clear()
    served.search("anything", 10)
    assert len(started) == 2
    assert [result.name for result in served.search("lantern", 10)[0]] == ["f2"]
    assert len(started) == 2


def test_before_a_commit_its_words_are_not_known(tree):
    tree.change(2, "Light the lantern before the harbour opens")
    tree.change(1, "Light the lantern behind the harbour")
    index = CodeIndex.build(tree.path)
    with index.snapshot() as snapshot:
        memory = CommitMemory(index.database, snapshot.segments)
        query = parse_query("lantern harbour")
        assert [len(memory.votes(query, before=number).commits) for number in (0, 1, 2, 3)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "weight"),
    [
        (np.tile([0.5, 0.5, 0.5, 0.5], (60, 1)), 0.0),
        (np.tile([0.2, 0.3, 0.5, 0.4], (60, 1)), 1.0),
        # the best weight is 2, but 0.5 is within one standard error of it
        (np.array([[0.1, 0.5, 0.1, 0.6], [0.1, 0.5, 0.1, 0.42]] * 30), 0.5),
    ],
)
def test_the_weight_is_the_smallest_within_an_error_of_the_best(ranks, weight):
    assert memory.smallest_good_weight(ranks) == weight


def test_the_weight_comes_from_the_newest_commits_that_say_something_new(tree, monkeypatch):
    for number in range(12):
        tree.change(number % 4, f"Light the lantern of harbour {number // 2} for {['ships', 'boats'][number % 2]}")
    tree.change(1, "light the lantern of harbour 0 for ships")
    index = CodeIndex.build(tree.path)
    monkeypatch.setattr(memory, "MIN_QUERIES", 3)
    monkeypatch.setattr(memory, "MAX_QUERIES", 4)
    with index.snapshot() as snapshot:
        queries = memory._queries(index.database, CommitMemory(index.database, snapshot.segments))
    assert [text.split(" harbour ")[1] for _, text, _ in queries] == [
        "5 for boats", "5 for ships", "4 for boats", "4 for ships",
    ]  # fmt: skip
    assert choose_weight(index.database).queries == 4


def test_commits_say_little_where_a_name_is_defined(tree):
    tree.change(2, "Light the lantern before the harbour opens")
    index = CodeIndex.build(tree.path)
    with index.snapshot() as snapshot:
        shares = [snapshot.memory.votes(parse_query(text)).shares.max() for text in ("lantern", "lantern harbour")]
    assert 0 < shares[0] < 0.1 < shares[1]


def test_commits_from_before_a_file_moved_into_the_folder_vote(tree):
    tree.files["old/x.py"] = function("x", "value += 9", "value *= 3", "value -= 2")
    tree.files["other/y.py"] = function("y", "value += 7")
    tree.save("Light the lantern before the harbour opens")
    moved = tree.files["old/x.py"]
    tree.files["src/x.py"] = moved
    tree.save("Move the code to its folder", drop=["old/x.py"])
    tree.files["other/y.py"] = function("y", "value += 8")
    tree.save("Paint the thimble with the colour of meadows")
    index = CodeIndex.build(tree.path / "src")
    assert found(index, "lantern") == [("x", True)] and index.search("thimble") == []
    assert index.statistics()["commits"]["kept"] == 2  # the thimble's commit changes nothing here


def test_a_working_tree_of_a_shallow_clone_has_its_commits(tree, tmp_path):
    tree.change(2, "Light the lantern before the harbour opens")
    middle = tree.change(1, "Paint the thimble with the colour of meadows")
    tree.change(3, "Sew the orchard into a coat of autumn")
    for commit in list(tree.git.walk(middle))[1:]:
        name = str(commit.id)
        (tree.path / ".git/objects" / name[:2] / name[2:]).unlink()
    (tree.path / ".git/shallow").write_text(f"{middle}\n")
    tree.git.add_worktree("linked", str(tmp_path / "linked"))
    index = CodeIndex.build(tmp_path / "linked")
    assert index.notices == [] and found(index, "orchard") == [("f3", True)]


@pytest.mark.parametrize("date", [-(2**40), 2**62])
def test_a_commit_of_any_date_is_shown(tree, date):
    head = tree.change(2, "Light the lantern before the harbour opens")
    raw = tree.git.read(head)[1]
    changed = re.sub(rb"\d{10} \+0000", f"{date} +0000".encode(), raw)
    tree.git.references["refs/heads/main"].set_target(tree.git.odb.write(1, changed))
    index = CodeIndex.build(tree.path)
    assert index.search("lantern")[0].commits[0].date[:4] in ("1970", "9999")


@pytest.mark.parametrize("name", ["config", "shallow", "packed-refs"])
def test_a_pipe_in_a_repository_is_not_opened(tree, name):
    (tree.path / ".git" / name).unlink(missing_ok=True)
    os.mkfifo(tree.path / ".git" / name)
    index = CodeIndex.build(tree.path)  # does not wait for a writer
    assert f"{name}: not a regular file" in index.notices[0] and index.search("f2")
