"""Defines the parts of `gpu.py`. Each part runs in a separate process and writes its result as JSON.

A result has `tables` and `notes` to print, `values` for `gpu_page.py`, `goals` with what was measured, and `wrong`, a
sentence for each figure that is not only slow but wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from gpu_environment import one_gpu
from measuring import draw, finish, machine, matrix_rate, ratios, set_up, spread
from starting_point import StartingPoint, begin, label
from step import (
    Way,
    flash_attention,
    measure,
    our_trainer,
    ours,
    sentence_transformers,
    sentence_transformers_unpadded,
    sentence_transformers_without_cudnn,
    their_trainer,
)
from torch import Tensor, nn
from transformers import AttentionInterface, Trainer, TrainerCallback

from soft_trainer import BM25Estimator
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders import attention
from soft_trainer.encoders.packing import PACKED
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.system.files import write_json
from soft_trainer.system.packaged import BASE, located

PEER = "sentence-transformers"
SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"
SKIPPED = {"status": "skipped: no CUDA"}
HALF = "bfloat16"
CLOSE = 0.02  # relative difference of losses in half precision
SYNC = "synchronizing CUDA operation"  # in torch's warning about a wait
# Our goals for a step, keyed by batch.
MS_A_STEP = {64: "55", 256: "130"}
TIMES_AS_FAST = {64: "2.5", 256: "2.8"}


@dataclass(frozen=True)
class Scale:
    """The sizes of the parts."""

    size: str = "768x12"
    lengths: str = "128,256"
    batches: tuple[int, ...] = (64, 256)
    repetitions: int = 7
    batch: int = 64  # of all parts that train with one size
    steps: int = 45  # of a whole loop
    warm: int = 5  # steps that are not timed
    workers: int = 4
    large: int = 4096  # of gradient caching
    chunk: int = 256
    epoch: int = 134  # steps of the three precisions
    dropout_texts: int = 200
    roof: int | None = None  # rows of the matrices in `matrix_rate`, if not its default


TINY = Scale("64x2", "16,32", (4, 8), 2, 8, 4, 1, 1, 16, 4, 3, 20, 64)


class Setting:
    """Settings that all parts share: the arguments, the sizes, and the rows with the encoder."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.scale = TINY if arguments.tiny else Scale()
        self.work = Path(arguments.work)
        self.device = arguments.device

    def start(self, model: str | None = None, max_rows: int | None = None) -> StartingPoint:
        """Returns the rows and an encoder: `model` or, by default, random weights, which the first part writes."""
        folder = self.work / ("model" if model else "encoder")
        options = argparse.Namespace(**vars(self.arguments) | vars(self.encoder(model)))
        return begin(options, folder, max_rows)

    def encoder(self, model: str | None = None) -> argparse.Namespace:
        """Returns the options of `begin`."""
        return argparse.Namespace(model=model, size=self.scale.size, lengths=self.scale.lengths)

    def save(self, result: Mapping) -> None:
        """Writes the part's result so far, in case the part runs out of time."""
        write_json(self.work / f"{self.arguments.part}.json", result)

    def output(self, name: str) -> dict:
        """Returns the training arguments for an output folder that only this part uses."""
        return {"output_dir": str(self.work / f"{self.arguments.part}-{name}")}


class Result(dict):
    """A part's result."""

    def __init__(self):
        super().__init__(tables=[], notes=[], values={}, goals=[], wrong=[])

    def table(self, title: str, headers: list[str], rows: list[list]) -> None:
        """Adds a table."""
        self["tables"].append({"title": title, "headers": headers, "rows": rows})

    def goal(self, name: str, goal: str, figure: float) -> None:
        """Adds a figure with our goal for an H100."""
        self["goals"].append([name, goal, figure])

    def check(self, holds: bool, sentence: str) -> None:
        """Adds a sentence to `wrong` if a check does not hold."""
        if not holds:
            self["wrong"].append(sentence)
            self["notes"].append(f"WRONG: {sentence}")


# ---- Helpers ----


