"""If a process that writes an index is killed at any time, the index still opens and answers queries."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex

# Embeds slowly and commits often, so that kills hit every stage of the work.
WRITER = """
import sys, time
import numpy as np
from soft_trainer.encoders import text_encoder
from soft_trainer.search import CodeIndex
from soft_trainer.search.index import updating, vectors
updating.SEGMENT_POSTINGS, vectors.COMMIT_TEXTS = 300, 8
class Stub:
    dimensions, fingerprint, runtime = 3, "stub", "torch"
    def encode(self, texts, side, languages=None):
        time.sleep(0.04 * (side != "query"))
        return np.array([[1, len(t) % 7, len(t) % 5] for t in texts], np.float32)
text_encoder.open_encoder = lambda *choice, **way: Stub()
print("ready", flush=True)
CodeIndex.build(sys.argv[1], sys.argv[2], model="stub")
"""


def change(tree, number):
    """Rewrites forty files of a tree."""
    text = "def stable_name_{n}(x):\n    return x\n\n\ndef version_{v}_{n}(y):\n    return y + {v}\n"
    write_tree(tree, {f"src/m{n}.py": text.format(n=n, v=number) for n in range(40)})


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    tree, index_dir = tmp_path / "tree", tmp_path / "index"
    change(tree, 0)
    CodeIndex.build(tree, index_dir).close()
    generator = random.Random(0)
    killed = 0
    for number in range(1, 21):
        change(tree, number)
        arguments = [sys.executable, "-c", WRITER, str(tree), str(index_dir)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
            process.stdout.readline()
            time.sleep(generator.uniform(0, 0.45))
            process.send_signal(signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
        index = CodeIndex.open(index_dir)
        found = index.search("stable_name_7", lexical=True)
        assert found[0].path == "src/m7.py" and found[0].name == "stable_name_7"
        assert index.database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        index.close()
    assert killed > 10
    subprocess.run([sys.executable, "-c", WRITER, str(tree), str(index_dir)], check=True)
    index = CodeIndex.open(index_dir)
    assert index.statistics()["encoded"] == index.statistics()["chunks"] == 80
    assert index.search("version_20_3", lexical=True)[0].path == "src/m3.py"
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-c", WRITER, str(tree), str(fresh)], check=True)
    size, least = index.statistics()["bytes"], CodeIndex.open(fresh).statistics()["bytes"]
    assert size <= 1.1 * least + 32_768


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    tree, index_dir = tmp_path / "tree", tmp_path / "index"
    change(tree, 1)
    arguments = [sys.executable, "-c", WRITER, str(tree), str(index_dir)]
    processes = [subprocess.Popen(arguments, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    index = CodeIndex.open(index_dir)
    assert index.database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert index.database.execute("SELECT count(*), count(DISTINCT path) FROM files").fetchone() == (40, 40)
    assert index.search("stable_name_7", lexical=True)[0].path == "src/m7.py"
