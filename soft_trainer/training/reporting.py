"""Describes a training run's settings, progress and results, for the terminal, `run.json` and the model card."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from huggingface_hub import get_token
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback, TrainerState, TrainingArguments

from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.encoding import dimensions
from soft_trainer.encoders.hub_files import public_name
from soft_trainer.encoders.loading import profile_warnings
from soft_trainer.encoders.packing import Passes
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.defaults import LORA_RATE
from soft_trainer.options.fields import TrainingOptions
from soft_trainer.options.option_spec import unread_lines
from soft_trainer.options.resolve import Plan
from soft_trainer.terminal import LINE_SECONDS, duration, print_on_main, table

# The options behind some rows of the table before training. Other rows have the name of their option.
OPTION_OF = {
    "pairs per batch and process": "per_device_train_batch_size",
    "batches": "train_sampling_strategy",
    "learning rate": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "warm-up": "warmup_steps",
}
SPEED = ("_runtime", "_per_second", "_pool_size")  # suffixes of metrics that do not measure the model


def loss_table(plan: Plan, estimator) -> dict[str, object]:
    """Returns the loss with its settings, the estimator, any teacher and Matryoshka dimensions, keyed by label."""
    name = None if estimator is None else type(estimator).__name__
    loss = {"loss": plan.criterion.loss, "estimator": name}
    if plan.options.teacher is not None:
        loss["teacher"] = public_name(plan.options.teacher)
    if plan.dims:
        loss["dimensions"] = list(plan.dims)
    return loss | plan.criterion.effective


def setup_table(
    args: TrainingArguments,
    plan: Plan,
    model: PreTrainedModel,
    passes: Passes,
    negatives: int = 0,
    pairs: int | None = None,
) -> dict[str, object]:
    """Returns the settings of batches, precision, adapter, learning rate, epochs and seed, keyed by label.

    Args:
        passes: how forward passes run.
        negatives: the number of hard negatives per query.
        pairs: the number of training pairs that may form a batch, if known. A batch has no more pairs than these.
    """
    in_all = plan.batch_size * plan.processes
    if pairs is not None:
        in_all = min(in_all, pairs)
    of_process = -(-in_all // plan.processes)
    setup = {
        "pairs per batch and process": of_process,
        "processes": plan.processes,
        "functions compared per query": in_all if plan.gathers else of_process,
    }
    if args.gradient_accumulation_steps > 1:
        setup["accumulated batches"] = args.gradient_accumulation_steps
    setup["batches"] = plan.train_sampling_strategy
    setup |= plan.effective_batches
    if negatives:
        setup["negatives_per_query"] = negatives
    setup["precision"] = passes.precision
    setup["forward passes"] = str(passes)
    setup |= adapter_settings(model)
    setup["learning rate"] = args.learning_rate
    if args.max_steps > 0:
        setup["steps"] = args.max_steps
    else:
        setup["epochs"] = args.num_train_epochs
    setup["warm-up"] = args.warmup_steps  # a part of all steps if it is below 1, otherwise the number of steps
    setup["seed"] = args.seed
    return setup


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """Returns the adapter's type, settings and number of trained parameters, or {} if there is no adapter."""
    if not has_adapter(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    parts = [config.peft_type.value]
    for name, title in {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}.items():
        if hasattr(config, name):
            parts.append(f"{title} {getattr(config, name):g}")
    targets = config.target_modules
    if not isinstance(targets, str):  # peft expands "all-linear" to the full names of all layers, too many for a table
        targets = ", ".join(sorted({name.rpartition(".")[2] for name in targets or ()}))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"adapter": ", ".join([*parts, targets]), "trained parameters": trained}


def course_table(args: TrainingArguments, state: TrainerState) -> dict[str, object]:
    """Returns the numbers of finished epochs and steps, and the duration unless the run resumed from a checkpoint."""
    # `max_steps` or early stopping may make these fewer than planned.
    course = {"epochs": round(state.epoch, 2), "steps": state.global_step}
    if best := best_step(args, state):
        course["step of the saved weights"] = best
    seconds = training_numbers(state).get("train_runtime")
    if seconds is not None and args.resume_from_checkpoint is None:
        course["train runtime, s"] = round(seconds, 1)
        course["seconds per step, with evaluations"] = round(seconds / max(state.global_step, 1), 4)
    return course


def training_numbers(state: TrainerState) -> dict[str, float]:
    """Returns the metrics logged when training ended, such as `train_loss` and `train_runtime`, or an empty dict."""
    for entry in reversed(state.log_history):
        if "train_runtime" in entry:
            return {name: value for name, value in entry.items() if name != "step"}
    return {}


def best_step(args: TrainingArguments, state: TrainerState) -> int | None:
    """Returns the step of the best checkpoint if its weights were loaded at the end, or None."""
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        return state.best_global_step
    return None


def measured_results(
    evaluations: Iterable[tuple[int, bool, Mapping]], final_step: int, merged: bool
) -> dict[str, dict[str, dict]]:
    """Returns the metrics of each evaluation set as `{set: {"untrained" | "trained": metrics}}`.

    Args:
        evaluations: for each evaluation, its step, whether it ran during training, and its metrics.
        final_step: the step of the final weights.
        merged: True if the final weights are merged, so that no evaluation during training measured them.
    """
    results: dict[str, dict[str, dict]] = {}
    for step, in_training, logged in evaluations:
        if step == 0:
            system = "untrained"
        elif not in_training or (step == final_step and not merged):
            system = "trained"
        else:
            continue
        for name in logged:
            if name.endswith("_pool_size"):
                prefix = name.removesuffix("_pool_size")
                metrics = {key.removeprefix(f"{prefix}_"): value for key, value in logged.items()}
                results.setdefault(prefix.removeprefix("eval_"), {})[system] = metrics
    return results


