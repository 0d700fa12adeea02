"""Prints a training run: its settings, warnings, progress, results and examples."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping

import torch
from huggingface_hub import get_token
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.encoding import dimensions
from soft_trainer.encoders.loading import profile_warnings
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.results import CHANGE, MARGIN, examples, metrics_table
from soft_trainer.option_spec import unread_lines
from soft_trainer.options.defaults import LORA_RATE
from soft_trainer.options.fields import TrainingOptions
from soft_trainer.terminal import LINE_SECONDS, duration, print_on_main, shows_bars, table

SPEED = ("_runtime", "_per_second", "_pool_size")  # suffixes of metrics that do not measure the model


def banner(loss: Mapping, setup: Mapping, encoder: EncoderProfile, distributed_type: str) -> str:
    """Formats the training settings as a table to print before training.

    Args:
        loss, setup: the results of `loss_table` and `setup_table`.
        distributed_type: the kind of parallelism, such as `MULTI_GPU`.
    """
    rows = {**loss, **setup}
    if rows.get("loss") == "info_nce":
        rows["loss"] = "info_nce, no weights"
    rows = {label: value for label, value in rows.items() if value is not None}
    if setup["processes"] > 1:
        rows["processes"] = f"{setup['processes']} ({distributed_type})"
    rows["score"] = f"{encoder.score_function} x {encoder.score_scale:g}, {encoder.pooling} pooling"
    note = "" if encoder.include_prompt else ", not pooled"
    for side, text in {"query": encoder.query_prefix, "code": encoder.code_prefix}.items():
        if text:
            rows[f"before every {side}"] = json.dumps(text) + note
    return table(("training", ""), list(rows.items()))


def warnings_of(trainer) -> list[str]:
    """Returns warnings about training settings that probably do not have the intended effect."""
    args = trainer.args
    plan = trainer.plan
    encoder = trainer.encoder
    model = trainer.model
    warnings = []
    if isinstance(args, TrainingOptions):
        warnings += unread_lines(args, plan.unread)
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
    warnings += profile_warnings(model, encoder)
    if has_adapter(model):
        if args.learning_rate <= LORA_RATE / 4:
            warnings.append(
                f"warning: learning_rate={args.learning_rate:g} is far below 1e-4 to 5e-4, the usual rates for an "
                "adapter"
            )
        revision = model.peft_config[active_adapter(model)].revision
        if revision and not getattr(args, "merge_lora", False):
            warnings.append(
                f"warning: the adapter belongs to revision {revision} of its base, but AutoModel and "
                "SentenceTransformer load the base's main branch; use load_encoder, or set merge_lora=True"
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
            self._print(state, ended=False)
            self._next_line = time.monotonic() + LINE_SECONDS

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Stores the logged loss or, if a short run has logged none, its mean."""
        logs = logs or {}
        self._logged = logs.get("loss", logs.get("train_loss") if self._logged is None else self._logged)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints an evaluation's metrics, or only the MRRs if there are any."""
        shown = {name: value for name, value in (metrics or {}).items() if not name.endswith(SPEED)}
        shown = {name: value for name, value in shown.items() if name.endswith("_mrr")} or shown
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        step = f"step {state.global_step:,} of {state.max_steps:,}: " if state.max_steps else ""
        print_on_main(f"{step}{numbers}")

    def on_train_end(self, args, state, control, **kwargs):
        """Prints the final progress line, with the duration of training."""
        self._print(state, ended=True)

    def _print(self, state, ended: bool) -> None:
        passed = time.monotonic() - self._start
        seconds = passed / max(state.global_step - self._first_step, 1)
        words = []
        if (loss := self._loss()) is not None:
            words.append(f"loss {loss:.4g}")
        words.append(f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s/step")
        if ended:
            words.append(f"trained in {duration(passed)}")
        else:
            words.append(f"{duration(seconds * (state.max_steps - state.global_step))} left")
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(words)}")


def show_progress(trainer) -> None:
    """Adds progress lines, above the bar if there is a terminal. Notebooks keep the table of `transformers`."""
    shown = trainer.pop_callback(ProgressCallback)
    if trainer.args.disable_tqdm or not shows_bars():
        trainer.remove_callback(PrinterCallback)
    elif shown is None:
        return
    else:
        trainer.add_callback(QuietBar)
    if trainer.args.world_size == 1:
        trainer.add_callback(ProgressLines(lambda: trainer.ongoing.guard.mean_loss()))
    else:
        trainer.add_callback(ProgressLines())  # the guard knows only this process's losses


def results_text(results: Mapping[str, Mapping[str, Mapping]], chosen_on: Collection[str] = ()) -> str:
    """Returns all results as a table, with a line for each set that is too small to show its change in MRR.

    See `metrics_table` for the arguments.
    """
    lines = [metrics_table(results, chosen_on=chosen_on)]
    for name, systems in results.items():
        metrics = systems.get("trained", {})
        if "untrained" in systems and metrics.get("queries") == 1:
            lines.append(f"{name}: one query is too few to show any change")
        # Where hardly a rank has changed, the interval says nothing about what so many queries can show.
        if CHANGE in metrics and abs(metrics[CHANGE]) < metrics[MARGIN] >= 0.001:
            lines.append(
                f"{name}: {metrics['queries']:,} queries are too few to show a change below {metrics[MARGIN]:.3f}"
            )
    return "\n".join(lines)


def print_results(run) -> None:
    """Prints what `run`, a `Measurements`, has measured, examples, and where the results and checkpoints are."""
    if run.measured:
        print_on_main(f"\n{results_text(run.results, run.chosen_on)}\n")
    print_examples(run)
    path = run.folder.path
    print_on_main(f"Written to {path}")
    if checkpoints := list(path.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        size = sum(file.stat().st_size for folder in checkpoints for file in folder.rglob("*"))
        print_on_main(
            f"{path}/{PREFIX_CHECKPOINT_DIR}-* takes {size / 2**20:,.0f} MiB with the optimizer; keep it "
            "for resume_from_checkpoint=last, or delete it"
        )


def print_examples(run) -> None:
    """Prints some queries with their top functions. The queries come from test if test was measured."""
    number = getattr(run.trainer.args, "examples", 0)
    if number and run.measured:
        name = min(run.outputs, key=lambda each: not each.startswith("test"))
        outputs = run.outputs[name]
        ranking = outputs.get("trained", outputs.get("untrained")).ranking
        title = f"Queries from {name} with their top three functions (=> marks relevant ones)"
        print_on_main(f"{title}:\n\n{examples(run.measured[name], ranking, number, run.trainer.encoder)}\n")
