"""The wheel is installed into a new environment and used from an empty folder, as users do."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv*", "outputs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
SMALL = {"from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32, "max_steps": 2}
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


class Installed:
    """A new virtual environment with the wheel, and an empty folder to run commands in."""

    def __init__(self, wheel: Path, folder: Path):
        self.folder, self.bin = folder / "empty", folder / "environment/bin"
        self.folder.mkdir()
        venv.create(self.bin.parent, with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--quiet", str(wheel)], check=True)
        (packages,) = self.bin.parent.glob("lib/python*/site-packages")
        # Requirements come from the environment that runs the tests. They come after the wheel on the path.
        (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
    (wheel,) = archives.glob("*.whl")
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


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


def test_an_encoder_is_measured_and_reported(quickstart, installed):
    keep = ["--keep", "short_functions", "magic_methods", "constructors"]  # as in the recipe
    installed.run("soft-trainer", "mine", "stdlib", "--language", "python", "--output_dir", "rows", *keep)
    words = ["soft-trainer", "evaluate", "outputs/quickstart", "--data_dir", "rows"]
    printed = installed.run(*words, "--lexical", "false", "--output_dir", "measured").stdout
    numbers = json.loads((installed.folder / "measured/all_results.json").read_text())
    trained = json.loads((quickstart / "all_results.json").read_text())
    assert numbers["test_mrr"] == trained["test_mrr"] and f"{trained['test_mrr']:.3f}" in printed
    reported = installed.run("soft-trainer", "report", "outputs", "--output_dir", "report")
    assert "loss soft_info_nce" in reported.stdout and (installed.folder / "report/report.md").is_file()
    words = ["compare", "outputs/quickstart", "measured"]
    assert "A - B: MRR +0.0000" in installed.run("soft-trainer", *words).stdout


def test_a_study_runs_its_cells_without_a_checkout(installed, data_dir):
    study = {
        "output_dir": "outputs/study",
        "seeds": [1],
        "runs": {"info_nce": {"loss": "info_nce"}, "soft_info_nce": {"loss": "soft_info_nce"}},
        "options": SMALL | HERE | {"language": "python", "data_dir": str(data_dir), "lexical": False},
    }
    (installed.folder / "study.yaml").write_text(yaml.safe_dump(study))
    printed = installed.run("soft-trainer", "study", "--config", "study.yaml").stderr
    assert printed.count("| done") == 2
    for loss in ("info_nce", "soft_info_nce"):
        record = json.loads((installed.folder / "outputs/study" / loss / "1" / "run.json").read_text())
        assert record["loss"]["loss"] == loss and record["training"]["steps"] == 2