def banner(
    args: TrainingArguments, loss: Mapping, setup: Mapping, encoder: EncoderProfile, distributed_type: str
) -> str:
    """Formats the training settings as a table to print before training, with who chose each (see `apply_defaults`).

    Args:
        loss, setup: the results of `loss_table` and `setup_table`.
        distributed_type: the kind of parallelism, such as `MULTI_GPU`.
    """
    rows = {**loss, **setup}
    if getattr(args, "precision_is_default", False):
        rows["precision"] += f" (default: this {args.device.type.replace('cuda', 'gpu').upper()} computes in it)"
    if setup["processes"] > 1:
        rows["processes"] = f"{setup['processes']} ({distributed_type})"
    rows["score"] = f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling"
    note = "" if encoder.include_prompt else ", not pooled"
    for side, text in {"query": encoder.query_prefix, "code": encoder.code_prefix}.items():
        if text:
            rows[f"before every {side}"] = json.dumps(text) + note
    origins = getattr(args, "origins", None)
    if origins is None:  # plain `TrainingArguments`
        return table(("training", ""), list(rows.items()))
    lines = []
    for label, value in rows.items():
        lines.append((label, value, origins.get(OPTION_OF.get(label, label))))
    return table(("training", "", "chosen by"), lines)


def warnings_of(args: TrainingArguments, plan: Plan, encoder: EncoderProfile, model: PreTrainedModel) -> list[str]:
    """Returns warnings about training settings that probably do not have the intended effect."""
    warnings = []
    if isinstance(args, TrainingOptions):
        warnings += unread_lines(args, plan.unread | args.unread)
    elif plan.criterion.loss == "info_nce":
        warnings.append(
            f"{type(args).__name__} without an estimator train with InfoNCE, where SoftInfoNCETrainingArguments train "
            "with Soft-InfoNCE; pass these, or an estimator in callbacks"
        )
    if args.hub_model_id and not args.push_to_hub and not (args.hub_token or get_token()):
        warnings.append(f"warning: hub_model_id={args.hub_model_id}: log in with `hf auth login` before pushing")
    if encoder.score_function == "cosine" and encoder.score_scale == 1:
        warnings.append(
            "warning: unscaled cosines differ too little for a softmax; set score_scale, for example to 20"
        )
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if half:
        name = str(half.pop()).removeprefix("torch.")
        warnings.append(
            f"warning: the trained weights are stored in {name}, so small updates are lost; load the model in float32 "
            "(dtype=float32) and set bf16=True or fp16=True instead"
        )
    if has_adapter(model) and args.learning_rate <= LORA_RATE / 4:
        warnings.append(
            f"warning: learning_rate={args.learning_rate:g} is far below 1e-4 to 5e-4, the usual rates for an adapter"
        )
    warnings += profile_warnings(model, encoder)
    revision = None
    if has_adapter(model):
        revision = model.peft_config[active_adapter(model)].revision
    if revision and not getattr(args, "merge_lora", False):
        warnings.append(
            f"warning: the adapter belongs to revision {revision} of its base, but AutoModel and SentenceTransformer "
            "load the base's main branch; use load_encoder, or set merge_lora=True"
        )
    dims = plan.dims
    size = dimensions(model, encoder)
    if dims and dims[0] < size:
        warnings.append(
            f"warning: matryoshka_dims lacks {size}, so the dimensions after the first {dims[0]} are not trained; add "
            f"{size}, unless you need only shorter embeddings"
        )
    return warnings


class QuietBar(ProgressCallback):
    """A progress bar that does not print logged metrics as dicts, because `ProgressLines` prints them."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Does nothing, unlike `ProgressCallback`, which prints a dict of metrics."""


class ProgressLines(TrainerCallback):
    """A callback that prints the step, loss, speed and time left at most every ten seconds, and evaluation metrics.

    On a terminal, the lines appear above the progress bar.

    Args:
        loss: returns the mean loss since the last call, or None if there were no steps. By default, the lines show the
            last logged loss, which is the mean over all processes.
    """

    def __init__(self, loss: Callable[[], float | None] | None = None):
        self._loss = loss or (lambda: self._logged)
        self._logged: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock for speed and remaining time."""
        self._start = time.monotonic()
        self._first_step = state.global_step
        self._next_line = self._start + LINE_SECONDS

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a progress line if ten seconds have passed since the last one."""
        if time.monotonic() >= self._next_line and state.global_step < state.max_steps:
            left = self._seconds_a_step(state) * (state.max_steps - state.global_step)
            self._print(state, f"{duration(left)} left")
            self._next_line = time.monotonic() + LINE_SECONDS

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Stores the logged loss."""
        self._logged = (logs or {}).get("loss", self._logged)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints an evaluation's metrics, or only the MRRs if there are any."""
        shown = {name: value for name, value in (metrics or {}).items() if not name.endswith(SPEED)}
        shown = {name: value for name, value in shown.items() if name.endswith("_mrr")} or shown
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        place = f"step {state.global_step:,} of {state.max_steps:,}: " if state.max_steps else ""
        print_on_main(f"{place}{numbers}")

    def on_train_end(self, args, state, control, **kwargs):
        """Prints the final progress line, with the duration of training."""
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
            words.append(f"{seconds:.3g} s/step")
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join([*words, end])}")
