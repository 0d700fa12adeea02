"""Type checkers and editors find everything that the packages export."""

import ast
import json
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
    """Jedi, which Jupyter uses, ignores `__all__`: it finds a name in a stub only if `as` repeats the name."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    imported = [name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert imported and not [name.name for name in imported if name.asname != name.name]


@pytest.mark.slow
def test_the_package_passes_the_type_checker_which_knows_every_export(tmp_path):
    """`pyrightconfig.json` turns off the rules that fail on untyped parts of torch, datasets and pandas."""
    lines = ["import soft_trainer", "import soft_trainer.search", *(f"reveal_type({name})" for name in EXPORTS)]
    exports = tmp_path / "exports.py"
    exports.write_text("\n".join(lines))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "soft_trainer", "run_codesearch.py", exports]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    messages = [each["message"] for each in json.loads(checked.stdout)["generalDiagnostics"]]
    for name, message in zip(EXPORTS, messages, strict=True):
        shown = message.removeprefix(f'Type of "{name}" is ')
        assert shown != message, message
        assert shown not in ('"Any"', '"Unknown"'), message
