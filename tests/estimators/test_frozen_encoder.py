import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset

from soft_trainer import SimCSEEstimator, TrainedModelEstimator, load_encoder
from soft_trainer.data import array_cache
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import Excluded


@pytest.fixture
def count_encodings(monkeypatch):
    """Records the number of texts in each call that encodes, in a list."""
    import soft_trainer.estimators.frozen_encoder as encoded

    counted = []
    real = encoded.embed_sharded

    def counting(encoder, tokens, *args, **kwargs):
        counted.append(len(tokens))
        return real(encoder, tokens, *args, **kwargs)

    monkeypatch.setattr(encoded, "embed_sharded", counting)
    return counted


def test_simcse_is_the_cosine_of_queries(dataset, encoder_dir, tmp_path):
    estimator = SimCSEEstimator(encoder_dir, cache_dir=tmp_path)
    estimator.fit(Split.from_pairs(dataset))
    embeddings = load_encoder(encoder_dir).encode_queries([" ".join(t) for t in dataset["docstring_tokens"]])
    embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
    torch.testing.assert_close(estimator.similarity([3, 1], [0, 1, 2]), embeddings[[3, 1]] @ embeddings[:3].T)
    assert (estimator.alpha, estimator.beta, estimator.temperature) == (1.3, 0.7, 0.1)


def test_a_trained_model_scores_as_it_was_trained_to(dataset, encoder_dir, tmp_path):
    estimator = TrainedModelEstimator(encoder_dir, cache_dir=tmp_path)
    estimator.fit(Split.from_pairs(dataset))
    encoder = load_encoder(encoder_dir)
    queries = encoder.encode_queries([" ".join(t) for t in dataset["docstring_tokens"]])
    codes = encoder.encode_codes([" ".join(t) for t in dataset["code_tokens"]])
    rows = torch.tensor([5, 2, 7])
    expected = encoder.score(queries[rows], codes[rows])
    torch.testing.assert_close(estimator.similarity(rows, rows), expected, atol=1e-5, rtol=1e-5)


def test_a_second_run_takes_the_rows_from_disk(dataset, encoder_dir, tmp_path, count_encodings):
    for _ in range(2):
        TrainedModelEstimator(encoder_dir, cache_dir=tmp_path).fit(Split.from_pairs(dataset))
    assert count_encodings == [24, 24]  # all queries and all codes, each once
    TrainedModelEstimator(encoder_dir, cache_dir=None).fit(Split.from_pairs(dataset))
    assert len(count_encodings) == 4


@pytest.mark.parametrize("changed", ["docstring_tokens", "code_tokens", "encoder"])
def test_what_was_made_from_other_rows_or_another_encoder_is_not_read(rows, encoder_dir, tmp_path, changed):
    folder = shutil.copytree(encoder_dir, tmp_path / "encoder")

    def results(cache) -> tuple[list, list]:
        estimator = TrainedModelEstimator(folder, cache_dir=cache)
        estimator.fit(Split.from_pairs(Dataset.from_list(rows)))
        nearest = estimator.neighbours(3, Excluded(np.arange(len(rows))))
        return estimator.similarity(range(24), range(24)).tolist(), nearest.scores.tolist()

    before = results(tmp_path / "cache")
    if changed == "encoder":
        resolve_profile(folder).replace(pooling="cls").save(folder)
    else:
        rows = [row | {changed: [*row[changed][:3], "twice"]} for row in rows]
    assert before != results(tmp_path / "cache") == results(None)


@pytest.mark.parametrize("damage", [lambda b: b[:-40], lambda b: b[:-4] + bytes(4), lambda b: b""])
def test_a_damaged_cache_is_built_again(dataset, encoder_dir, tmp_path, count_encodings, damage, capsys):
    estimator = SimCSEEstimator(encoder_dir, cache_dir=tmp_path)
    estimator.fit(Split.from_pairs(dataset))
    expected = estimator.similarity(range(24), range(24)).clone()
    (file,) = tmp_path.glob("*.npy")
    data = damage(file.read_bytes())
    file.unlink()
    file.write_bytes(data)
    again = SimCSEEstimator(encoder_dir, cache_dir=tmp_path)
    again.fit(Split.from_pairs(dataset))
    torch.testing.assert_close(again.similarity(range(24), range(24)), expected)
    assert len(count_encodings) == 2 and "damaged" in capsys.readouterr().err


