"""After any sequence of changes to a tree, its index answers as an index made afresh does."""

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from git_repositories import committed, git

from soft_trainer.search import CodeIndex
from soft_trainer.search.index import store
from soft_trainer.search.serving.served_index import ServedIndex
from soft_trainer.search.serving.tools import tool_server

LIBRARY = Path(os.__file__).parent
NOT_COPIED = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
NEW_CLASS = (
    '\n\nclass Added{n}:\n    """Counts the visitors of page {n}."""\n\n    def run(self):\n        return {n}\n'
)
NEW_FUNCTION = "def added_{n}(visitors):\n    return len(visitors) + {n}\n\n\n"


class Tree:
    """A part of the standard library in a git repository, which is changed at random."""

    def __init__(self, folder, seed, files, largest):
        self.folder = folder
        self.random = random.Random(seed)
        found = []
        for path in sorted(LIBRARY.rglob("*.py")):
            inside = path.relative_to(LIBRARY)
            if NOT_COPIED.isdisjoint(inside.parts) and 400 < path.stat().st_size < largest:
                found.append(inside)
        for path in self.random.sample(found, files):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(LIBRARY / path, folder / path)
        committed(folder)
        git(folder, "branch", "other")
        self.number = 0

    def files(self):
        return sorted(path for path in self.folder.rglob("*.py"))

    def line(self, path):
        """Returns a random line of a file."""
        lines = path.read_text(errors="replace").split("\n")
        return self.random.choice([line for line in lines if len(line) > 20] or ["a line"])

    def change(self):
        """Makes one small change. Returns the changed file and its neighbours."""
        self.number += 1
        actions = [self.write, self.write, self.append, self.rename, self.remove, self.add, self.move, self.switch]
        path = self.random.choice(self.files())
        changed = self.random.choice(actions)(path) or path
        files = self.files()
        position = min(sum(path < changed for path in files), len(files) - 1)
        return files[max(position - 1, 0) : position + 2]

    def write(self, path):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        starts = [position for position, line in enumerate(lines) if line.startswith(("def ", "class "))]
        position = self.random.choice(starts or [len(lines)])
        path.write_text("".join([*lines[:position], NEW_FUNCTION.format(n=self.number), *lines[position:]]))

    def append(self, path):
        with open(path, "a") as file:
            file.write(NEW_CLASS.format(n=self.number))

    def rename(self, path):
        suffix = self.random.choice([".py", ".py", ".md", ".txt"])  # the same content in another language
        return path.rename(path.with_name(f"{self.random.choice('az')}{self.number}{suffix}"))

    def remove(self, path):
        path.unlink()

    def add(self, path):
        new = path.with_name(f"{self.random.choice('az')}{self.number}.py")
        new.write_text(NEW_FUNCTION.format(n=self.number) + NEW_CLASS.format(n=self.number))
        return new

    def move(self, path):
        if path.parent == self.folder:
            return self.rename(path)
        moved = path.parent.rename(path.parent.with_name(f"{self.random.choice('az')}{self.number}"))
        return moved / path.name

    def switch(self, path):
        git(self.folder, "add", "-A")
        git(self.folder, "commit", "-q", "--allow-empty", "-m", f"Change {self.number}")
        now = git(self.folder, "branch", "--show-current").strip()
        git(self.folder, "checkout", "-qf", {"main": "other", "other": "main"}[now])


def names_in(index, files, tree):
    """Returns the names of the definitions in some files, with a random line of each file."""
    names = []
    lines = []
    for file in files:
        lines.append(tree.line(file))
        found = index.search(file.stem, 1000, path=str(file.relative_to(tree.folder)))
        names += sorted({result.name for result in found if result.name})
    return tree.random.sample(names, min(len(names), 8)), lines


def check(tree, index, fresh, near):
    """Compares an index with a fresh one, for all kinds of searches near the latest change."""
    names, lines = names_in(fresh, near, tree)
    folders = sorted({file.parent for file in tree.files()} - {tree.folder})
    parts = tree.random.sample(folders, 2)
    both = [(index, fresh)]
    for folder in parts:
        both.append(tuple(CodeIndex.open(one.index_dir, folder) for one in (index, fresh)))
    for old, new in both:
        for query in [*names, *lines, *(name.rsplit(".", 1)[-1] for name in names), "count the visitors of a page"]:
            assert old.search(query) == new.search(query)
        for name in names:
            assert old.search("visitors self value", 50, name=name) == new.search("visitors self value", 50, name=name)
        for filters in ({"language": "python"}, {"tests": "no"}):
            assert old.search(lines[0], **filters) == new.search(lines[0], **filters)
        pattern = f"{near[0].parent.name}/**,*.py"
        assert old.search(lines[0], 50, path=f"{{{pattern}}}") == new.search(lines[0], 50, path=f"{{{pattern}}}")
    inside = f"{parts[0].relative_to(tree.folder)}/"
    for name in names:
        found = fresh.search(name, 1000, name=name)
        assert name in {result.name for result in found}
        below = {(r.path.removeprefix(inside), r.start_line) for r in found if r.path.startswith(inside)}
        assert below == {(r.path, r.start_line) for r in both[1][0].search(name, 1000, name=name)}
    for result in fresh.search(lines[0]):
        assert index.similar(result.path, result.start_line) == fresh.similar(result.path, result.start_line)


