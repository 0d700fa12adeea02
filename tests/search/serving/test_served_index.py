"""A served index notices changes, and no search waits for an encoder."""

import threading
import time

from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index import store
from soft_trainer.search.serving.served_index import ServedIndex


def until(condition, seconds=20):
    """Waits until a condition holds, and returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def test_searches_go_by_words_until_the_encoder_is_loaded_and_chunks_are_encoded_behind(tree, stub, monkeypatch):
    index = CodeIndex.build(tree, model="stub")
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    may_load, may_encode = threading.Event(), threading.Event()
    load, codes = stub.__init__, stub.codes
    stub.__init__ = lambda *arguments: load(*arguments) if may_load.wait() else None
    stub.codes = lambda *arguments: may_encode.wait() and codes(*arguments)
    served = ServedIndex(CodeIndex.open(index.index_dir))
    results, notices = served.search("brand_new", 5)
    assert results[0].path == "new.py" and notices == ["searching only by words: the encoder is being loaded"]
    may_load.set()
    until(served.loaded.is_set)
    results, notices = served.search("brand_new", 5)
    assert results[0].path == "new.py"
    assert notices == ["12 of 13 chunks have embeddings; the others are being encoded"]
    may_encode.set()
    until(lambda: served.search("brand_new", 5)[1] == [])
    write_tree(tree, {"newer.py": "def brand_newer(): pass\n"})
    until(lambda: served.search("brand_newer", 5)[0][0].path == "newer.py")
    until(lambda: served.search("brand_newer", 5)[1] == [])
    write_tree(tree, {"newest.py": "def brand_newest(): pass\n"})
    with store.write_lock(index.index_dir):
        until(lambda: "another process" in str(served.search("brand_newest", 5)[1]))
    until(lambda: served.search("brand_newest", 5)[0][0].path == "newest.py")  # though nothing has changed since


def test_the_first_start_waits_for_words_alone(command, tree, stub, monkeypatch):
    """Embeddings come later: an agent gives up after ten seconds."""
    may_load, load = threading.Event(), stub.__init__
    stub.__init__ = lambda *arguments: load(*arguments) if may_load.wait() else None

    def serve(served, *_):
        assert served.search("parse_date", 5)[1] == ["searching only by words: the encoder is being loaded"]
        may_load.set()
        until(lambda: served.search("parse_date", 5)[1] == [] and served.loaded.is_set())
        assert served.index.model == "stub" and len(stub.encoded) > 10

    monkeypatch.setattr("soft_trainer.search.serving.server.serve_page", serve)
    for _ in range(2):  # without an index, and with one
        may_load.clear()
        assert command("search", "--folder", tree, "--serve", "--model", "stub")[0] == 0


def test_an_encoder_that_the_index_gets_later_is_used(tree, stub):
    served = ServedIndex(CodeIndex.build(tree))
    assert served.search("parse date", 5)[1] == []
    CodeIndex.build(tree, model="stub")
    until(lambda: served.search("parse date", 5)[1] == [] and served.loaded.is_set())


def test_an_encoder_that_fails_is_named_and_tried_again(tree, stub, monkeypatch):
    index = CodeIndex.build(tree, model="stub")
    failing, load, codes = {"load", "encode"}, stub.__init__, stub.codes

    def unless_failing(step, function):
        def run(*arguments):
            if step in failing:
                raise RuntimeError(f"no memory to {step}\n(see the log)")
            return function(*arguments)

        return run

    stub.__init__ = unless_failing("load", load)
    stub.codes = unless_failing("encode", codes)
    write_tree(tree, {"new.py": "def brand_new(): pass\n"})
    served = ServedIndex(CodeIndex.open(index.index_dir))
    for step, notice in (
        ("load", "searching only by words: RuntimeError: no memory to load (see the log)"),
        ("encode", "new chunks are not encoded: RuntimeError: no memory to encode (see the log)"),
    ):
        until(lambda notice=notice: notice in served.search("brand_new", 5)[1])
        failing.remove(step)
    until(lambda: served.search("brand_new", 5)[1] == [])
