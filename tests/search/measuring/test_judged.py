import json
import math

import pytest
from refusals import refused

from soft_trainer.search.measuring.judged import measures, read_queries

LOG3, LOG5 = math.log2(3), math.log2(5)


@pytest.mark.parametrize(
    ("ranked", "targets", "expected"),
    [
        ("abc", "a", (1.0, 1.0)),
        ("bbca", "a", (1 / 3, 0.5)),
        ("bc", "a", (0.0, 0.0)),
        ("bacd", "ad", (0.5, (1 / LOG3 + 1 / LOG5) / (1 + 1 / LOG3))),
        ("bcdefghijklma", "a", (1 / 13, 0.0)),
    ],
)  # fmt: skip
def test_measures_by_hand(ranked, targets, expected):
    found = measures(dict.fromkeys(ranked), frozenset(targets))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"relevant": "a.py"}, "queries.jsonl, row 2: relevant='a.py': expected a list of paths"),
        ({"relevant": []}, "queries.jsonl, row 2: relevant=[]: expected a list of paths"),
        ({}, "queries.jsonl, row 2: expected a judged query with repo, query and relevant: 'relevant'"),
        ({"relevant": ["a.py"], "repo": "../a"}, "row 2: repo='../a': expected the name of a folder inside the trees"),
        ({"relevant": ["a.py"], "repo": "/a"}, "row 2: repo='/a': expected the name of a folder inside the trees"),
    ],
)
def test_a_query_without_a_text_or_a_list_of_paths_is_refused(tmp_path, row, message):
    rows = [{"repo": "a", "query": "one", "relevant": ["a.py"]}, {"repo": "a", "query": "two"} | row]
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    with refused(message):
        read_queries(path)