def dead_chunks(index):
    return store.stored(index.database)[1] - index.statistics()["chunks"]


def follow(tmp_path, seed, model=None, files=150, largest=2500, changes=6):
    """Changes a tree and its index. Returns the number of searches in which the index had dead chunks."""
    tree = Tree(tmp_path / f"tree {seed}", seed, files, largest)
    index = CodeIndex.build(tree.folder, tmp_path / f"index {seed}", model)
    dead = 0
    for number in range(changes):
        for _ in range(tree.random.choice([1, 1, 2])):
            near = tree.change()
        index.refresh()
        dead += dead_chunks(index) > 0
        with CodeIndex.build(tree.folder, tmp_path / f"fresh {seed} {number}", model) as fresh:
            check(tree, index, fresh, near)
    return dead


@pytest.fixture
def like_a_large_index(monkeypatch):
    """Lets a small index keep several segments and dead chunks."""
    monkeypatch.setattr(store, "SEGMENT_CHUNKS", 100)
    monkeypatch.setattr(store, "MAX_DEAD_SHARE", 0.2)


def test_a_changed_index_answers_as_a_fresh_one(tmp_path, like_a_large_index):
    assert follow(tmp_path, 0, files=60, changes=2) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seeds"), [(None, range(1, 6)), ("base", range(1, 3))])
def test_many_changed_indexes_answer_as_fresh_ones(tmp_path, like_a_large_index, model, seeds):
    assert sum(follow(tmp_path, seed, model) for seed in seeds) > 2 * len(seeds)


@pytest.mark.slow
def test_a_large_index_answers_as_a_fresh_one(tmp_path):
    assert follow(tmp_path, 0, files=300, largest=30_000, changes=4) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(2))
def test_an_agent_gets_the_answers_of_a_fresh_index_right_after_each_change(tmp_path, seed, monkeypatch):
    """Edits, renames, branch switches and searches in random order, by the official client."""
    anyio = pytest.importorskip("anyio")
    mcp = pytest.importorskip("mcp")
    tree = Tree(tmp_path / "tree", seed, files=60, largest=2500)
    index = CodeIndex.build(tree.folder, tmp_path / "index")

    def bare(answer):  # without the random numbers of the fence
        return re.sub("TEXT [0-9a-f]{16}", "TEXT", answer.content[0].text)

    async def talk():
        async with mcp.Client(tool_server(ServedIndex(index))) as client:
            for number in range(20):
                near = tree.change()
                queries = [f"added_{tree.number}", f"Added{tree.number}", tree.line(near[0])]
                calls = [("search", {"query": query}) for query in queries]
                calls += [("read", {"path": str(path.relative_to(tree.folder))}) for path in near]
                tree.random.shuffle(calls)
                answers = [bare(await client.call_tool(*call)) for call in calls]
                with CodeIndex.build(tree.folder, tmp_path / f"fresh {number}") as fresh:
                    async with mcp.Client(tool_server(ServedIndex(fresh, update=False))) as other:
                        assert answers == [bare(await other.call_tool(*call)) for call in calls]

    anyio.run(talk)


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path):
    """As of `rsync -t`, `touch -r` and `cp -p`."""
    file = tmp_path / "tree/a.py"
    file.parent.mkdir()
    file.write_text("def lantern():\n    return 1\n")
    index = CodeIndex.build(tmp_path / "tree")
    before = file.stat()
    for name in ("thimble", "orchard"):
        file.write_text(f"def {name}():\n    return 1\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        index.refresh()
        assert [result.name for result in index.search(name)] == [name] and not index.search("lantern")
    index.database.execute("UPDATE contents SET text = zeroblob(3)")
    assert CodeIndex.build(tmp_path / "tree", rebuild=True).text_of("a.py") == file.read_text()
