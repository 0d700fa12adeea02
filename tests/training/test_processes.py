"""Two processes compute the same as one process on the global batch, and never deadlock."""

import copy
import json
from pathlib import Path

import pytest
import torch
import worker
from safetensors.torch import load_file
from trainings import check_weights

from soft_trainer.encoders.export import export_encoder
from soft_trainer.options.fields import STRATEGIES
from soft_trainer.run.folder import newest_complete

WORKER = Path(worker.__file__)
LIMIT = 300  # seconds per case
LORA = {"lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
OWN = {"negatives_per_query": 1, "negative_ratio": 10.0}
SHORT = {"batch": 12, "max_steps": 4, "dataloader_drop_last": False, "train_sampling_strategy": "sequential"}
DISTILLED = {"initial_model": True, "distill_weight": 0.5, "distill_temperature": 3.0}
SCORED = {"scores": True, "weighting": "positive_aware", "temperature": 0.5, "distill_weight": 0.5, "batch": 6}
# Case -> options. "batch" is the size of the global batch.
CASES = {
    "plain": {"plain": True, "batch": 8},
    "plain_cached": {"plain": False, "batch": 8, "gradient_cache_chunk_size": 2, "ddp_broadcast_buffers": None},
    "short_last_batch": SHORT,
    "short_last_batch_cached": SHORT | {"gradient_cache_chunk_size": 3},
    "accumulated": {"batch": 6, "gradient_accumulation_steps": 2},
    "short_last_batch_accumulated": SHORT | {"gradient_accumulation_steps": 2},
    "short_last_batch_accumulated_cached": SHORT | {"gradient_accumulation_steps": 3, "gradient_cache_chunk_size": 2},
    "bce": {"batch": 6, "loss": "bce"},
    "kl_cached": {
        "batch": 6,
        "loss": "kl_regularization",
        "gradient_cache_chunk_size": 2,
        "gradient_accumulation_steps": 2,
    },
    "pool": {"batch": 8, "pool": 33, "max_steps": 1},
    "hard_negatives": OWN | {"batch": 8, "negatives_per_query": 2},
    "hard_negatives_cached": OWN | {"batch": 6, "false_negatives": "positives", "gradient_cache_chunk_size": 3},
    "distilled": OWN | {"batch": 8, "distill_weight": 0.5},
    "distilled_cached": DISTILLED | OWN | {"batch": 6, "gradient_cache_chunk_size": 2},
    "distilled_short_last_batch": DISTILLED | SHORT,
    "padded": {"batch": 8, "packing": "false", "pool": 33},
    "padded_short_last_batch": SHORT | {"packing": "false"},
    "padded_cached": SHORT | {"gradient_cache_chunk_size": 3, "packing": "false"},
    "padded_hard_negatives": OWN | {"batch": 6, "negatives_per_query": 2, "packing": "false"},
    "scores": SCORED,
    "scores_cached": SCORED | {"false_negatives": "positives", "gradient_cache_chunk_size": 3},
    "scores_padded": SCORED | {"packing": "false", "weighting": "linear", "loss": "soft_info_nce"},
    "merged": {"batch": 8, "merge_ratio": 0.5},
    "lora": {"batch": 8, "lora": LORA, "pool": 33, "ddp_find_unused_parameters": False},
    "lora_merged_cached": {"batch": 8, "lora": LORA, "merge_lora": True, "gradient_cache_chunk_size": 3},
    "matryoshka_cached": {"batch": 8, "matryoshka_dims": "32,8", "pool": 33, "gradient_cache_chunk_size": 3},
    **{f"strategy_{name}": {"batch": 6, "train_sampling_strategy": name} for name in STRATEGIES},
}
LOCAL = {"batch": 12, "gather_negatives": False, "train_sampling_strategy": "sequential", "dataloader_drop_last": True}
LOCALS = {
    "local": LOCAL,
    "local_distilled": LOCAL | DISTILLED,
    "local_hard_negatives": LOCAL | OWN | {"negatives_per_query": 2},
}
STARTS = ("fork", "forkserver", "spawn")  # how data workers are started
STARTED = {
    f"local_{start}": LOCAL | {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": start}
    for start in STARTS
}
TERMINATED = {"terminated": {"batch": 8, "terminated_at": 2}}  # the second process, before the last step
SHARDED_CASES = {
    "sharded": {"batch": 8, "pool": 33},
    "sharded_cached": {"batch": 8, "gradient_cache_chunk_size": 3},
    "sharded_packed": {"batch": 8, "pool": 33, "packing": "true"},
    "sharded_lora": {"batch": 8, "pool": 33, "lora": LORA},
    "sharded_initial_model": DISTILLED | OWN | {"batch": 8},
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "RobertaLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@pytest.fixture(scope="module")
def folder(_model, tokenizer, profile, rows, tmp_path_factory):
    """A folder with a tiny float64 encoder without dropout, and 37 rows: varied lengths, two languages, duplicates."""
    folder = tmp_path_factory.mktemp("processes")
    model = copy.deepcopy(_model).double()
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    export_encoder(model, tokenizer, profile, folder / "encoder")
    made = []
    for number in range(37):
        row = rows[number % 24] | {"url": f"row-{number}", "language": "go" if number % 3 else "ruby"}
        if number % 5 == 0:
            row |= {"code_tokens": row["code_tokens"] * 9}
        made.append(row)
    (folder / "rows.json").write_text(json.dumps(made))
    return folder


def results_of(folder: Path, name: str, processes: int) -> list[dict]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two(folder, launch, tmp_path_factory):
    """Returns a function that runs cases on two processes, and returns the folder of results."""

    def run(cases: dict, limit: float = LIMIT, **environment) -> Path:
        results = tmp_path_factory.mktemp("two")
        (results / "cases.json").write_text(json.dumps(cases))
        launch([WORKER, folder, results / "cases.json", limit], 2, limit + 5 * len(cases) + 30, **environment)
        return results

    return run


@pytest.fixture(scope="module")
def together(two):
    return two(CASES | LOCALS | STARTED | TERMINATED)


@pytest.fixture(scope="module")
def sharded(two):
    return two(SHARDED_CASES, **FSDP)


@pytest.fixture
def alone(folder, tmp_path):
    """Returns a function that runs a case on this process only, and returns the folder of results."""

    def run(name: str, options: dict) -> Path:
        worker.train(folder, name, options, tmp_path)
        return tmp_path

    return run


def weights_of(folder: Path) -> dict:
    """Reads the weights of the encoder, or of the adapter, in a folder."""
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else folder / "model.safetensors")


def check_equal(one: Path, two: Path, name: str) -> None:
    """Compares weights to 1e-10, losses (which `Trainer` sums in float32) to 1e-5, and metrics to 1e-9."""
    [expected], results = results_of(one, name, 1), results_of(two, name, 2)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert result["false negatives"] == expected["false negatives"]
        for metric, value in expected["metrics"].items():
            if metric.endswith(("mrr", "size")) or "recall" in metric:
                assert result["metrics"][metric] == pytest.approx(value, abs=1e-9)
    assert [a + b for a, b in zip(*(result["rows"] for result in results), strict=True)] == expected["rows"]
    weights = weights_of(one / name)
    assert {value.dtype for value in weights.values()} == {torch.float64}
    check_weights(weights_of(two / name), weights, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(together, alone, name):
    check_equal(alone(name, CASES[name]), together, name)


@pytest.mark.slow
def test_a_batch_of_fewer_rows_than_processes_was_among_them(together):
    for name in ("short_last_batch", "short_last_batch_cached"):
        assert [len(result["rows"][-1]) for result in results_of(together, name, 2)] == [1, 0]


@pytest.mark.slow
def test_local_negatives_are_those_of_two_accumulated_batches(together, alone):
    first, second = (result["rows"] for result in results_of(together, "local", 2))
    assert all(not set(a) & set(b) for a, b in zip(first, second, strict=True))
    # One process that accumulates both shards of a global batch computes the same gradients.
    for case in ("local", "local_hard_negatives", "local_distilled"):
        options = LOCALS[case] | {"batch": 6, "gradient_accumulation_steps": 2, "gather_negatives": None}
        check_weights(weights_of(together / case), weights_of(alone(case, options) / case), atol=1e-10)


@pytest.mark.slow
def test_all_processes_stop_after_a_checkpoint_if_one_is_terminated_in_the_last_step(together):
    assert results_of(together, "terminated", 2) == [{"code": 143, "steps": 3}] * 2
    assert newest_complete(together / "terminated").endswith("checkpoint-3")


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_workers_of_any_start_method_make_the_batches_of_their_process(together, name):
    for expected, result in zip(results_of(together, "local", 2), results_of(together, name, 2), strict=True):
        assert result["rows"] == expected["rows"]
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED_CASES)
def test_sharded_weights_train_and_evaluate_as_whole_ones(sharded, alone, name):
    assert results_of(sharded, name, 2)[0]["type"] == "FSDP"
    check_equal(alone(name, SHARDED_CASES[name]), sharded, name)