def test_a_run_killed_while_writing_leaves_no_file_that_counts(dataset, encoder_dir, tmp_path, monkeypatch):
    def killed(file, values, **kwargs):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(array_cache.np, "save", killed)
        SimCSEEstimator(encoder_dir, cache_dir=tmp_path).fit(Split.from_pairs(dataset))
    SimCSEEstimator(encoder_dir, cache_dir=tmp_path).fit(Split.from_pairs(dataset))
    assert len([p for p in tmp_path.glob("*.npy") if not p.name.startswith(".")]) == 1


@pytest.mark.parametrize("error", [(28, "No space left on device"), ("64 requested and 0 written",)])
def test_a_disk_that_fills_up_while_writing_costs_the_file_not_the_run(
    error, dataset, encoder_dir, tmp_path, monkeypatch
):
    def full(*args, **kwargs):
        raise OSError(*error)

    warned = []
    monkeypatch.setattr(array_cache.logger, "warning", warned.append)
    monkeypatch.setattr(array_cache.np, "save", full)
    estimator = SimCSEEstimator(encoder_dir, cache_dir=tmp_path)
    estimator.fit(Split.from_pairs(dataset))
    assert estimator.similarity([0], [0]).item() == pytest.approx(1, abs=1e-5)
    assert f"cannot write to {tmp_path} ({error[-1]})" in warned[0]


def test_a_missing_model_is_named(dataset, tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        SimCSEEstimator(tmp_path / "nowhere").fit(Split.from_pairs(dataset))


def test_a_fitted_estimator_is_sent_to_workers_by_the_path_of_its_rows(encoder_dir, dataset, tmp_path):
    for estimator_class in (SimCSEEstimator, TrainedModelEstimator):
        estimator = estimator_class(encoder_dir, cache_dir=tmp_path)
        estimator.fit(Split.from_pairs(dataset))
        sent = pickle.dumps(estimator)
        assert len(sent) < 2_000
        assert torch.equal(pickle.loads(sent).similarity([0, 1], [2, 3]), estimator.similarity([0, 1], [2, 3]))


def test_embeddings_that_are_not_finite_are_refused_and_not_stored(encoder_dir, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "soft_trainer.estimators.frozen_encoder.embed_sharded",
        lambda *_, **__: torch.full((len(dataset), 32), torch.inf),
    )
    with pytest.raises(UserError, match="NaN, infinity"):
        SimCSEEstimator(encoder_dir, cache_dir=tmp_path).fit(Split.from_pairs(dataset))
    assert not list(tmp_path.glob("*.npy"))


MACHINE = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from datasets import Dataset
from soft_trainer import SimCSEEstimator
from soft_trainer.system import distributed
from soft_trainer.data.split import Split
from soft_trainer.estimators import frozen_encoder
PartialState(cpu=True)
folder, rows, encoder = sys.argv[1:]
rank = distributed.rank_and_world_size()[0]
built, build = [], frozen_encoder.embed_sharded
frozen_encoder.embed_sharded = lambda *a, **k: built.append(1) or build(*a, **k)
dataset = Dataset.from_list(json.loads(Path(rows).read_text()))
found = []
for caches in (("a", "a"), ("a", "b"), ("a", "b"), ("c", "b")):
    built.clear()
    estimator = SimCSEEstimator(encoder, cache_dir=Path(folder, caches[rank]))
    estimator.fit(Split.from_pairs(dataset))
    found.append((len(built), estimator.similarity([0, 1], [2, 3]).tolist()))
Path(folder, f"{rank}.json").write_text(json.dumps(found))
distributed.close()
"""


@pytest.mark.slow
def test_machines_without_a_shared_disk_build_when_one_of_them_must(launch, rows, encoder_dir, tmp_path):
    script, data = tmp_path / "machine.py", tmp_path / "rows.json"
    script.write_text(MACHINE)
    data.write_text(json.dumps(rows))
    # Both processes have local rank 0, as on two machines.
    launch([script, tmp_path, data, encoder_dir], 2, 120, each=lambda rank: {"LOCAL_RANK": "0"})
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert [built for built, _ in first] == [built for built, _ in second] == [1, 1, 0, 1]
    assert first == second and len({json.dumps(values) for _, values in first}) == 1
    assert all(len(list((tmp_path / cache).glob("*.npy"))) == 1 for cache in "abc")
