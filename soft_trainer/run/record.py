"""Makes the record of a run, `run.json`, which the model card, `compare` and `report` are written from.

Also writes the metrics and the ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from transformers import TrainerState

from soft_trainer.data.languages import languages_in
from soft_trainer.data.split import Split
from soft_trainer.data.statistics import data_statistics
from soft_trainer.encoders.adapters import active_adapter, has_adapter
from soft_trainer.evaluation.results import save_ranks
from soft_trainer.hub.files import public_name
from soft_trainer.options.defaults import estimator_name
from soft_trainer.options.parse import OF_A_RUN
from soft_trainer.options.spec import changed_options, references
from soft_trainer.run.fingerprint import affects_results, option_values
from soft_trainer.run.folder import best_checkpoint
from soft_trainer.run.model_card import license_of
from soft_trainer.system.files import DEPENDS_ON, RECORD_FORMAT, ranks_file, write_results
from soft_trainer.system.fingerprints import environment, plain_settings
from soft_trainer.training.negatives import negatives_to_draw


def trainer_record(trainer, statistics: Mapping | None = None) -> dict:
    """Returns the record of a trainer's run without its results (see `model_card` for its sections).

    Args:
        trainer: a `SoftInfoNCETrainer`.
        statistics: the result of `data_statistics`, if it has been computed.
    """
    args = trainer.args
    starting = trainer.starting
    encoder = dataclasses.asdict(trainer.encoder)
    encoder |= {"name": starting.label, "profile": trainer.encoder.name, "from_scratch": starting.from_scratch}
    if trainer.encoder.teacher:
        encoder["teacher"] = public_name(trainer.encoder.teacher)
    estimator = {"name": "none"}
    if trainer.estimator is not None and trainer.plan.criterion.needs_similarity:
        model = getattr(args, "estimator_model", None)
        estimator = {"name": estimator_name(trainer.estimator), "estimator_model": model and public_name(model)}
        for option, value in changed_options(args).items():
            if option.startswith("bm25_"):
                estimator[option] = value
    splits = {} if trainer.train_split is None else {"train": trainer.train_split}
    languages = languages_in({name: split.corpus for name, split in splits.items()})
    if statistics is None:
        if isinstance(trainer.eval_dataset, Split):
            splits["valid"] = trainer.eval_dataset
        statistics = data_statistics(splits, trainer.encoder, trainer.processing_class)
    record = {
        "model_id": trainer.hub_model_id,
        "loss": loss_table(trainer),
        "training": setup_table(trainer) | course_table(trainer),
        "environment": environment(),
        "format": RECORD_FORMAT,
        "base_model": starting.name and public_name(starting.name),
        "license": license_of(starting.name),
        "dataset": None,
        "languages": languages,
        "statistics": statistics,
        "options": public_options(*trainer.details.options, args),
        DEPENDS_ON: trainer.run_fingerprint,
        "estimator": estimator,
        "encoder": encoder,
    }
    if trainer.merging:
        record["merging"] = trainer.merging | {"base": public_name(trainer.merging["base"])}
    return record | trainer.details.about


def public_options(*options) -> dict[str, object]:
    """Returns the options that affect results, in a form to publish: a local path is reduced to its last part."""
    values = {name: value for name, value in option_values(*options).items() if affects_results(name)}
    for reference in references(OF_A_RUN, values):
        on_hub = reference.kind in ("rows", "encoder")
        values[reference.option] = ",".join(public_name(value, on_hub) for value in reference.values)
    return plain_settings(values)


# ---- Sections of the record, which are also printed ----


def loss_table(trainer) -> dict[str, object]:
    """Returns the loss with its settings, the estimator, any teacher and Matryoshka dimensions, keyed by label."""
    plan = trainer.plan
    name = None if trainer.estimator is None else type(trainer.estimator).__name__
    loss = {"loss": plan.criterion.loss, "estimator": name}
    if plan.options.teacher is not None:
        loss["teacher"] = public_name(plan.options.teacher)
    if plan.dims:
        loss["dimensions"] = list(plan.dims)
    return loss | plan.criterion.effective


def setup_table(trainer) -> dict[str, object]:
    """Returns the settings of batches, precision, adapter, learning rate, epochs and seed, keyed by label."""
    args = trainer.args
    plan = trainer.plan
    in_all = plan.batch_size * plan.processes
    negatives = 0
    if trainer.train_split is not None:
        negatives, _ = negatives_to_draw(plan.options, trainer.train_split.judgments)
        in_all = min(in_all, len(trainer.train_dataset))
    of_process = -(-in_all // plan.processes)
    compared = in_all if plan.gathers else of_process
    setup = {
        "pairs per batch and process": of_process,
        "processes": plan.processes,
        "functions compared per query": f"up to {compared * (1 + negatives)}" if negatives else compared,
    }
    if args.gradient_accumulation_steps > 1:
        setup["accumulated batches"] = args.gradient_accumulation_steps
    setup["batches"] = plan.train_sampling_strategy
    setup |= plan.effective_batches
    if negatives:
        setup["negatives_per_query"] = negatives
    setup["precision"] = trainer.passes.precision
    setup["forward passes"] = str(trainer.passes)
    setup |= _adapter_settings(trainer.model)
    setup["learning rate"] = args.learning_rate
    if args.max_steps > 0:
        setup["steps"] = args.max_steps
    else:
        setup["epochs"] = args.num_train_epochs
    setup["warm-up"] = args.warmup_steps  # a part of all steps if it is below 1, otherwise the number of steps
    setup["seed"] = args.seed
    return setup


def _adapter_settings(model) -> dict[str, object]:
    """Returns the adapter's type, settings and number of trained parameters, or {} if there is no adapter."""
    if not has_adapter(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    kind = config.peft_type.value
    if hasattr(config, "lora_alpha"):
        kind += f", r {config.r}, alpha {config.lora_alpha:g}, dropout {config.lora_dropout:g}"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"adapter": kind, "trained parameters": trained}


