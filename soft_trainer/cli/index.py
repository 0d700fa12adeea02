"""Index a folder of source code, so that `soft-trainer search` finds its functions, classes and texts.

soft-trainer index DIR
soft-trainer index DIR --model sentence-transformers/all-MiniLM-L6-v2
soft-trainer index DIR --model outputs/matryoshka --truncate_dim 64
soft-trainer index DIR --skipped
soft-trainer index DIR --exclude 'docs/**' --include 'vendor/ours/**'
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from soft_trainer.source.source_files import source_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer index` to a parser."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="root of the source tree; stdlib stands for Python's standard library without its tests",
    )
    parser.add_argument(
        "--model",
        help="folder or Hub name of an encoder, to search by meaning too; none for words alone (default: the index's "
        "encoder, and base for a new index)",
    )
    parser.add_argument(
        "--truncate_dim",
        type=int,
        metavar="N",
        help="keep the first N dimensions of each embedding, for an encoder trained with --matryoshka_dims; a new N "
        "encodes everything again (default: the index's N, or all)",
    )
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        action="append",
        help="skip matching files and folders, such as 'docs/**'; can be repeated, and is remembered "
        "until the next --exclude ('' for none)",
    )
    parser.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="index matching files even if an ignore file, their folder or their type would skip them",
    )
    parser.add_argument(
        "--skipped",
        action="store_true",
        help="list the skipped files, with the reasons, and files that could not be parsed whole",
    )
    parser.add_argument("--rebuild", action="store_true", help="read and encode all files again")
    parser.add_argument("--index_dir", help="location of the index (default: in the user's cache directory)")


def run(arguments: argparse.Namespace) -> int | None:
    """Indexes a folder, and prints what was indexed and skipped. Returns 1 if the folder has no text files."""
    # Imported here, so that --help stays fast.
    from soft_trainer.cli.search import safe
    from soft_trainer.search import CodeIndex
    from soft_trainer.system.terminal import print_on_main

    started = time.perf_counter()
    arguments.folder = source_folder(arguments.folder)
    names = ("truncate_dim", "exclude", "include", "rebuild")
    choice = {name: getattr(arguments, name) for name in names}
    try:
        index = CodeIndex.build(arguments.folder, arguments.index_dir, arguments.model, progress=True, **choice)
    except KeyboardInterrupt:
        print_on_main("stopped: what was read and encoded is kept, and the same command continues")
        return 130
    for notice in index.notices:
        print_on_main(safe(notice))
    if arguments.skipped:
        sys.stdout.writelines(f"{safe(path or './')}  {reason}\n" for path, reason in index.skipped().items())
        why = "indexed, but syntax errors may hide functions"
        sys.stdout.writelines(f"{safe(path)}  {why}\n" for path in index.broken_files())
    counts = index.statistics()
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in counts["skipped"].items())
    if not counts["files"]:
        print_on_main(f"error: {arguments.folder}: contains no text files{reasons and f'; skipped: {reasons}'}")
        return 1
    size = f"{counts['bytes'] / 2**20:,.1f} MiB in {index.index_dir}"
    lines = [f"{counts['files']:,} files in {counts['chunks']:,} chunks, {size}"]
    if counts["model"]:
        if "truncate_dim" in counts:
            cut = f", {counts['truncate_dim']} dimensions of each embedding"
        else:
            cut = ""
        lines.append(f"{counts['encoded']:,} chunks encoded with {safe(counts['model'])}{cut}")
    if reasons:
        lines.append(f"skipped: {reasons}; a folder counts once, and --skipped lists them")
    if count := counts["vendored"]:
        lines.append(f"files that rank low, because they are in folders such as external/ or deps/: {count:,}")
    if count := counts["broken"]:
        lines.append(f"files in which syntax errors may hide functions: {count:,}; --skipped lists them")
    if arguments.index_dir:
        options = ("--index_dir", arguments.index_dir)
    else:
        options = ("--folder", arguments.folder)
    command = shlex.join(["soft-trainer", "search", *options])
    lines.append(f'{time.perf_counter() - started:.1f} s. Search it: {command} "parse a date"')
    sys.stdout.writelines(f"{safe(line)}\n" for line in lines)
