"""With gathering, two processes compute the same loss and gradients as one process on the global batch."""

import json
import shutil
from pathlib import Path

import pytest
import st_worker


@pytest.mark.slow
def test_two_processes_equal_one(encoder_folder, tuples, launch, tmp_path):
    shutil.copytree(encoder_folder, tmp_path / "encoder")
    (tmp_path / "tuples.json").write_text(json.dumps(tuples.to_list()))
    launch([Path(st_worker.__file__), tmp_path, tmp_path], 2, 300)
    st_worker.main(tmp_path, tmp_path)
    one, *two = [json.loads((tmp_path / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json")]
    for name in st_worker.CASES:
        # The losses of both processes are scaled so that their mean is the loss of the global batch.
        assert sum(found[name]["loss"] for found in two) / 2 == pytest.approx(one[name]["loss"], abs=1e-6), name
        for found in two:
            for key, gradient in one[name]["gradients"].items():
                assert found[name]["gradients"][key] == pytest.approx(gradient, abs=1e-6), f"{name}: {key}"
    assert two[0]["trainer"] == pytest.approx(one["trainer"], abs=1e-5)
    assert len(set(one["trainer"])) == 3