def tried(result: Result, name: str, call: Callable):
    """Calls a function and returns its result, or None after noting an error, so that the part continues."""
    try:
        return call()
    except Exception as error:  # a library that is missing or too old
        traceback.print_exc()
        result["notes"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        free()
        return None


def free() -> None:
    """Frees the memory of trainers that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gibibytes(number: int) -> float:
    """Converts bytes to GiB."""
    return number / 2**30


def peak(device: str, reset: bool = False) -> float | None:
    """Returns the peak memory of tensors since the last reset, in GiB, or None on a CPU."""
    if device == "cpu":
        return None
    found = gibibytes(torch.cuda.max_memory_allocated())
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of the expected tensor."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Clock(TrainerCallback):
    """Measures the steps of a training after the first `warm` ones, and collects the logged losses."""

    def __init__(self, device: str, warm: int):
        self.device, self.warm = device, warm
        self.first = self.begun = self.ended = 0.0
        self.steps = 0
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.first:
            self.first = time.perf_counter()
            self.warm += state.global_step  # after a resume
        if state.global_step == self.warm:
            finish(self.device)
            self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            finish(self.device)
            self.ended = time.perf_counter()
            self.steps = state.global_step - self.warm

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trained(trainer: Trainer, warm: int, resume: str | None = None) -> dict:
    """Trains, and returns examples/s, the seconds before the first step, losses and peak memory."""
    device = trainer.args.device.type
    clock = Clock(device, warm)
    trainer.add_callback(clock)
    peak(device, reset=True)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    rows = clock.steps * trainer.args.train_batch_size * trainer.args.world_size
    return {
        "examples/s": rows / (clock.ended - clock.begun),
        "before": clock.first - start,
        "losses": clock.losses,
        "GiB": peak(device),
    }


# ---- The step ----


def machine_and_versions(setting: Setting) -> Result:
    """Reports the machine, the versions, and whether the encoder is packed."""
    result = Result()
    lines = [["machine", machine(setting.device)], ["python", sys.version.split()[0]]]
    names = ("accelerate", "datasets", "flash-attn", "kernels", "triton")
    lines += [[name, version(name)] for name in names if importlib.util.find_spec(name.replace("-", "_"))]
    git = ["git", "-C", str(SCRIPT.parent), "log", "-1", "--format=%h %cd", "--date=short"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    lines.append(["commit", commit or "unknown"])
    if setting.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        lines.append(["GPU", f"capability {capability}, {gibibytes(properties.total_memory):.0f} GiB, {cuda}"])
    dtypes = (torch.float32, torch.bfloat16)
    rates = [f"{matrix_rate(setting.device, dtype, setting.scale.roof) / 1e12:,.1f}" for dtype in dtypes]
    lines.append(["TFLOP/s of matrix products in float32, bfloat16", ", ".join(rates)])
    start = setting.start()
    trainer = our_trainer(start, HALF)
    lines.append(["encoder", f"{label(setting.encoder())}; {trainer.model.num_parameters() / 1e6:,.0f} M weights"])
    lines.append(["passes", str(trainer.passes)])
    result.check(trainer.passes.packed, f"the encoder is {trainer.passes}")
    result.table("The machine", ["", ""], lines)
    return result


def step(setting: Setting, model: str | None = None) -> Result:
    """Times our step and theirs on the same batches."""
    result = Result()
    start = setting.start(model)
    makers = {
        ("ours", "float32"): lambda: ours(start, "float32"),
        ("ours", HALF): lambda: ours(start, HALF),
        ("ours padded", HALF): lambda: ours(start, HALF, packing="false"),
        (PEER, HALF): lambda: sentence_transformers(start, HALF),
        (f"{PEER} without cuDNN", HALF): lambda: sentence_transformers_without_cudnn(start, HALF),
    }
    if flash_attention():
        makers[f"{PEER} unpadded", HALF] = lambda: sentence_transformers_unpadded(start, HALF)
    else:
        result["notes"].append(f"{PEER} unpadded: neither flash-attn nor kernels is installed")
    made = {name: tried(result, name[0], maker) for name, maker in makers.items()}
    ways = {name: way for name, way in made.items() if way is not None}
    generator = np.random.default_rng(0)
    result["values"] = {"ms": {}, "ratio": {}}
    lines = []
    title = f"A training step: {label(setting.encoder(model))}, {setting.scale.repetitions} repetitions"
    headers = ["batch", "way", "precision", "loss", "ms a step", "ours is faster", "without collation"]
    result.table(title, headers, lines)
    losses: dict = {}
    for size in setting.scale.batches:
        batches = [draw(len(start.rows), size, generator) for _ in range(setting.scale.repetitions + 1)]
        if not losses:
            losses = {name: tried(result, name[0], partial(way.loss, batches[0])) for name, way in ways.items()}
            ways = {name: way for name, way in ways.items() if losses[name] is not None}
        measured = measure(ways, batches, lambda batch: {})
        base = measured.get(("ours", HALF))
        for name, found in measured.items():
            if found is None:
                lines.append([size, *name, None, "out of memory", None, None])
                continue
            whole = [1e3 * second for second in found["whole"]]
            faster = ratios(found["whole"], base["whole"]) if base and name != ("ours", HALF) else None
            bare = ratios(found["bare"], base["bare"]) if faster else None
            shown = [spread(each) if each else None for each in (faster, bare)]
            lines.append([size, *name, losses[name], spread(whole, 1), *shown])
        has_goals = model is None and size in MS_A_STEP
        if base:
            milliseconds = 1e3 * statistics.median(base["whole"])
            result["values"]["ms"][str(size)] = milliseconds
            if has_goals:
                result.goal(f"ms a step, batch {size}", MS_A_STEP[size], milliseconds)
            if measured.get((PEER, HALF)):
                faster = statistics.median(ratios(measured[PEER, HALF]["whole"], base["whole"]))
                result["values"]["ratio"][str(size)] = faster
                if has_goals:
                    result.goal(f"times as fast as {PEER}, batch {size}", TIMES_AS_FAST[size], faster)
        setting.save(result)
    found = [loss for loss in losses.values() if loss is not None]
    result["notes"].append(f"Loss of one batch without dropout: from {min(found):.6f} to {max(found):.6f}.")
    result.check(max(found) - min(found) <= CLOSE * max(found), "the losses of one batch differ")
    return result


def loops(setting: Setting) -> Result:
    """Times whole training loops with and without data workers."""
    result = Result()
    start = setting.start()
    scale = setting.scale
    figures = {}
    rates = {}
    lines = []
    result["values"] = {"examples/s": figures}
    headers = ["way", "workers", "examples/s", "s before the first step", "GiB"]
    result.table(f"{scale.steps} steps of {scale.batch}, {HALF}, the first {scale.warm} not timed", headers, lines)
    ways = {
        "InfoNCE": lambda options: our_trainer(start, HALF, **options),
        "BM25": lambda options: our_trainer(start, HALF, callbacks=[BM25Estimator(cache_dir=None)], **options, **SOFT),
        PEER: lambda options: their_trainer(start, HALF, **options),
    }
    for name, way in ways.items():
        for workers in (0, scale.workers):
            options = {"per_device_train_batch_size": scale.batch, "max_steps": scale.steps}
            options |= {"dataloader_num_workers": workers, "dataloader_drop_last": True, "logging_strategy": "no"}
            key = f"{name}, {workers} workers"
            found = tried(result, key, lambda way=way, options=options: trained(way(options), scale.warm))
            free()
            if found:
                figures[key] = found["examples/s"]
                rates[name, workers] = found["examples/s"]
                lines.append([name, workers, round(found["examples/s"]), found["before"], found["GiB"]])
                setting.save(result)
    own = rates.get(("InfoNCE", scale.workers))
    theirs = rates.get((PEER, scale.workers))
    if own and theirs:
        result.goal(f"times as fast as {PEER} in whole loops, {scale.workers} data workers", "1.5", own / theirs)
    return result


SOFT = {"loss": "soft_info_nce", "false_negatives": "mask"}


def packed(setting: Setting) -> Result:
    """Compares packed passes with padded ones: embeddings, gradients and dropout."""
    result = Result()
    start = setting.start()
    ways = {
        "float32, padded": ours(start, "float32", packing="false"),
        f"{HALF}, padded": ours(start, HALF, packing="false"),
        f"{HALF}, packed": ours(start, HALF),
    }
    result.check(ways[f"{HALF}, packed"].trainer.passes.packed, "nothing is packed")
    rows = draw(len(start.rows), setting.scale.batch, np.random.default_rng(1))
    found = {name: embedded(way, rows) for name, way in ways.items()}
    expected = next(iter(found.values()))
    lines = []
    for name, (embeddings, gradients, loss) in found.items():
        errors = [relative(embeddings, expected[0]), relative(gradients, expected[1])]
        lines.append([name, loss, *errors])
        found[name] = errors
    result.table(
        f"One batch of {setting.scale.batch} pairs without dropout; relative differences from the first line",
        ["way", "loss", "embeddings", "gradients"],
        lines,
    )
    padded_errors, packed_errors = found[f"{HALF}, padded"], found[f"{HALF}, packed"]
    for what, own, other in zip(("embeddings", "gradients"), packed_errors, padded_errors, strict=True):
        result.check(own <= 2 * other + 1e-3, f"packed {what} differ by {own:.1e}, padded ones by {other:.1e}")
    dropout(setting, ways[f"{HALF}, packed"], result)
    return result


def embedded(way: Way, rows: np.ndarray) -> tuple[Tensor, Tensor, float]:
    """Returns a batch's embeddings, all gradients as one vector, and the loss, without dropout."""
    trainer = way.trainer
    trainer.model.eval()
    with way.running():
        batch = trainer.weighed(way.collate(rows))
        loss, embeddings = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        loss.backward()
    return torch.cat([embeddings[side] for side in SIDES]).detach(), taken(trainer.model), float(loss.detach())


def taken(model: torch.nn.Module) -> Tensor:
    """Removes all gradients from a model and returns them as one vector."""
    gradients = [weight.grad.flatten().float() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return torch.cat(gradients)


def dropout(setting: Setting, way: Way, result: Result, rate: float = 0.1) -> None:
    """Tests the dropout of packed attention on constant queries and keys, and the rate that the model passes to it.

    The values are unit vectors, so the outputs are the attention probabilities of each token of a text.
    """
    device = torch.device(setting.device)
    size = 64
    lengths = np.random.default_rng(0).integers(3, size + 1, setting.scale.dropout_texts)
    borders = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)).to(device)
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
    heads = 12
    equal = torch.zeros(1, heads, len(positions), size, dtype=torch.bfloat16, device=device)
    values = torch.nn.functional.one_hot(positions, size).to(equal.dtype).expand(1, heads, -1, -1).contiguous()
    module = torch.nn.Module()
    module.is_causal = False
    own = torch.from_numpy(np.repeat(lengths, lengths)).to(device)  # the length of each token's text
    inside = (torch.arange(size, device=device) < own[:, None])[:, None].expand(-1, heads, -1)
    lines = []
    for each in (0.0, rate):
        outputs, _ = attention.attend(
            module, equal, equal, values, None, each, 1.0, cu_seq_lens_q=borders, max_length_q=int(lengths.max())
        )
        weights = outputs[0].float() * own[:, None, None]  # 1 / (1 - rate) where a probability is kept, otherwise 0
        zeros = float((weights[inside] == 0).float().mean())
        mean = float(weights[inside].mean())
        outside = float(weights[~inside].abs().max())
        lines.append([each, zeros, mean, outside])
        count = int(inside.sum())
        expected = 6 * (each * (1 - each) / count) ** 0.5 + 1e-3
        rounded = min(round(each * 256), 255) / 256  # as the kernels do
        result.check(abs(zeros - rounded) <= expected, f"dropout {each} sets {zeros:.4f} of the probabilities to 0")
        result.check(abs(mean - 1) <= 10 * expected, f"dropout {each} changes the mean probability to {mean:.4f}")
        result.check(outside == 0, f"a token attends to other texts: {outside}")
    result.table(
        f"Packed attention of equal tokens, {len(lengths)} texts, {heads} heads",
        ["dropout", "probabilities that are 0", "mean, times the length", "largest outside the text"],
        lines,
    )
    seen = collections.defaultdict(set)

    def watching(module, *args, **kwargs):
        seen[module.training].add(kwargs.get("dropout", 0.0))
        return attention.attend(module, *args, **kwargs)

    AttentionInterface.register(PACKED, watching)
    try:
        rows = draw(len(way.trainer.train_dataset), setting.scale.batch, np.random.default_rng(2))
        way.step(rows)
        way.loss(rows)
    finally:
        AttentionInterface.register(PACKED, attention.attend)
    shown = {training: sorted(rates) for training, rates in seen.items()}
    result["notes"].append(f"Dropout of attention in training {shown.get(True)}, in evaluation {shown.get(False)}.")
    expected = {True: [way.trainer.model.config.attention_probs_dropout_prob], False: [0.0]}
    result.check(shown == expected, f"the model passes the dropout {shown}, not {expected}")


