"""Times the search of a large tree from the shell: indexing, three searches, and an update after one edit.

    python benchmarks/large_tree.py --files 40000 --folder /dev/shm/large

The tree consists of copies of this Python's standard library and installed packages, with different names for the
functions and classes of each copy. PLACE keeps the tree and its index for the next call. Times are for a new process
with its children.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from soft_trainer.terminal import table

QUERIES = ("parse a date", "how are command line arguments parsed", "HTTPServer")
MAX_BYTES = 1_000_000  # longer files are not indexed
_DEFINED = re.compile(rb"\b(def|class)(\s+)(\w+)")


def main() -> None:
    """Makes the tree if it is not there, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=40_000)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the tree and its index")
    arguments = parser.parse_args()
    tree = arguments.folder / f"tree-{arguments.files}"
    if not tree.exists():
        make_tree(tree, arguments.files)
    size = sum(path.stat().st_size for path in tree.rglob("*.py"))
    os.environ["XDG_CACHE_HOME"] = str(arguments.folder / "cache")
    rows = [("index", *measured("index", str(tree)))]
    search = ("search", "--folder", str(tree))
    rows += [(f"search: {query}", *measured(*search, query)) for query in QUERIES]
    rows.append(("search with --no_update", *measured(*search, "--no_update", QUERIES[0])))
    edited = next(tree.rglob("*.py"))
    with edited.open("a") as file:
        file.write(f"\ndef edited_{os.getpid()}():\n    return 1\n")
    rows.append(("search after one edit", *measured(*search, QUERIES[0])))
    rows.append(("next search", *measured(*search, QUERIES[0])))
    headers = [f"{arguments.files:,} files, {size / 1e6:,.0f} MB", "CPU s", "wall s", "peak MB"]
    sys.stdout.write(table(headers, rows, floats=".2f") + "\n")


def make_tree(tree: Path, files: int) -> None:
    """Writes copies of this Python's source files until there are enough."""
    for number, (copy, root, path) in zip(range(files), sources(), strict=False):
        if number % 1000 == 0:  # so that no folder holds one copy alone
            sys.stderr.write(f"{number:,} of {files:,} files\n")
        target = tree / f"copy_{copy}" / root.name.replace("-", "_") / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_DEFINED.sub(rb"\1\2\3_%d" % copy, path.read_bytes()))


def sources() -> Iterator[tuple[int, Path, Path]]:
    """Yields the number of the copy, the folder and the path of each source file, over and over again."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    found = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            inside = root == roots[0] and "site-packages" in path.parts
            if not inside and path.is_file() and path.stat().st_size <= MAX_BYTES:
                found.append((root, path))
    for copy in itertools.count():
        for root, path in found:
            yield copy, root, path


def measured(*words: str) -> tuple[float, float, float]:
    """Returns the CPU seconds, the wall seconds and the peak memory in MB of a command in a new process."""
    started = os.times()
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "soft_trainer.cli", *words],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return used.ru_utime + used.ru_stime, os.times().elapsed - started.elapsed, used.ru_maxrss / 1024


if __name__ == "__main__":
    main()
