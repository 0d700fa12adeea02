"""Type checkers know everything that the packages export."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import soft_trainer
import soft_trainer.search

ROOT = Path(__file__).parents[1]
EXPORTS = [f"{package.__name__}.{name}" for package in (soft_trainer, soft_trainer.search) for name in dir(package)]


def test_dir_lists_the_exports():
    assert "soft_trainer.SoftInfoNCETrainer" in EXPORTS
    assert "soft_trainer.search.CodeIndex" in EXPORTS
    assert set(soft_trainer.__all__) == set(dir(soft_trainer))


@pytest.mark.parametrize("package", [soft_trainer, soft_trainer.search])
def test_editors_see_every_export(package):
    """Jedi, which Jupyter uses, reads no `__all__`: it sees a name of a stub only if `as` repeats it."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    imported = [name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert imported and not [name.name for name in imported if name.asname != name.name]


@pytest.mark.slow
def test_the_package_passes_the_type_checker():
    """`pyrightconfig.json` turns off the rules that fail on what torch, datasets and pandas leave untyped."""
    checked = subprocess.run([sys.executable, "-m", "basedpyright"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_no_export_is_unknown_to_a_type_checker(tmp_path):
    lines = ["import soft_trainer", "import soft_trainer.search", *(f"reveal_type({name})" for name in EXPORTS)]
    (tmp_path / "exports.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "exports.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    messages = [each["message"] for each in json.loads(result.stdout)["generalDiagnostics"]]
    assert len(messages) == len(EXPORTS)
    for name, message in zip(EXPORTS, messages, strict=True):
        shown = message.removeprefix(f'Type of "{name}" is ')
        assert shown != message, message
        assert shown not in ('"Any"', '"Unknown"'), message
