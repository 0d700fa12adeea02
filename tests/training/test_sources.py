"""Training on several sources: each batch comes from one source."""

import json

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.data.load import join_sources, training_split
from soft_trainer.data.split import Split
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.training.sources import SourceSampler, batches_of


@pytest.fixture
def sources(dataset):
    """Two sources: 16 rows with CodeSearchNet's columns, and 8 rows with other columns."""
    own = Dataset.from_dict({"anchor": dataset["docstring"][16:], "positive": dataset["code"][16:]})
    return {"csn": dataset.select(range(16)), "own": own}


def drawn(sampling="proportional", strategy="random", epoch=0, **rest):
    sampler = SourceSampler({"a": 40, "b": 12, "c": 16}, sampling, 4, strategy, 0, **rest)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return batches


@pytest.mark.parametrize("strategy", ["random", "sequential", "no_duplicates", "group_by_length"])
def test_a_batch_comes_from_one_source(strategy):
    rest = {}
    if strategy == "no_duplicates":
        rest["text_ids"] = (np.arange(68) % 30,)
    if strategy == "group_by_length":
        rest["lengths"] = np.arange(68)
    batches = drawn(strategy=strategy, **rest)
    sources = [{int(np.searchsorted([40, 52], row, side="right")) for row in batch} for batch in batches]
    assert all(len(each) == 1 for each in sources)
    if strategy == "random":
        assert sorted(sum(batches, [])) == list(range(68))
        assert batches != drawn(epoch=1) and batches == drawn()
        assert sources != sorted(sources, key=min)


def test_the_shares_of_batches():
    available = {"a": 10, "b": 3, "c": 4}
    assert batches_of(available, "proportional") == [10, 3, 4]
    assert batches_of(available, "round_robin") == [3, 3, 3]
    assert [batch[0] // 4 >= 10 for batch in drawn("round_robin")] == [False, True, True] * 3
    assert batches_of({"own": 8, "general": 100}, "general=0.2") == [8, 2]
    assert batches_of({"own": 8, "general": 100}, "own=0.5,general=0.5") == [8, 8]
    assert batches_of(available, "a=0.3") == [3, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("d=0.5", "no source 'd'; the sources are a, b, c"),
        ("a=0.5,a=0.1", "list each source once"),
        ("a=2", "the share of a must be a number between 0 and 1"),
        ("a", "the share of a must be a number"),
        ("a=0.5,b=0.5", "the shares of all sources must add up to 1"),
        ("a=0.001", "has none from a"),
    ],
)
def test_shares_that_cannot_be(sampling, words):
    with refused(f"source_sampling={sampling}", words):
        batches_of({"a": 10, "b": 3, "c": 4}, sampling)


def test_a_source_with_too_few_rows_is_named():
    with refused("source b: 3 training rows do not fill one batch of 4"):
        SourceSampler({"a": 40, "b": 3}, "proportional", 4, "random", 0)


@pytest.mark.parametrize("options", [{"train_sampling_strategy": "similar"}, {"negatives_per_query": 2}])
@pytest.mark.parametrize("estimator", [BM25Estimator, InitialModelEstimator])
def test_neighbours_are_found_within_a_source(trainer_of, rows, options, estimator):
    own = [{"docstring": row["docstring"], "code": row["code"]} for row in rows[:8]]
    general = []
    for row in own * 2:
        text = f"{row['docstring']} {len(general)}"
        general.append({"docstring": text, "code": f"{row['code']} {len(general)}"})
    arguments = {"train_dataset": {"own": own, "general": general}}
    trainer = trainer_of(arguments=arguments, estimator=estimator(cache_dir=None), negative_ratio=1.0, **options)
    trainer.prepare_rows()
    prepared = trainer.ongoing.prepared
    if prepared.similar:
        found = prepared.similar["neighbours"]
        own_codes = found[:8]
        general_codes = found[8:]
    else:
        candidates = prepared.negatives.candidates
        own_codes = candidates[:8].indices
        general_codes = candidates[8:].indices
    assert own_codes.max() < 8 and (own_codes >= 0).any()
    assert general_codes[general_codes >= 0].min() >= 8


def test_joined_rows_keep_their_texts_answers_and_negatives(sources, profile):
    sources["own"] = sources["own"].add_column("negatives", [["new code"]] * 8)
    parts = {name: training_split(rows, name) for name, rows in sources.items()}
    split = join_sources({name: {"train": part} for name, part in parts.items()}, profile)["train"]
    assert split.sources == {"csn": (16, 16, 16), "own": (8, 9, 8)}
    assert split.judgments.pairs().tolist() == [[n, n] for n in range(24)]
    assert (split.judgments.relevant.toarray()[:, :24] == np.eye(24)).all()
    assert split.queries["docstring"][:16] == [" ".join(words) for words in sources["csn"]["docstring_tokens"]]
    assert split.corpus["code"][16:24] == sources["own"]["positive"][:]
    assert split.corpus["code"][split.judgments.negatives[20].indices[0]] == "new code"
    graded = Split.from_grades(parts["own"].queries, parts["own"].corpus, [(1, 0)], [2.0])
    mixed = join_sources({"csn": {"train": parts["csn"]}, "graded": {"train": graded}}, profile)["train"]
    assert mixed.judgments.relevant[17, 16] == 2 and mixed.judgments.pairs()[-1].tolist() == [17, 16]
    assert mixed.fingerprint() != split.fingerprint()


@pytest.mark.slow
def test_the_trainer_takes_a_dict_of_sources(trainer_of, sources):
    trainer = trainer_of(
        arguments={"train_dataset": sources, "eval_dataset": sources, "codebase": None},
        per_device_train_batch_size=4,
        max_steps=-1,
        num_train_epochs=1,
        source_sampling="own=0.5",
        loss="info_nce",
    )
    trainer.train()
    assert trainer.state.global_step == 4
    metrics = trainer.evaluate()
    assert metrics["eval_csn_pool_size"] == 16 and metrics["eval_own_pool_size"] == 8
    with refused("there is only one source"):
        trainer_of(source_sampling="own=0.5")


@pytest.mark.slow
def test_each_source_is_measured_by_itself(script, data_dir, rows, tmp_path):
    lines = [json.dumps({"question": row["docstring"], "answer": row["code"]}) + "\n" for row in rows]
    (tmp_path / "own.jsonl").write_text("".join(lines))
    options = {
        "data_dir": f"{data_dir}, {tmp_path / 'own.jsonl'}",
        "from_scratch": "32x1",
        "vocabulary_size": 300,
        "per_device_train_batch_size": 4,
        "loss": "info_nce",
        "source_sampling": "round_robin",
        "max_steps": 2,
        "language": "python",
    }
    code, printed = script(**options, output_dir=str(tmp_path / "whole"))
    assert code == 0, printed[-1]
    results = json.loads((tmp_path / "whole" / "all_results.json").read_text())
    own = [name for name in results if name.startswith("test-own_") and name.endswith("mrr")]
    assert own and results[f"test-{data_dir.name}_queries"] == 4
    assert "test-own" in (tmp_path / "whole" / "README.md").read_text()
