"""`import soft_trainer` is fast: heavy modules are imported on first use."""

import subprocess
import sys

import pytest

import soft_trainer

HEAVY = ("torch", "transformers", "datasets", "numpy", "scipy", "pyarrow", "tree_sitter", "yaml")


def test_import_is_fast_and_loads_nothing_heavy():
    script = (
        "import sys, time; start = time.process_time(); import soft_trainer; print(time.process_time() - start);"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    seconds, loaded = subprocess.check_output([sys.executable, "-c", script], text=True).splitlines()
    assert float(seconds) < 0.3
    assert loaded == "[]"


def test_every_public_name_can_be_imported():
    missing = []
    for name in soft_trainer.__all__:
        try:
            getattr(soft_trainer, name)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    assert not missing
    assert set(soft_trainer.__all__) <= set(dir(soft_trainer))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="soft_trainer attribute HardInfoNCETrainer"):
        _ = soft_trainer.HardInfoNCETrainer