def course_table(trainer) -> dict[str, object]:
    """Returns the numbers of finished epochs and steps, and the duration unless the run resumed from a checkpoint."""
    state = trainer.state
    # `max_steps` or early stopping may make these fewer than planned.
    course = {"epochs": round(state.epoch, 2), "steps": state.global_step}
    if best := best_step(trainer):
        course["step of the saved weights"] = best
    seconds = training_numbers(state).get("train_runtime")
    if seconds is not None and trainer.args.resume_from_checkpoint is None:
        course["train runtime, s"] = round(seconds, 1)
        course["seconds per step, with evaluations"] = round(seconds / max(state.global_step, 1), 4)
    return course


def training_numbers(state: TrainerState) -> dict[str, float]:
    """Returns the metrics logged when training ended, such as `train_loss` and `train_runtime`, or an empty dict."""
    for entry in reversed(state.log_history):
        if "train_runtime" in entry:
            return {name: value for name, value in entry.items() if name != "step"}
    return {}


def best_step(trainer) -> int | None:
    """Returns the step of the best checkpoint if its weights were loaded at the end, or None."""
    return trainer.state.best_global_step if best_checkpoint(trainer.args, trainer.state) else None


def evaluated_results(trainer, of_training: bool) -> dict[str, dict[str, dict]]:
    """Returns the metrics that calls of `evaluate` logged, as `{set: {"untrained" | "trained": metrics}}`.

    Args:
        of_training: whether to include evaluations during training, if they measured the final weights.
    """
    final_step = best_step(trainer) or trainer.state.global_step
    results: dict[str, dict[str, dict]] = {}
    for step, in_training, logged in trainer.evaluations:
        if in_training and not of_training:
            continue
        if step == 0:
            system = "untrained"
        elif not in_training or (step == final_step and not trainer.merging):
            system = "trained"
        else:
            continue
        for name in logged:
            if name.endswith("_pool_size"):
                prefix = name.removesuffix("_pool_size")
                metrics = {key.removeprefix(f"{prefix}_"): value for key, value in logged.items()}
                results.setdefault(prefix.removeprefix("eval_"), {})[system] = metrics
    return results


# ---- Files ----


def write_run(run, record: Mapping, **parts: Mapping[str, float]) -> None:
    """Writes the ranks and the metrics of a run, and then its record.

    Args:
        run: the run's `Measurements`.
        record: the record to write.
        parts: metrics in addition to the evaluation metrics, keyed by part, such as `train`.
    """
    folder = run.folder
    if not folder.trains:
        folder.clear()
    metrics = {}
    for name, outputs in run.outputs.items():
        for system, output in outputs.items():
            encoder = run.trainer.starting.name
            if system == "lexical":
                encoder = None
            elif folder.trains and system != "untrained":
                encoder = folder.path
            path = folder.path / ranks_file(name, system)
            save_ranks(path, run.measured[name], output, run.trainer.encoder, encoder)
            prefix = name if system == "trained" else f"{name}_{system}"
            metrics |= {f"{prefix}_{metric}": value for metric, value in output.metrics.items()}
    write_results(folder.path, record, **parts, eval=metrics)
