"""Prints the settings, warnings about them, and progress lines if there is no progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.loading import profile_warnings
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.resolve import Plan
from soft_trainer.terminal import LINE_SECONDS, duration, print_on_main, table

SPEED = ("_runtime", "_per_second", "_pool_size")  # suffixes of metrics that do not measure the model


def banner(loss: Mapping, setup: Mapping, encoder: EncoderProfile, distributed_type: str) -> str:
    """Formats the training settings as a table.

    Args:
        loss, setup: the results of `loss_table` and `setup_table`.
    """
    rows = {**loss, **setup}
    rows["processes"] = f"{setup['processes']} ({distributed_type})"
    rows["score"] = f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling"
    note = "" if encoder.include_prompt else ", not pooled"
    for side, text in {"query": encoder.query_prefix, "code": encoder.code_prefix}.items():
        if text:
            rows[f"before every {side}"] = json.dumps(text) + note
    return table(("training", ""), list(rows.items()))


def warnings_of(args: TrainingArguments, plan: Plan, encoder: EncoderProfile, model: PreTrainedModel) -> list[str]:
    """Returns warnings about settings that probably do not have the intended effect."""
    warnings = plan.unread(args)
    if encoder.score_function == "cosine" and encoder.score_scale == 1:
        warnings.append(
            "warning: cosines are too close together for a softmax to learn from: set score_scale, 20 for example"
        )
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if half:
        name = str(half.pop()).removeprefix("torch.")
        warnings.append(
            f"warning: the weights themselves are {name}, so small updates are lost: load the model in "
            "float32 (--dtype float32) and use autocast instead, --bf16 true or --fp16 true"
        )
    warnings += profile_warnings(model, encoder)
    revision = None
    if has_adapter(model):
        revision = model.peft_config[active_adapter(model)].revision
    if revision and not getattr(args, "merge_lora", False):
        warnings.append(
            f"warning: the adapter belongs to revision {revision} of its base, but AutoModel and SentenceTransformer "
            "load the base's main branch: use load_encoder, or --merge_lora true"
        )
    dims = plan.dims
    size = model.config.hidden_size
    if dims and dims[0] < size:
        warnings.append(
            f"warning: matryoshka_dims leaves {size} out, so the dimensions after the first {dims[0]} do not learn: "
            f"add {size}, unless only shorter embeddings are wanted"
        )
    return warnings


class ProgressLines(TrainerCallback):
    """Prints step, loss, speed and remaining time at most every ten seconds, and metrics after each evaluation.

    Args:
        loss: returns the mean loss since its last call, or None if there was no step.
    """

    def __init__(self, loss: Callable[[], float | None]):
        self._loss = loss

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self._start = time.monotonic()
        self._first_step = state.global_step
        self._next_line = self._start + LINE_SECONDS

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a line if ten seconds have passed since the last one."""
        if time.monotonic() >= self._next_line and state.global_step < state.max_steps:
            left = self._seconds_a_step(state) * (state.max_steps - state.global_step)
            self._print(state, f"{duration(left)} left")
            self._next_line = time.monotonic() + LINE_SECONDS

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints the metrics. If any of them is an MRR, only MRRs are printed."""
        shown = {name: value for name, value in (metrics or {}).items() if not name.endswith(SPEED)}
        shown = {name: value for name, value in shown.items() if name.endswith("_mrr")} or shown
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        place = f"step {state.global_step:,} of {state.max_steps:,}: " if state.max_steps else ""
        print_on_main(f"{place}{numbers}")

    def on_train_end(self, args, state, control, **kwargs):
        """Prints the final line, with the duration of training."""
        self._print(state, f"trained in {duration(time.monotonic() - self._start)}")

    def _seconds_a_step(self, state) -> float:
        return (time.monotonic() - self._start) / max(state.global_step - self._first_step, 1)

    def _print(self, state, end: str) -> None:
        loss = self._loss()
        words = [] if loss is None else [f"loss {loss:.4g}"]
        seconds = self._seconds_a_step(state)
        if seconds < 1:
            words.append(f"{1 / seconds:.3g} steps/s")
        else:
            words.append(f"{seconds:.3g} s a step")
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join([*words, end])}")
