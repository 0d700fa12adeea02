"""The MRR metric for `evaluate`: it loads offline from its folder or file, and accepts every form of input."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import soft_trainer
from soft_trainer.metrics import load_mrr

FOLDER = Path(soft_trainer.__file__).parent / "metrics" / "mrr"


@pytest.fixture(scope="module")
def mrr():
    return load_mrr()


RANKS, POOLS = [1, 4, 1500], [2000, 2000, 2000]


@pytest.mark.parametrize(
    ("predictions", "references", "options", "mrr_value", "pool_size"),
    [
        # Scores. A tie counts against the relevant code.
        ([[0.9, 0.1, 0.4], [0.2, 0.8, 0.8], [0.5, 0.5, 0.5]], [0, 2, 1], {}, (1 + 1 / 2 + 1 / 3) / 3, 3),
        # Ids, best first.
        ([["7", "8"], ["8", "9"], ["7", "9"]], ["8", "8", "8"], {"pool_size": 90}, (1 / 2 + 1 + 0) / 3, 90),
        ([["a"]], ["a"], {}, 1, None),
        # Ranks, with the sizes of the corpora.
        (RANKS, POOLS, {}, (1 + 1 / 4 + 1 / 1500) / 3, 2000),
        (RANKS, POOLS, {"max_rank": 1000}, 1.25 / 3, 2000),
        ([1, 1], [10, 20], {}, 1, 15),
    ],
)
def test_scores_ids_and_ranks(mrr, predictions, references, options, mrr_value, pool_size):
    result = mrr.compute(predictions=predictions, references=references, **options)
    assert result == {"mrr": pytest.approx(mrr_value), "queries": len(predictions), "pool_size": pool_size}


def test_batches_add_up(mrr):
    for ranks in ([1, 2], [4], [3, 1]):
        mrr.add_batch(predictions=np.array(ranks), references=[9] * len(ranks))
    mrr.add(prediction=2, reference=9)
    assert mrr.compute()["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 3 + 1 + 1 / 2) / 6)


@pytest.mark.slow
def test_wrong_input_is_named(mrr):
    for predictions, references, message in [
        ([0, 2], [9, 9], r"predictions\[0\] is rank 0"),
        ([1, 10], [9, 9], r"references\[1\] is 9"),
        ([[0.1, 0.2]], [2], r"references\[0\] is 2"),
        ([[0.1, float("nan")]], [0], "NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            mrr.compute(predictions=predictions, references=references)


def test_equals_the_mrr_of_a_trainer(mrr, trainer_of, dataset):
    def compute_metrics(prediction):
        ranks, _ = prediction.predictions
        return {"again": mrr.compute(predictions=ranks, references=[len(dataset)] * len(ranks))["mrr"]}

    metrics = trainer_of(arguments={"compute_metrics": compute_metrics}).evaluate()
    assert metrics["eval_again"] == pytest.approx(metrics["eval_mrr"], abs=1e-12)


@pytest.mark.slow
def test_stands_alone_and_offline(tmp_path):
    """A Space on the Hub contains only this file, without the package."""
    (tmp_path / "mrr.py").write_text((FOLDER / "mrr.py").read_text())
    program = (
        "import sys, evaluate; sys.modules['soft_trainer'] = None;"
        f"assert evaluate.load({str(tmp_path / 'mrr.py')!r}).compute(predictions=[2], references=[5])['mrr'] == 0.5"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
