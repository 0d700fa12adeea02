"""The documentation site builds without warnings and documents every exported name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import soft_trainer
import soft_trainer.search

ROOT = Path(__file__).parents[1]


def test_every_export_has_its_place_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    exports = {f"soft_trainer.{name}" for name in dir(soft_trainer) if not name.startswith("__")}
    exports |= {f"soft_trainer.search.{name}" for name in dir(soft_trainer.search)}
    documented = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    assert exports <= documented


def test_the_landing_page_has_nothing_that_github_shows_as_code():
    assert "{toctree}" not in (ROOT / "docs" / "index.md").read_text()


def test_every_page_is_in_the_contents():
    contents = (ROOT / "docs" / "conf.py").read_text().splitlines()
    pages = [path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index"]
    assert not [
        page for page in pages if not any(line in (page, line.split(" <")[0] + f" <{page}>") for line in contents)
    ]
    studies = {f"../benchmarks/{path.stem}" for path in (ROOT / "benchmarks").glob("*.md")}
    assert studies - set(contents) == {"../benchmarks/base_card"}  # a template


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-c", "docs", ".", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "SoftInfoNCETrainer" in (tmp_path / "site" / "docs" / "api.html").read_text()
