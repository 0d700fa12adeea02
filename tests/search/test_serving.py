"""Serving an index: changes are seen, and no search waits for an encoder."""

import queue
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex, serving, store
from soft_trainer.search.serving import ServedIndex, Watch


def until(condition, seconds=20):
    """Waits until a condition holds; returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def test_searches_go_by_words_until_the_encoder_is_loaded_and_pieces_are_encoded_behind(tree, stub, monkeypatch):
    index = CodeIndex.build(tree, model="stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    may_load, may_encode = threading.Event(), threading.Event()
    load, codes = stub.__init__, stub.codes
    monkeypatch.setattr(stub, "__init__", lambda *arguments: load(*arguments) if may_load.wait() else None)
    monkeypatch.setattr(stub, "codes", lambda *arguments: may_encode.wait() and codes(*arguments))
    served = ServedIndex(CodeIndex.open(index.index_dir))
    results, notices = served.search("brand_new", 5)
    assert results[0].path == "new.py" and notices == ["searching by words alone: the encoder is being loaded"]
    may_load.set()
    until(served.keepers[0].loaded.is_set)
    results, notices = served.search("brand_new", 5)
    assert results[0].path == "new.py"
    assert notices == ["12 of 13 pieces have embeddings; the others are being encoded"]
    may_encode.set()
    until(lambda: served.search("brand_new", 5)[1] == [])
    write_tree(tree, {"newer.py": "def brand_newer(): pass\n"})
    monkeypatch.setattr(serving, "CHECK_SECONDS", 0)
    until(lambda: served.search("brand_newer", 5)[0][0].path == "newer.py")
    until(lambda: served.search("brand_newer", 5)[1] == [])
    write_tree(tree, {"newest.py": "def brand_newest(): pass\n"})
    with store.write_lock(index.index_dir):
        until(lambda: "another process" in str(served.search("brand_newest", 5)[1]))
    until(lambda: served.search("brand_newest", 5)[0][0].path == "newest.py")  # though nothing has changed since


def test_an_encoder_that_the_index_gets_later_is_used(tree, stub):
    served = ServedIndex(CodeIndex.build(tree))
    assert served.search("parse date", 5)[1] == []
    CodeIndex.build(tree, model="stub")
    until(lambda: served.search("parse date", 5)[1] == [] and served.keepers[0].loaded.is_set())


def test_an_encoder_that_fails_is_named_and_tried_again(tree, stub, monkeypatch):
    index = CodeIndex.build(tree, model="stub")
    failing, load, codes = {"load", "encode"}, stub.__init__, stub.codes

    def unless_failing(step, function):
        def run(*arguments):
            if step in failing:
                raise RuntimeError(f"no memory to {step}\n(see the log)")
            return function(*arguments)

        return run

    monkeypatch.setattr(stub, "__init__", unless_failing("load", load))
    monkeypatch.setattr(stub, "codes", unless_failing("encode", codes))
    monkeypatch.setattr(serving, "CHECK_SECONDS", 0)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    served = ServedIndex(CodeIndex.open(index.index_dir))
    for step, notice in (
        ("load", "searching by words alone: RuntimeError: no memory to load (see the log)"),
        ("encode", "new pieces are not encoded: RuntimeError: no memory to encode (see the log)"),
    ):
        until(lambda notice=notice: notice in served.search("brand_new", 5)[1])
        failing.remove(step)
    until(lambda: served.search("brand_new", 5)[1] == [])


def test_included_files_are_watched_wherever_they_lie(tmp_path, monkeypatch):
    changes = queue.Queue()

    def watch(folder, watch_filter, **_):
        for change in iter(changes.get, None):
            yield {path for path in change if watch_filter(None, f"{folder}/{path}")}

    monkeypatch.setitem(sys.modules, "watchfiles", SimpleNamespace(watch=watch))
    watched = Watch(str(tmp_path), ["vendor/ours/**"])
    changes.put([])
    until(lambda: watched.watching)
    watched.changed()
    changes.put(["vendor/theirs/a.py", "vendor/ours/a.py"])
    until(watched.changed)
    changes.put(["vendor/theirs/a.py"])
    changes.put(None)
    until(changes.empty)
    assert not watched.changed()
    monkeypatch.setattr(serving, "WATCHED_CHECK_SECONDS", 0)  # an ignore file outside the tree may have changed
    assert watched.changed()


@pytest.mark.slow
def test_a_watched_tree_is_looked_at_only_after_a_change(tmp_path):
    pytest.importorskip("watchfiles")
    tree = write_tree(tmp_path / "tree", {f"d{n % 200}/f{n}.py": f"x_{n} = 1\n" for n in range(20_000)})
    watch = Watch(str(tree))
    until(lambda: watch.watching)
    watch.changed()
    write_tree(tree, {"node_modules/a.js": "a"})
    time.sleep(1)
    assert not watch.changed()
    write_tree(tree, {"d7/new.py": "def brand_new(): pass\n"})
    assert until(watch.changed) < 2
    assert not watch.changed()
