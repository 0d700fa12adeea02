"""Prints a training run: its settings, warnings, progress, results and examples."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.loading import profile_warnings
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.results import CHANGE, MARGIN, examples, metrics_table
from soft_trainer.options.fields import TrainingOptions
from soft_trainer.options.spec import unread_lines
from soft_trainer.system.terminal import duration, print_on_main, shows_bars, table


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
    if encoder.score_function == "cosine" and encoder.score_scale == 1:
        warnings.append(
            "warning: unscaled cosines differ too little for a softmax; set score_scale, for example to 20"
        )
    if args.neftune_noise_alpha is not None and hasattr(model, "weigh"):
        warnings.append("warning: neftune_noise_alpha has no effect on a static encoder")
    half = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.float16, torch.bfloat16}
    if half:
        name = str(half.pop()).removeprefix("torch.")
        warnings.append(
            f"warning: the trained weights are stored in {name}, so small updates are lost; load the model in float32 "
            "(dtype=float32) and set bf16=True or fp16=True instead"
        )
    warnings += profile_warnings(model, encoder)
    if has_adapter(model):
        revision = model.peft_config[active_adapter(model)].revision
        if revision and not getattr(args, "merge_lora", False):
            warnings.append(
                f"warning: the adapter belongs to revision {revision} of its base, but AutoModel and "
                "SentenceTransformer load the base's main branch; use load_encoder, or set merge_lora=True"
            )
    return warnings


class QuietBar(ProgressCallback):
    """A progress bar that does not print logged metrics as dicts, because `ProgressLines` prints them."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Does nothing, unlike `ProgressCallback`, which prints a dict of metrics."""


class ProgressLines(TrainerCallback):
    """A callback that prints the step and the time left with each logged loss or MRR."""

    _first_step = 0  # before training

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock for the remaining time."""
        self._start = time.monotonic()
        self._first_step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Prints a line if there is a loss or an MRR."""
        shown = [f"{name} {value:.4g}" for name, value in (logs or {}).items() if name.endswith(("loss", "mrr"))]
        if not shown:
            return
        if done := state.global_step - self._first_step:
            seconds = (time.monotonic() - self._start) / done
            shown.append(f"{duration(seconds * (state.max_steps - state.global_step))} left")
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(shown)}")


def show_progress(trainer) -> None:
    """Adds progress lines, above the bar if there is a terminal. Notebooks keep the table of `transformers`."""
    if trainer.pop_callback(ProgressCallback) is None and trainer.pop_callback(PrinterCallback) is None:
        return
    if shows_bars() and not trainer.args.disable_tqdm:
        trainer.add_callback(QuietBar)
    trainer.add_callback(ProgressLines)


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
