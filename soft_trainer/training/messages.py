"""Prints a table of the settings, warnings about them, and the progress where no terminal shows a bar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback

from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.loading import profile_warnings
from soft_trainer.options.refused import ignored_options
from soft_trainer.terminal import LINE_SECONDS, duration, print_on_main, shows_bars, table

SPEED = ("_runtime", "_per_second", "_pool_size")  # endings of metrics that say nothing about the model


def banner(trainer) -> str:
    """Returns the settings of a training as a table."""
    args = trainer.args
    plan = trainer.plan
    encoder = trainer.encoder
    prefixes = {"query": encoder.query_prefix, "code": encoder.code_prefix}
    note = "" if encoder.include_prompt else ", not pooled"
    rows = {
        "batch per process": plan.batch_size,
        "processes": f"{plan.processes} ({trainer.accelerator.distributed_type.value})",
        "codes a query meets (N)": plan.global_batch_size,
        "accumulated batches": args.gradient_accumulation_steps,
        "estimator": "none" if trainer.estimator is None else type(trainer.estimator).__name__,
        **plan.effective_loss,
        "batches": plan.train_sampling_strategy,
        **plan.effective_batches,
        "score": f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling",
        **{f"before every {side}": json.dumps(text) + note for side, text in prefixes.items() if text},
        "precision": trainer.precision,
        **adapter_settings(trainer.model),
    }
    if plan.dims:
        rows["trained dimensions"] = ", ".join(map(str, plan.dims))
    return table(("training", ""), list(rows.items()))


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """Returns the settings of the model's adapter for tables and records; {} without one."""
    if not has_adapter(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    targets = config.target_modules
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    names = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    settings = [f"{title} {getattr(config, name):g}" for name, title in names.items() if hasattr(config, name)]
    if not isinstance(targets, str):  # all-linear becomes the full names of all layers: too many for a table
        targets = ", ".join(sorted({name.rpartition(".")[2] for name in targets or ()}))
    return {"adapter": ", ".join([config.peft_type.value, *settings, targets]), "trained parameters": trained}


def warnings_of(trainer) -> list[str]:
    """Returns lines about settings that work, but probably not as intended."""
    plan = trainer.plan
    encoder = trainer.encoder
    model = trainer.model
    warnings = [*ignored_options(trainer.args), *plan.unread(trainer.args)]
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
    revision = model.peft_config[active_adapter(model)].revision if has_adapter(model) else None
    if revision and not getattr(trainer.args, "merge_lora", False):
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


def use_lines(trainer, loss: Callable[[], float | None] = lambda: None) -> None:
    """Replaces the progress bar of a `Trainer` by lines, unless a terminal shows bars and `disable_tqdm` is off.

    Args:
        loss: returns the mean loss since its last call, or None; then the lines show the loss that was logged last.
    """
    if trainer.args.disable_tqdm or not shows_bars():
        for bar in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(bar)
        trainer.add_callback(ProgressLines(loss))


class ProgressLines(TrainerCallback):
    """Prints step, loss, speed and time left, at most every ten seconds, and the metrics of each evaluation."""

    def __init__(self, loss: Callable[[], float | None]):
        self._loss = loss
        self._logged = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self._start = time.monotonic()
        self._first_step = state.global_step
        self._next_line = self._start + LINE_SECONDS

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Keeps the loss."""
        self._logged = (logs or {}).get("loss", self._logged)

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a line if ten seconds have passed."""
        if time.monotonic() >= self._next_line and state.global_step < state.max_steps:
            left = self._seconds_a_step(state) * (state.max_steps - state.global_step)
            self._print(state, f"{duration(left)} left")
            self._next_line = time.monotonic() + LINE_SECONDS

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints the metrics: MRR alone if there is one."""
        shown = {name: value for name, value in (metrics or {}).items() if not name.endswith(SPEED)}
        shown = {name: value for name, value in shown.items() if name.endswith("_mrr")} or shown
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        place = f"step {state.global_step:,} of {state.max_steps:,}: " if state.max_steps else ""
        print_on_main(f"{place}{numbers}")

    def on_train_end(self, args, state, control, **kwargs):
        """Prints the last line."""
        self._print(state, f"trained in {duration(time.monotonic() - self._start)}")

    def _seconds_a_step(self, state) -> float:
        return (time.monotonic() - self._start) / max(state.global_step - self._first_step, 1)

    def _print(self, state, end: str) -> None:
        mean = self._loss()
        loss = self._logged if mean is None else mean
        seconds = self._seconds_a_step(state)
        words = [] if loss is None else [f"loss {loss:.4g}"]
        words += [f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s a step", end]
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(words)}")
