"""Requirements have lower bounds in setup.cfg and tested versions in constraints.txt, and workflows use them."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def required() -> list[Requirement]:
    """Returns the requirements of the package and of its extras."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    parts = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    return [Requirement(line) for part in parts for line in part.split("\n") if line.strip()]


def test_requirements_have_lower_bounds_only(required):
    for requirement in required:
        bounds = {specifier.operator for specifier in requirement.specifier}
        # The trainer overrides methods of `transformers` that its next major version may rename.
        assert bounds == ({">=", "<"} if requirement.name == "transformers" else {">="})


def test_every_requirement_has_a_tested_version_within_its_bounds(required):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    assert {requirement.name for requirement in required} == tested.keys()
    for requirement in required:
        for specifier in tested.get(requirement.name, ()):
            assert specifier.operator in ("==", "<") and requirement.specifier.contains(specifier.version)


def test_the_commands_of_the_pages_install_the_tested_versions():
    for page in ("README.md", "CONTRIBUTING.md", "AGENTS.md"):
        commands = re.findall(r"pip install .*-e .*", (ROOT / page).read_text())
        assert commands and all("-c constraints.txt" in command for command in commands), page


def test_workflows_run_what_is_there():
    commands = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert job["steps"] and job["runs-on"]
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert {".ci/lowest", ".ci/run"} <= {*commands} and any("sphinx-build -W" in command for command in commands)
    named = [word for command in commands for word in re.findall(r"(?:\.ci|tests|docs)/[\w./]*\w", command)]
    assert named and all((ROOT / name).exists() for name in named)


def test_the_page_for_agents_is_short_and_names_what_is_there():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    paths = re.findall(r"`((?:soft_trainer|tests)/[\w./]+|run_codesearch\.py)`", text)
    assert len(paths) > 10 and all((ROOT / path).exists() for path in paths)


@pytest.mark.slow
def test_lowest_takes_the_lower_bounds(required, tmp_path):
    (tmp_path / ".ci").mkdir()
    for name in (".ci/lowest", "setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, tmp_path / ".ci/lowest"], check=True)
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    bounds = {requirement.name: str(requirement.specifier).removeprefix(">=") for requirement in required}
    assert f"torch=={bounds['torch']}" in lines and f"peft=={bounds['peft']}" in lines
    assert len(lines) == len((ROOT / "constraints.txt").read_text().splitlines())


def test_every_line_that_installs_an_extra_works_in_a_clone():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    paths = [
        *ROOT.glob("soft_trainer/**/*.py"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("examples/*"),
    ]
    found = set()
    for path in paths:
        if path.is_file():
            text = path.read_text(errors="replace")
            assert "pip install 'soft-trainer" not in text and "pip install soft-trainer" not in text, path
            found.update(re.findall(r"pip install -c constraints.txt -e '\.\[(\w+)\]'", text))
    assert found - {"test"} and found <= extras


@pytest.mark.slow
def test_an_editable_install_is_imported_from_the_folder_above_the_clone(tmp_path):
    clone = tmp_path / "soft_trainer"
    ignored = shutil.ignore_patterns(".git", "*.egg-info", "build", "outputs", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=ignored)
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment/bin/python"
    (packages,) = tmp_path.glob("environment/lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--quiet", "-e", str(clone)], env=environment, check=True)
    command = [str(python), "-c", "import soft_trainer; print(soft_trainer.__version__)"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