class Waits(TrainerCallback):
    """Counts the calls in which the host waits for the GPU, from the beginning of one step to the end of another."""

    def __init__(self, first: int, steps: int):
        self.first, self.last = first, first + steps
        self.calls: collections.Counter = collections.Counter()
        self.watching = ExitStack()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.first:
            self.watching.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")
            self.watching.callback(torch.cuda.set_sync_debug_mode, "default")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.last:
            self.watching.close()

    def note(self, message, *_):
        """Replaces `warnings.showwarning`."""
        if SYNC in str(message):
            self.calls[line_of_call()] += 1


def line_of_call() -> str:
    """Returns the innermost line that waits, followed by our innermost line if they differ."""
    root = str(SCRIPT.parent)
    lines = []
    for frame in traceback.extract_stack()[:-2]:
        name = frame.filename.split("site-packages/")[-1].removeprefix(f"{root}/")
        if Path(frame.filename).name != "warnings.py":
            lines.append(f"{name}:{frame.lineno}")
    own = [line for line in lines if line.startswith("soft_trainer/")]
    return " from ".join(dict.fromkeys([lines[-1], *own[-1:]]))


def waits(setting: Setting) -> Result | dict:
    """Counts the waits for the GPU in a step of real training."""
    if setting.device == "cpu":
        return SKIPPED
    result = Result()
    start = setting.start()
    scale = setting.scale
    options = {"per_device_train_batch_size": scale.batch, "logging_strategy": "no", "dataloader_drop_last": True}
    options |= {"max_steps": 2 * scale.warm + 8, "dataloader_num_workers": 2}
    static = dataclasses.replace(start, folder=Path(located(BASE)))
    hard = {"train_sampling_strategy": "similar", "weighting": "positive_aware"}
    ways = {
        "InfoNCE": lambda: our_trainer(start, HALF, **options),
        "InfoNCE, padded": lambda: our_trainer(start, HALF, packing="false", **options),
        "BM25": lambda: our_trainer(start, HALF, callbacks=[BM25Estimator(cache_dir=None)], **options | SOFT),
        "several positives": lambda: our_trainer(start, HALF, **options | {"false_negatives": "positives"}),
        "hard batches": lambda: our_trainer(
            start, HALF, callbacks=[InitialModelEstimator(cache_dir=None)], **options | SOFT | hard
        ),
        "gradient cache": lambda: our_trainer(start, HALF, gradient_cache_chunk_size=scale.batch // 4, **options),
        "static": lambda: our_trainer(static, "float32", **options, **setting.output("static")),
        PEER: lambda: their_trainer(start, HALF, **options),
    }
    lines = []
    counts = {}
    result["values"] = {"waits": counts}
    result.table(f"Waits for the GPU in a step, mean of 8 steps of {scale.batch}", ["way", "waits", "call"], lines)
    for name, way in ways.items():
        counter = Waits(scale.warm, 8)

        def train(way=way, counter=counter):
            trainer = way()
            trainer.add_callback(counter)
            try:
                trainer.train()
            finally:
                counter.watching.close()
            return True

        if not tried(result, name, train):
            continue
        free()
        steps = counter.last - counter.first
        counts[name] = sum(counter.calls.values()) / steps
        lines.append([name, counts[name], None])
        lines += [[None, number / steps, call] for call, number in counter.calls.most_common(12)]
        if name == "InfoNCE":
            result.goal("waits for the GPU in a step", "0", counts[name])
        setting.save(result)
    return result


def memory(setting: Setting) -> Result | dict:
    """Measures the peak memory of a step."""
    if setting.device == "cpu":
        return SKIPPED
    result = Result()
    start = setting.start()
    generator = np.random.default_rng(0)
    ways = {
        "ours": lambda: ours(start, HALF),
        "ours padded": lambda: ours(start, HALF, packing="false"),
        PEER: lambda: sentence_transformers(start, HALF),
    }
    figures = {}
    lines = []
    result["values"] = {"GiB": figures}
    headers = ["batch", "way", "peak, GiB", "before, GiB"]
    result.table(f"Peak memory of three steps: {label(setting.encoder())}, {HALF}", headers, lines)
    scale = setting.scale
    for size in scale.batches:
        peaks = {}
        batches = [draw(len(start.rows), size, generator) for _ in range(3)]
        for name, way in ways.items():
            free()
            before = gibibytes(torch.cuda.memory_allocated())
            peak(setting.device, reset=True)
            found = tried(result, name, lambda way=way, batches=batches: peak_of(way(), batches))
            if found is not None:
                figures[f"{name} {size}"] = found
                peaks[name] = found
                lines.append([size, name, found, before])
                setting.save(result)
        if size == scale.batch and {"ours", PEER} <= peaks.keys():
            title = f"peak memory, batch {size}, divided by that of {PEER}"
            result.goal(title, "1 or less", peaks["ours"] / peaks[PEER])
    return result


def peak_of(way: Way, batches: list[np.ndarray]) -> float:
    """Returns the peak memory of some steps, in GiB, and then frees the trainer."""
    for rows in batches:
        way.step(rows)
    found = peak(way.device)
    way.trainer.accelerator.free_memory()
    return found


# ---- Around the step ----


def launcher(processes: int, precision: str, device: str) -> list[str]:
    """Returns the command `accelerate launch` with its options."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", precision]
    command += ["--num_processes", str(processes), "--num_machines", "1", "--dynamo_backend", "no"]
    if processes > 1:
        command += ["--multi_gpu", "--main_process_port", str(free_port())]
    elif device == "cpu":
        command += ["--cpu"]
    return command


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def precisions(setting: Setting) -> Result:
    """Runs the training script under `accelerate launch` in three precisions."""
    result = Result()
    scale = setting.scale
    processes = setting.arguments.processes
    query_length, code_length = scale.lengths.split(",")
    figures = {}
    lines = []
    result["values"] = {"seconds": figures}
    title = f"run_codesearch.py under accelerate launch, {processes} processes, {scale.epoch} steps of {scale.batch}"
    result.table(title, ["precision", "s of training", "loss", "test MRR", "s of the command"], lines)
    for precision in ("bf16", "fp16", "float32"):
        if precision == "fp16" and setting.device == "cpu":
            continue
        own = setting.output(precision)
        options = own | {
            "data_dir": setting.arguments.data_dir,
            "from_scratch": scale.size,
            "query_length": query_length,
            "code_length": code_length,
            "per_device_train_batch_size": scale.batch // processes,
            "max_steps": scale.epoch,
            "save_strategy": "no",
            "eval_strategy": "no",
            "load_best_model_at_end": "false",
            "report_to": "none",
            "lexical": "false",
        }
        if precision == "float32":
            options["bf16"] = "false"  # the launcher's "no" is no choice
        if setting.device == "cpu":
            options["use_cpu"] = "true"
        command = launcher(processes, "no" if precision == "float32" else precision, setting.device)
        command.append(str(SCRIPT))
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        print(" ".join(command), flush=True)
        start = time.perf_counter()
        code = subprocess.run(command).returncode
        wall = time.perf_counter() - start
        if code != 0:
            result["notes"].append(f"{precision}: exit code {code}: {' '.join(command)}")
            result.check(False, f"the training in {precision} failed")
            continue
        results = json.loads((Path(own["output_dir"]) / "all_results.json").read_text())
        figures[precision] = results["train_runtime"]
        lines.append([precision, results["train_runtime"], results["train_loss"], results["test_mrr"], wall])
        setting.save(result)
    if {"bf16", "float32"} <= figures.keys():
        result.goal("times as fast in bf16 as in float32", "2", figures["float32"] / figures["bf16"])
    return result


def cache(setting: Setting) -> Result:
    """Measures the memory of gradient caching, and compares its loss and gradients with a single pass."""
    result = Result()
    start = setting.start()
    scale = setting.scale
    rows = draw(len(start.rows), scale.large, np.random.default_rng(0))
    few = rows[: scale.batch]
    cached = {"gradient_cache_chunk_size": scale.chunk}
    lines = []
    one = ours(start, HALF)
    peak(setting.device, reset=True)
    second = min(one.step(few)[0] for _ in range(3))
    lines.append([scale.batch, "one piece", second, peak(setting.device, reset=True)])
    way = ours(start, HALF, **cached)
    second = min(way.step(rows)[0] for _ in range(2))
    lines.append([scale.large, f"chunks of {scale.chunk}", second, peak(setting.device, reset=True)])
    title = f"Gradient caching: {label(setting.encoder())}, {HALF}"
    result.table(title, ["batch", "passes", "s a step", "peak, GiB"], lines)
    for each in (one, way):  # both encoders start again from the same weights, without dropout
        each.trainer.model.load_state_dict(our_trainer(start, HALF).model.state_dict())
        without_dropout(each.trainer.model)
    chunked = ours(start, HALF, gradient_cache_chunk_size=max(scale.batch // 4, 1))
    without_dropout(chunked.trainer.model)
    error = relative(gradients_of(chunked, few)[0], gradients_of(one, few)[0])
    result["notes"].append(f"Gradients of {scale.batch} pairs: relative difference {error:.1e}.")
    result.check(error <= 3 * CLOSE, f"the gradients of {scale.batch} pairs differ by {error:.1e}")
    in_chunks = gradients_of(way, rows)[1]
    free()
    whole = tried(result, f"the loss of {scale.large} pairs in one piece", partial(one.loss, rows))
    if whole is not None:
        losses = f"{in_chunks:.6f} in chunks, {whole:.6f} in one piece"
        result["notes"].append(f"Loss of {scale.large} pairs: {losses} (forward pass only).")
        result.check(abs(in_chunks - whole) <= CLOSE * whole, f"the losses of {scale.large} pairs differ: {losses}")
    return result


def gradients_of(way: Way, rows: np.ndarray) -> tuple[Tensor, float]:
    """Returns all gradients of a training step as one vector, and its loss."""
    trainer = way.trainer
    with way.running():
        loss = trainer.training_step(trainer.model, way.collate(rows))
    return taken(trainer.model), float(loss)


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout to 0, so that two runs compute the same result."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def resume(setting: Setting) -> Result:
    """Resumes a run under `full_determinism`, and compares it bit by bit with an uninterrupted run."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # cuBLAS reads it when it starts
    result = Result()
    start = setting.start()
    scale = setting.scale
    half = 2 * scale.warm
    options = {
        "full_determinism": True,
        "per_device_train_batch_size": scale.batch,
        "max_steps": 2 * half,
        "save_strategy": "steps",
        "save_steps": half,
        "logging_strategy": "no",
        "seed": 7,
    }
    estimator = {"callbacks": [BM25Estimator(cache_dir=None)]}

    def weights(name: str, checkpoint: str | None = None) -> tuple[dict, dict]:
        own = options | SOFT | setting.output(name)
        trainer = our_trainer(start, HALF, **estimator, **own)
        found = trained(trainer, 1, checkpoint)
        return found, {key: value.detach().cpu().clone() for key, value in trainer.model.state_dict().items()}

    lines = []
    figures, expected = weights("whole")
    lines.append(["whole", round(figures["examples/s"]), None])
    checkpoint = f"{setting.output('whole')['output_dir']}/checkpoint-{half}"
    for name, resumed in (("whole again", None), ("resumed", checkpoint)):
        figures, found = weights(name, resumed)
        difference = max(float((found[key] - value).abs().max()) for key, value in expected.items())
        lines.append([name, round(figures["examples/s"]), difference])
        result.check(difference == 0, f"the weights of the run {name} differ by {difference:.1e}")
    title = f"full_determinism: {2 * half} steps of {scale.batch} with BM25, {HALF}; resumed after {half}"
    result.table(title, ["run", "examples/s", "largest difference of a weight"], lines)
    return result


def processes(setting: Setting) -> Result:
    """Compares several processes with one, on the same global batches, without dropout."""
    result = Result()
    scale = setting.scale
    setting.start()
    wanted = setting.arguments.processes
    number = max(wanted, 2)
    lines = []
    losses = {}
    for count in (1, number):
        spec = {
            "name": f"on-{count}",
            "backend": "gloo" if wanted == 1 else None,
            "batch": scale.batch // count,
            "steps": scale.epoch // 12 + 3,
        }
        found = launched(setting, count, spec, shares=wanted == 1)
        losses[count] = found["losses"]
        lines.append([count, round(found["examples/s"]), found["losses"][0], found["losses"][-1], found["GiB"]])
    where = "on one device, by gloo" if wanted == 1 else f"on {number} GPUs, by accelerate launch"
    headers = ["processes", "examples/s", "first loss", "last loss", "GiB of the first process"]
    result.table(f"Global batches of {scale.batch}, {where}, {HALF}, no dropout", headers, lines)
    pairs = zip(losses[1], losses[number], strict=True)
    difference = max(abs(own - other) / own for own, other in pairs)
    result["notes"].append(f"Largest relative difference of a step's loss: {difference:.1e}.")
    result.check(abs(losses[1][0] - losses[number][0]) <= CLOSE * losses[1][0], "the first losses differ")
    return result


def launched(setting: Setting, number: int, spec: Mapping, shares: bool) -> dict:
    """Trains in `number` processes and returns the result of the first one.

    Args:
        shares: True if all processes use the same device, which no launcher does.
    """
    own = [*sys.argv, "--training", json.dumps(spec)]  # the script that runs this part
    if not shares and number > 1:
        subprocess.run([*launcher(number, "bf16", setting.device), *own], check=True)
        return json.loads((setting.work / f"{spec['name']}.json").read_text())
    port = str(free_port())
    started = []
    for rank in range(number):
        environment = os.environ | one_gpu()
        if number > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(subprocess.Popen([sys.executable, *own], env=environment))
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError(f"exit codes of {number} processes: {codes}")
    return json.loads((setting.work / f"{spec['name']}.json").read_text())


def train_here(setting: Setting, spec: Mapping) -> None:
    """Trains in this process, which may be one of several. The first process writes the result."""
    from soft_trainer.system import distributed

    options = {
        "per_device_train_batch_size": spec["batch"],
        "max_steps": spec["steps"],
        "logging_steps": 1,
        "ddp_backend": spec["backend"] if "RANK" in os.environ else None,
        "dataloader_num_workers": 0,
    }
    options |= setting.output(spec["name"])
    trainer = our_trainer(setting.start(), HALF, **options)
    without_dropout(trainer.model)
    found = trained(trainer, 2)
    if distributed.rank_and_world_size()[0] == 0:
        write_json(setting.work / f"{spec['name']}.json", found)
    distributed.close()


def estimators(setting: Setting) -> Result:
    """Trains with a teacher, with the initial model and hard batches, and with a static encoder."""
    result = Result()
    start = setting.start()
    scale = setting.scale
    steps = scale.steps // 2
    options = {"per_device_train_batch_size": scale.batch, "max_steps": steps, "logging_steps": 1}
    options |= {"dataloader_num_workers": scale.workers, "learning_rate": 5e-5}
    hard = {"train_sampling_strategy": "similar", "weighting": "positive_aware", "group_size": scale.batch // 4}
    static = dataclasses.replace(start, folder=Path(located(BASE)))
    ways = {
        "InfoNCE": lambda: our_trainer(start, HALF, **options),
        "a teacher": lambda: our_trainer(start, HALF, teacher=str(start.folder), **options),
        "initial_model, hard batches": lambda: our_trainer(
            start, HALF, callbacks=[InitialModelEstimator(cache_dir=None)], **options | SOFT | hard
        ),
        "static": lambda: our_trainer(
            static, "float32", **options | {"learning_rate": 3e-3} | setting.output("static")
        ),
    }
    lines = []
    headers = ["way", "s before the first step", "examples/s", "first losses", "last losses", "GiB"]
    result.table(f"{steps} steps of {scale.batch}; a loss is read in each step", headers, lines)
    for name, way in ways.items():
        found = tried(result, name, lambda way=way: trained(way(), scale.warm))
        free()
        result.check(found is not None, f"{name} failed")
        if found:
            losses = found["losses"]
            ends = [statistics.mean(part) for part in (losses[: scale.warm], losses[-scale.warm :])]
            lines.append([name, found["before"], round(found["examples/s"]), *ends, found["GiB"]])
            setting.save(result)
    return result


PARTS: dict[str, Callable[[Setting], Mapping]] = {
    "machine": machine_and_versions,
    "step": step,
    "step_of_model": lambda setting: step(setting, setting.arguments.model),
    "loops": loops,
    "packed": packed,
    "waits": waits,
    "memory": memory,
    "precisions": precisions,
    "cache": cache,
    "resume": resume,
    "processes": processes,
    "estimators": estimators,
}


def run_here(arguments: argparse.Namespace) -> None:
    """Runs one part, or one process of a part, and writes its result."""
    set_up(1 if arguments.tiny else len(os.sched_getaffinity(0)))
    del os.environ["TOKENIZERS_PARALLELISM"]  # by default, data workers tokenise without threads
    setting = Setting(arguments)
    if setting.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device; use --device cpu --tiny to try the script")
    if arguments.training:
        train_here(setting, json.loads(arguments.training))
    else:
        setting.save(PARTS[arguments.part](setting))
