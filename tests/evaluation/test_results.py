"""Tables of results show the change in MRR with its 95 % interval."""

import numpy as np
import pytest

from soft_trainer.evaluation.results import change_of_mrr, metrics_table

METRICS = {"mrr": 0.5, "recall@1": 0.4, "recall@5": 0.6, "recall@10": 0.7, "pool_size": 10}


def test_the_change_of_the_mrr_has_the_margin_of_its_interval():
    before = np.array([1, 2, 4, 1])
    after = np.array([1, 1, 2, 2])
    found = change_of_mrr(before, after)
    differences = np.array([0, 0.5, 0.25, -0.5])
    assert found["mrr_change"] == pytest.approx(differences.mean())
    assert found["mrr_change_margin"] == pytest.approx(1.96 * np.std(differences, ddof=1) / 2)
    assert change_of_mrr([2], [1]) == {}


def test_the_table_shows_the_change_beside_the_mrr():
    changed = METRICS | {"mrr_change": 0.017, "mrr_change_margin": 0.0312}
    header, _, before, after = metrics_table({"test": {"untrained": METRICS, "trained": changed}}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[3:5]] for line in (header, before, after)]
    assert cells == [["MRR", "change in MRR (95 % interval)"], ["0.500", ""], ["0.500", "+0.017 ± 0.031"]]
    assert "change" not in metrics_table({"test": {"untrained": METRICS}})
