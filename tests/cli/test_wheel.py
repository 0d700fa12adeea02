"""The wheel is installed into a new environment and used from an empty folder, as users do."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from soft_trainer.options.parse import as_argv

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv*", "outputs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SMALL = {"from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32, "max_steps": 2}
WRITE_TOKEN = "hf_loopbackWriteTokenOfAnn"  # of tests/hub/server.py
HERE = {"per_device_train_batch_size": 8, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """Returns the folder with the wheel and the source archive, built from a copy of the repository."""
    copy = tmp_path_factory.mktemp("source") / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    dist = copy.with_name("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    built = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return dist


def _required(wheel: Distribution, extras: Sequence[str]) -> set[str]:
    """Returns the names of the distributions that a wheel with some extras requires, and that those require."""
    found = set()
    pending = [(wheel, {"", *extras})]
    while pending:
        each, wanted = pending.pop()
        for requirement in map(Requirement, each.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted):
                if requirement.name not in found:
                    found.add(requirement.name)
                    pending.append((distribution(requirement.name), {"", *requirement.extras}))
    return found


class Installed:
    """A new virtual environment with the wheel and what it requires, and an empty folder to run commands in.

    Args:
        wheel: the wheel.
        folder: where to make both.
        extras: the extras to install.
    """

    def __init__(self, wheel: Path, folder: Path, extras: Sequence[str]):
        self.folder, self.bin = folder / "empty", folder / "environment/bin"
        self.folder.mkdir()
        venv.create(self.bin.parent, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--quiet", str(wheel)], check=True)
        (self.packages,) = self.bin.parent.glob("lib/python*/site-packages")
        # Requirements are links to the packages of the environment that runs the tests.
        (metadata,) = self.packages.glob("soft_trainer-*.dist-info")
        for name in _required(Distribution.at(metadata), extras):
            for top in {
                file.parts[0] for file in distribution(name).files if file.parts[0] not in ("..", "__pycache__")
            }:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(distribution(name).locate_file(top)))
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = kept | OFFLINE | {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.environment["HF_DATASETS_CACHE"] = str(folder / "datasets")

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        """Runs a command of the environment in the empty folder, and checks its exit code."""
        words = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
        return done


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory) -> Installed:
    """The environment of README's first command."""
    (wheel,) = archives.glob("*.whl")
    return Installed(wheel, tmp_path_factory.mktemp("installed"), ["search"])


@pytest.fixture(scope="module")
def core(archives, tmp_path_factory) -> Installed:
    """An environment without extras."""
    (wheel,) = archives.glob("*.whl")
    return Installed(wheel, tmp_path_factory.mktemp("core"), [])


@pytest.fixture(scope="module")
def quickstart(installed) -> Path:
    """Runs two steps of the recipe `quickstart`, and returns the output folder."""
    installed.run("soft-trainer", "train", "--config", "quickstart", "--max_steps", "2", "--disable_tqdm", "true")
    return installed.folder / "outputs/quickstart"


def test_both_archives_pass_twine_and_the_source_holds_tests_and_documentation(archives):
    source, wheel = sorted(archives.iterdir(), key=lambda path: path.suffix)
    assert (source.suffix, wheel.suffix) == (".gz", ".whl")
    words = [sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)]
    checked = subprocess.run(words, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    names = {name.split("/", 1)[-1] for name in tarfile.open(source).getnames()}
    tracked = ("tests/conftest.py", "tests/cli/test_wheel.py", "docs/training.md", "recipes/paper/unixcoder/base.yaml")
    assert {*tracked, "CHANGELOG.md", "run_codesearch.py"} <= names


def test_every_recipe_and_data_file_is_in_the_wheel(installed):
    code = "import run_codesearch, soft_trainer; print(run_codesearch.__file__); print(soft_trainer.__path__[0])"
    script, package = map(Path, installed.run("python", "-c", code).stdout.split())
    assert script.is_relative_to(installed.bin.parent) and package.is_relative_to(installed.bin.parent)
    for folder, there in ((ROOT / "recipes", package / "recipes"), (ROOT / "soft_trainer", package)):
        wanted = {path.relative_to(folder) for path in folder.rglob("*.*") if "__pycache__" not in path.parts}
        assert not {path for path in wanted if not (there / path).is_file() and (folder / path).is_file()}


def test_the_quickstart_trains_and_its_encoder_finds_functions(quickstart, installed):
    numbers = json.loads((quickstart / "all_results.json").read_text())
    assert 0 < numbers["test_mrr"] <= 1 and numbers["test_lexical_mrr"] > 0.2
    shown = [block for block in _python_blocks() if "outputs/quickstart" in block]
    assert shown, "docs/training.md shows no search with the quickstart's encoder"
    for block in shown:
        assert installed.run("python", "-c", block).stdout.strip()


def _python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.MULTILINE | re.DOTALL)


# ---- Without extras ----


def test_rows_train_evaluate_and_push_without_extras(core, data_dir):
    options = [*as_argv(SMALL | HERE | {"language": "python", "data_dir": data_dir, "lexical": False})]
    core.run("soft-trainer", "train", *options, "--output_dir", "out")
    core.run("soft-trainer", "evaluate", "out", "--data_dir", str(data_dir), "--output_dir", "measured")
    assert "A - B: MRR +0.0000" in core.run("soft-trainer", "compare", "out", "measured").stdout
    core.run("soft-trainer", "report", "out", "--output_dir", "report")
    core.run("soft-trainer", "distil", "out", "--output_dir", "small", "--dimensions", "8")
    script = ROOT / "tests/hub/server.py"
    server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    core.environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{int(server.stdout.readline())}", "HF_HUB_OFFLINE": "0"}
    core.environment |= {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITE_TOKEN, "HF_HOME": str(core.folder / "home")}
    try:
        core.run("soft-trainer", "push", "out", "ann/encoder")
        code = "from soft_trainer import load_encoder; print(load_encoder('ann/encoder').encode_queries(['x']).shape)"
        assert "[1, 32]" in core.run("python", "-c", code).stdout
    finally:
        server.stdin.close()
        server.wait(10)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--config", "quickstart"),
        ("mine", "stdlib", "--output_dir", "rows"),
        ("index", "."),
        ("search", "--folder", ".", "words"),
        ("evaluate-search", "--folder", "."),
    ],
)
def test_reading_source_code_names_its_extra(core, words):
    (core.folder / "code.py").write_text("def f():\n    return 1\n")
    line = core.run("soft-trainer", *words, code=2).stderr.strip().splitlines()[-1]
    assert line.startswith("error: Reading source code needs the extra: pip install")


@pytest.mark.parametrize("command", ["train", "mine", "index", "search", "evaluate-search"])
def test_help_needs_no_extra(core, command):
    assert "usage: soft-trainer" in core.run("soft-trainer", command, "--help").stdout
