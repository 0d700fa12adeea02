"""Starts scripts as processes that have already imported torch and transformers.

These imports take a new interpreter five seconds, and the slow tests start about a hundred processes. The fork server
of `multiprocessing` imports the libraries once. Each process is a fork of the server with a different environment,
folder and output files. Tests of a new interpreter (imports, variables read at import, launchers) use `subprocess`.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "run_codesearch",
        "soft_trainer.trainer",
        "soft_trainer.run.record",
        "soft_trainer.shell.building",
        "soft_trainer.shell.rows",
        "soft_trainer.estimators.registry",
        "soft_trainer.shell.evaluation_sets",
        "transformers.models.roberta.modeling_roberta",
    ]
)


def _run(argv: list[str], environment: dict[str, str], folder: str, stdout: str, stderr: str) -> None:
    """Runs a command line in a forked process like in a new Python process."""
    import datasets
    import without_bf16  # noqa: F401 - the fork trains in float32, like the process that runs the tests

    for path, stream in ((stdout, 1), (stderr, 2)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Read from the environment at import, so the fork has the server's value.
    datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_DATASETS_CACHE"])
    path = [entry for entry in sys.path if not Path(entry).is_relative_to(TESTS)]
    sys.argv, sys.path[:] = argv, [str(Path(argv[0]).parent), *path]
    runpy.run_path(argv[0], run_name="__main__")


def start(argv, environment: dict[str, str], folder, stdout, stderr):
    """Starts a script, whose path and options are `argv`, and appends its output to two files.

    Returns a `multiprocessing` process, with `join(timeout)`, `kill()` and `exitcode`.
    """
    arguments = (list(map(str, argv)), dict(environment), str(folder), str(stdout), str(stderr))
    process = _context.Process(target=_run, args=arguments)
    process.start()
    return process


def run(argv, environment: dict[str, str], folder=None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs a script to its end, like `subprocess.run` with `text` and `capture_output`."""
    with tempfile.TemporaryDirectory() as kept:
        files = [Path(kept, name) for name in ("stdout", "stderr")]
        process = start(argv, environment, folder or os.getcwd(), *files)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(argv, timeout)
        return subprocess.CompletedProcess(argv, process.exitcode, *(path.read_text() for path in files))


def start_training(argv, logs, each=lambda rank: {}, **environment: str) -> list:
    """Starts a script as one process for each path in `logs`, all in one training run, with ranks in the environment.

    Each process writes its output to its path. `each` returns additional environment variables for a rank.
    """
    common, world_size = os.environ | {"ACCELERATE_USE_CPU": "true"} | environment, str(len(logs))
    if len(logs) == 1:
        return [start(argv, common | each(0), os.getcwd(), logs[0], logs[0])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | each(rank) for rank in range(len(logs))]
    return [start(argv, common | rank, os.getcwd(), log, log) for rank, log in zip(ranks, logs, strict=True)]
