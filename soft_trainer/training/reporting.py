"""Describes a training run for its summary in the terminal, its record and its model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from datasets import Dataset
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from soft_trainer.data.codesearchnet import languages_in
from soft_trainer.data.statistics import data_statistics
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.resolve import Plan


def loss_table(plan: Plan, estimator) -> dict[str, object]:
    """Returns the loss and its settings, the name of the estimator and any Matryoshka dimensions."""
    name = None if estimator is None else type(estimator).__name__
    loss = {"loss": plan.loss.loss, "estimator": name}
    if plan.dims:
        loss["dimensions"] = list(plan.dims)
    return loss | plan.effective_loss


def setup_table(args: TrainingArguments, plan: Plan, model: PreTrainedModel, precision: str) -> dict[str, object]:
    """Returns the settings other than those of the loss: batches, precision, adapter, learning rate and seed."""
    setup = {
        "pairs in a batch, per process": plan.batch_size,
        "processes": plan.processes,
        "codes that each query meets": plan.global_batch_size,
    }
    if args.gradient_accumulation_steps > 1:
        setup["accumulated batches"] = args.gradient_accumulation_steps
    if plan.train_sampling_strategy != "random":
        setup["batches"] = plan.train_sampling_strategy
    setup |= plan.effective_batches
    setup["precision"] = precision
    setup |= adapter_settings(model)
    setup["learning rate"] = args.learning_rate
    setup["seed"] = args.seed
    return setup


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """Returns the settings of the model's adapter, or an empty dict if it has none."""
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
    """Returns the epochs and steps of a training run, and its duration unless it resumed from a checkpoint."""
    # These may be fewer than planned because of `max_steps` or early stopping.
    course = {"epochs": round(state.epoch, 2), "steps": state.global_step}
    if best := best_step(args, state):
        course["step of the saved weights"] = best
    seconds = training_numbers(state).get("train_runtime")
    if seconds is not None and args.resume_from_checkpoint is None:
        course["train runtime, s"] = round(seconds, 1)
        course["seconds a step, evaluations included"] = round(seconds / max(state.global_step, 1), 4)
    return course


def rows_table(rows: Mapping, profile: EncoderProfile, tokenizer) -> dict[str, object]:
    """Returns the languages of the training rows, and statistics of all rows.

    Args:
        rows: the splits "train", "valid" and "codebase". A split that is not a single `Dataset` is left out.
    """
    rows = {name: part for name, part in rows.items() if isinstance(part, Dataset)}
    trained = {name: part for name, part in rows.items() if name == "train"}
    return {
        "dataset": None,
        "languages": languages_in(trained),
        "statistics": data_statistics(rows, profile, tokenizer),
    }


def training_numbers(state: TrainerState) -> dict[str, float]:
    """Returns the logged `train_loss`, `train_runtime` and so on, or an empty dict if nothing was trained."""
    for entry in reversed(state.log_history):
        if "train_runtime" in entry:
            return {name: value for name, value in entry.items() if name != "step"}
    return {}


def best_step(args: TrainingArguments, state: TrainerState) -> int | None:
    """Returns the step whose weights were loaded at the end, or None if the last step's weights were kept."""
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        return state.best_global_step
    return None


def measured_results(
    evaluations: Iterable[tuple[int, bool, Mapping]], final_step: int, merged: bool
) -> dict[str, dict[str, dict]]:
    """Returns the metrics of each evaluation set as `{set: {"untrained" | "trained": metrics}}`.

    Args:
        evaluations: for each evaluation, the step, True if it took place during training, and the metrics.
        final_step: the step of the final weights.
        merged: True if the final weights are merged. Evaluations during training did not measure those.
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
