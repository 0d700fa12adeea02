"""Describes a training for its record and its model card, from the trainer alone."""

from __future__ import annotations

from datasets import Dataset

from soft_trainer.data.statistics import data_statistics
from soft_trainer.hub.model_card import environment
from soft_trainer.training.messages import adapter_settings


def describe(trainer) -> dict:
    """Returns the record of a training that was set up in Python, in the form that `hub.model_card` describes.

    The results are those of `evaluate` before the first step and with the final weights.
    """
    rows = {"train": trainer.train_dataset, "valid": trainer.eval_dataset, "codebase": trainer.codebase}
    rows = {name: part for name, part in rows.items() if isinstance(part, Dataset)}
    train = rows.get("train")
    named = train is not None and "language" in train.column_names
    return settings(trainer) | {
        "base_model": trainer.model.config._name_or_path or None,
        "dataset": None,
        "languages": sorted({*train["language"][:]} - {None}) if named else [],
        "results": measured_results(trainer),
        "statistics": data_statistics(rows, trainer.encoder, trainer.processing_class),
    }


def settings(trainer) -> dict:
    """Returns the parts of a record that the trainer decides: loss, training and environment."""
    plan = trainer.plan
    estimator = None if trainer.estimator is None else type(trainer.estimator).__name__
    loss = {"loss": plan.effective_loss["loss"], "estimator": estimator}
    if plan.dims:
        loss["dimensions"] = list(plan.dims)
    record = {
        "model_id": trainer.hub_model_id,
        "loss": loss | plan.effective_loss,
        "training": training_settings(trainer),
        "environment": environment(),
    }
    if trainer.merging:
        record["merging"] = trainer.merging
    return record


def training_settings(trainer) -> dict:
    """Returns batches and length of the training, and its time, evaluations included, if it ran in one piece."""
    args = trainer.args
    plan = trainer.plan
    state = trainer.state
    settings = {
        "pairs in a batch, per process": plan.batch_size,
        "processes": args.world_size,
        "codes that each query meets": plan.global_batch_size,
    }
    if args.gradient_accumulation_steps > 1:
        settings["accumulated batches"] = args.gradient_accumulation_steps
    if plan.train_sampling_strategy != "random":
        settings["batches"] = plan.train_sampling_strategy
    settings |= plan.effective_batches
    settings["precision"] = trainer.precision
    settings |= adapter_settings(trainer.model)
    settings["epochs"] = round(state.epoch, 2)  # as trained: `max_steps` or early stopping may have cut them
    settings["steps"] = state.global_step
    if best := _best_step(trainer):
        settings["step of the saved weights"] = best
    settings["learning rate"] = args.learning_rate
    settings["seed"] = args.seed
    time = training_numbers(trainer).get("train_runtime")
    if time is not None and args.resume_from_checkpoint is None:
        settings["train runtime, s"] = round(time, 1)
        settings["seconds a step, evaluations included"] = round(time / max(state.global_step, 1), 4)
    return settings


def training_numbers(trainer) -> dict[str, float]:
    """Returns `train_loss`, `train_runtime` and so on as the trainer logged them; {} if it has not trained."""
    logged = (entry for entry in reversed(trainer.state.log_history) if "train_runtime" in entry)
    return {name: value for name, value in next(logged, {}).items() if name != "step"}


def measured_results(trainer) -> dict[str, dict[str, dict]]:
    """Returns `{set: {"untrained" | "trained": metrics}}` from the evaluations so far."""
    final_step = _best_step(trainer) or trainer.state.global_step
    results: dict[str, dict[str, dict]] = {}
    for step, in_training, logged in trainer.evaluations:
        if step == 0:
            system = "untrained"
        elif not in_training or (step == final_step and not trainer.merging):
            system = "trained"
        else:
            continue
        for prefix in [name.removesuffix("_pool_size") for name in logged if name.endswith("_pool_size")]:
            metrics = {name.removeprefix(f"{prefix}_"): value for name, value in logged.items()}
            results.setdefault(prefix.removeprefix("eval_"), {})[system] = metrics
    return results


def _best_step(trainer) -> int | None:
    """Returns the step whose weights were loaded at the end; None if they are those of the last step."""
    loaded = trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None
    return trainer.state.best_global_step if loaded else None
