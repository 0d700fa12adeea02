"""A new index gets the encoder in the package, unless the user chooses another or none."""

import numpy as np
import pytest

from soft_trainer.errors import UserError
from soft_trainer.search import CodeIndex, code_index
from soft_trainer.search.ranking import ranking
from soft_trainer.system.packaged import BASE


@pytest.fixture(autouse=True)
def default(cache, monkeypatch):
    monkeypatch.setattr(code_index, "DEFAULT_ENCODER", BASE)


CHOICES = [(None, BASE), ("none", None), ("", None)]


@pytest.mark.parametrize("model, expected", CHOICES)
def test_a_new_index_has_the_encoder_of_the_package_and_keeps_the_choice(tree, model, expected):
    with CodeIndex.build(tree, model=model) as index:
        assert index.model == expected
        counts = index.statistics()
        assert counts.get("encoded") == (counts["chunks"] if expected else None)
    (tree / "new.py").write_text("def brand_new():\n    return 1\n")
    with CodeIndex.build(tree) as index:
        assert index.model == expected


def test_a_cache_that_cannot_be_written_leaves_a_search_by_words(tree, monkeypatch):
    def refuse(*arguments, **options):
        raise UserError("cannot write the encoder `base` there")

    monkeypatch.setattr(code_index.text_encoder, "open_encoder", refuse)
    with CodeIndex.build(tree) as index:
        assert index.model is None
        assert index.notices == ["searching only by words: cannot write the encoder `base` there"]
        assert index.search("parse")


@pytest.mark.parametrize("runtime, expected", [("static", ranking.STATIC), ("torch", 1.0), ("onnx", 1.0)])
def test_a_static_encoder_counts_less(tree, stub, monkeypatch, runtime, expected):
    trusted = []
    score = ranking.score

    def recorded(query, segments, similarity, trust, exact):
        trusted.append(trust)
        return score(query, segments, similarity, trust, exact)

    stub.runtime = runtime
    with CodeIndex.build(tree, model="stub") as index:
        monkeypatch.setattr(ranking, "score", recorded)
        index.search("parse")
    assert trusted == [expected]


def test_trust_scales_the_similarity(tree):
    with CodeIndex.build(tree, model="none") as index, index.snapshot() as snapshot:
        segments = snapshot.segments
        similarity = np.linspace(0, 1, len(segments.lengths), dtype=np.float32)
        query = ranking.parse_query("parse the date")
        words, half, whole = (ranking.score(query, segments, similarity, trust).chunks for trust in (0, 0.5, 1))
        assert np.allclose(half - words, (whole - words) / 2, atol=1e-6) and not np.allclose(words, whole)
