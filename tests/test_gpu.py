"""On a GPU, packed passes equal padded ones, a step never waits, and a resumed run equals a whole one to the bit.

    CUDA_VISIBLE_DEVICES=0 pytest -n 0 -m gpu

On a CPU, `-m slow` tries the code of these tests. Several visible GPUs would need a launcher.
"""

import copy
import re

import pytest
import torch
from datasets import Dataset
from encoders.test_packing import PACKABLE, loss_and_gradients, make_model, make_profile, make_texts
from torch import Tensor
from trainings import check_weights, initial
from transformers import TrainerCallback

from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.encoding import moved, pad
from soft_trainer.encoders.packing import first_position, pack
from soft_trainer.encoders.passes import computes_bf16, decide_passes
from soft_trainer.options.model import ModelArguments

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
GPU = (pytest.mark.gpu, needs_cuda)
on_both = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]
)


# ---- Packed passes ----


def embeddings_and_gradients(model, profile, device: str, packed: bool, half: bool) -> list[Tensor]:
    """Computes the embeddings of ten texts, and the gradients of their InfoNCE as one vector."""
    texts = make_texts()
    inputs = [pack(texts, first=first_position(model))] if packed else [pad(texts[:5], 1), pad(texts[5:], 1)]
    with running(model, packed), torch.autocast(device, torch.bfloat16, enabled=half):
        chunks = [moved(chunk, torch.device(device)) for chunk in inputs]
        embeddings, _, gradients = loss_and_gradients(model, profile, *chunks)
    return [embeddings, torch.cat([gradients[name].flatten() for name in sorted(gradients)])]


def relative(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of the expected values."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("roberta", "cpu", marks=pytest.mark.slow),
        pytest.param("qwen3 with a sliding window", "cpu", marks=pytest.mark.slow),
        *(pytest.param(name, "cuda", marks=GPU) for name in PACKABLE),
    ],
)
def test_packed_passes_in_half_precision_are_as_exact_as_padded_ones(name, device):
    kind, settings, pooling = PACKABLE[name]
    model, profile = make_model(kind, settings), make_profile(pooling)
    if "LoRA" in name:
        add_lora(model, ModelArguments(lora_r=2, lora_dropout=0.0))
    model.to(device)
    assert decide_passes(model, profile, torch.device(device), "bf16").why_padded is None
    expected = embeddings_and_gradients(model, profile, device, packed=False, half=False)
    padded = embeddings_and_gradients(model, profile, device, packed=False, half=True)
    packed = embeddings_and_gradients(model, profile, device, packed=True, half=True)
    for what, exact, usual, found in zip(("embeddings", "gradients"), expected, padded, packed, strict=True):
        assert 0 < relative(found, exact) <= 2 * relative(usual, exact) + 1e-3, what


# ---- Training ----


@on_both
def test_half_precision_and_packed_passes_are_the_default(trainer_of, monkeypatch, capsys, device):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    if not computes_bf16(torch.device(device)):
        pytest.skip("this GPU emulates bf16")
    trainer = trainer_of(max_steps=1, use_cpu=device == "cpu")
    dtypes = set()
    layer = trainer.model.encoder.layer[0].intermediate.dense
    layer.register_forward_hook(lambda module, inputs, outputs: dtypes.add((outputs.device.type, outputs.dtype)))
    trainer.train()
    trainer.evaluate()
    assert trainer.passes.precision == "bf16" and trainer.passes.packed
    assert dtypes == {(device, torch.bfloat16)}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert re.search(r"\| precision +\| bf16 +\|", capsys.readouterr().err)


class NoWaits(TrainerCallback):
    """Makes each wait of the host for the GPU an error, from the fifth step to the end of the last."""

    watched = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 4:
            self.watched += 1
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            torch.cuda.set_sync_debug_mode("default")


HARD = {"train_sampling_strategy": "similar", "weighting": "positive_aware", "group_size": 2}
WAYS = {
    "InfoNCE": {"estimator": None},
    "padded": {"estimator": None, "packing": "false"},
    "BM25": {},
    "several positives": {"estimator": None, "false_negatives": "positives"},
    "hard batches": HARD,
    "gradient caching": {"estimator": None, "gradient_cache_chunk_size": 3},
}


@on_both
@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits_in_a_step(trainer_of, rows, monkeypatch, device, way):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    # One epoch has more steps than the training.
    many = [row | {"url": f"{row['url']}-{copied}"} for copied in range(5) for row in rows]
    options = {"max_steps": 12, "logging_strategy": "no", "dataloader_num_workers": 2, "use_cpu": device == "cpu"}
    if way == "hard batches":
        options["estimator"] = initial()
    trainer = trainer_of(arguments={"train_dataset": Dataset.from_list(many)}, **options | WAYS[way])
    watching = NoWaits()
    trainer.add_callback(watching)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 12 and watching.watched == 8


@pytest.mark.gpu
@needs_cuda
def test_a_wait_would_be_an_error():
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def restored(monkeypatch):
    """Restores what `full_determinism` sets for the whole process."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", cudnn.deterministic)
    monkeypatch.setattr(cudnn, "benchmark", cudnn.benchmark)
    yield
    torch.use_deterministic_algorithms(False)


@on_both
def test_a_resumed_run_has_the_weights_of_a_whole_one_to_the_bit(trainer_of, model, tmp_path, restored, device):
    options = {"full_determinism": True, "use_cpu": device == "cpu", "max_steps": 6, "learning_rate": 1e-3}
    options |= {"save_strategy": "steps", "save_steps": 3}
    checkpoints = {"whole": None, "whole again": None, "resumed": str(tmp_path / "whole" / "checkpoint-3")}
    weights = {}
    for name, checkpoint in checkpoints.items():
        folder = str(tmp_path / name)
        trainer = trainer_of(output_dir=folder, arguments={"model": copy.deepcopy(model)}, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights[name] = {key: value.detach().cpu().clone() for key, value in trainer.model.state_dict().items()}
    assert not torch.equal(next(iter(weights["whole"].values())), next(iter(model.state_dict().values())))
    check_weights(weights["whole again"], weights["whole"])
    check_weights(weights["resumed"], weights["whole"])
