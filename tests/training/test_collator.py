"""A batch becomes forward passes in which each text is there once, and its order can be restored."""

import numpy as np
import pytest
import torch

from soft_trainer.encoders.encoding import Collator
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.static_torch import StaticConfig, StaticModel
from soft_trainer.training.collator import PIECES, PairCollator, divide, pieces_of

PAD = 1
LENGTHS = {"query": (3, 30, 3, 17, 9, 30, 1), "code": (40, 200, 41, 8, 100, 9, 1)}


def texts_of(lengths: dict) -> dict[str, list[np.ndarray]]:
    """Makes texts with the token ids 10, 11, and so on, so that the length identifies the text."""
    return {side: [np.arange(10, 10 + length) for length in of_side] for side, of_side in lengths.items()}


def collated(collate, lengths: dict, largest: int | None = None, counts: dict | None = None, pieces: int = 1):
    """Collates a batch in as many passes as it needs."""
    collator = PairCollator(collate, {"query": 32, "code": 200}, {"query": 0, "code": 0}, largest, pieces)
    counts = counts or {side: collator.count(len(of_side)) for side, of_side in lengths.items()}
    return collator(texts_of(lengths), {side: np.array([7]) for side in lengths}, counts)


def restored(inputs: dict) -> list[list[int]]:
    """Recovers the token ids of the texts in a pass."""
    if "borders" in inputs:
        parts = inputs["input_ids"][0].split(inputs["borders"].diff().tolist())
        return [part.tolist() for part in parts]
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_each_side_is_padded_to_its_longest_text():
    inputs = collated(Collator(PAD), {"query": (2, 4), "code": (3, 1)})
    query, code = inputs.passes
    assert query["input_ids"].tolist() == [[10, 11, PAD, PAD], [10, 11, 12, 13]]
    assert query["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert code["input_ids"].tolist() == [[10, 11, 12], [10, PAD, PAD]]
    assert inputs.queries.tolist() == [0, 1] and inputs.codes.tolist() == [2, 3]
    few = collated(Collator(PAD, few_lengths=True), {"query": (2, 4), "code": (65, 1)})
    assert [each["input_ids"].shape[1] for each in few.passes] == [32, 128]


@pytest.mark.parametrize("collate", [Collator(PAD), Collator(packs=True)], ids=["padded", "packed"])
@pytest.mark.parametrize("largest", [None, 3, 100])
@pytest.mark.parametrize("more", [0, 9], ids=["as many passes", "more passes than texts"])
def test_every_text_is_there_once_and_no_pass_is_larger_than_asked(collate, largest, more):
    counts = None
    if more:
        counts = {"query": 7 + more, "code": 7 + more}
    inputs = collated(collate, LENGTHS, largest, counts)
    texts = [text for each in inputs.passes for text in restored(each)]
    for positions, side in ((inputs.queries, "query"), (inputs.codes, "code")):
        assert [len(texts[position]) for position in positions] == list(LENGTHS[side])
    if largest and not more:
        assert max(len(restored(each)) for each in inputs.passes) <= largest
    if largest is None and collate.packs:
        assert len(inputs.passes) == 1


@pytest.mark.parametrize("collate", [Collator(PAD), Collator(packs=True)], ids=["padded", "packed"])
def test_a_process_without_texts_encodes_a_spare_one(collate):
    inputs = collated(collate, {"query": (), "code": ()})
    assert [each["input_ids"].tolist() for each in inputs.passes] == [[[7]]] * len(inputs.passes)
    assert len(inputs.queries) == len(inputs.codes) == 0


def test_a_side_is_padded_in_four_passes_on_a_cpu_unless_the_encoder_is_static(model):
    cpu, padded = torch.device("cpu"), Passes("for the test")
    assert pieces_of(padded, cpu, model) == PIECES == 4
    assert pieces_of(padded, torch.device("cuda"), model) == pieces_of(Passes(None), cpu, model) == 1
    assert pieces_of(padded, cpu, StaticModel(StaticConfig(vocab_size=50, hidden_size=8))) == 1
    lengths = {"query": (250, 10, 240, 12, 9, 245, 11, 8), "code": (3, 4)}
    inputs = collated(Collator(PAD), lengths, pieces=PIECES)
    widths = [each["input_ids"].shape[1] for each in inputs.passes]
    assert widths == [250, 240, 11, 9, 4, 3]


def test_passes_have_texts_of_similar_length_and_differ_in_size_by_one_at_most():
    lengths = np.random.default_rng(0).integers(1, 300, size=100)
    passes = divide(lengths, 7)
    assert sorted(np.concatenate(passes).tolist()) == list(range(100))
    assert {len(rows) for rows in passes} == {14, 15}
    assert all(lengths[one].min() >= lengths[next_].max() for one, next_ in zip(passes, passes[1:], strict=False))
    assert divide(lengths, 1)[0].tolist() == list(range(100))
