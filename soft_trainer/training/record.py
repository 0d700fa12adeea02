"""Makes the record of a run, `run.json`, which the model card, `compare` and `report` are written from."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from soft_trainer.data.languages import languages_in
from soft_trainer.data.split import Split
from soft_trainer.data.statistics import data_statistics
from soft_trainer.encoders.hub_files import public_name
from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.files import DEPENDS_ON, RECORD_FORMAT, TRAINING_PICTURE
from soft_trainer.fingerprints import plain_settings
from soft_trainer.hub.model_card import license_of
from soft_trainer.options.defaults import estimator_name
from soft_trainer.options.option_spec import changed_options, references
from soft_trainer.options.parse import OF_A_RUN
from soft_trainer.training.run_fingerprint import affects_results, option_values

PLOTTED = {"loss": "training loss", "eval_mrr": "MRR on valid"}  # keys of the trainer's log, with titles of plots


def trainer_record(trainer, statistics: Mapping | None = None) -> dict:
    """Returns the record of a trainer's run without its results (see `hub.model_card` for its sections).

    Args:
        trainer: a `SoftInfoNCETrainer`.
        statistics: the result of `data_statistics`, if it has been computed.
    """
    args = trainer.args
    starting = trainer.starting
    named = {"name": starting.label, "profile": trainer.encoder.name, "from_scratch": starting.from_scratch}
    if trainer.encoder.teacher:
        named["teacher"] = public_name(trainer.encoder.teacher)
    estimator = {"name": "none"}
    if trainer.estimator is not None and trainer.plan.criterion.needs_similarity:
        model = getattr(args, "estimator_model", None)
        estimator = {"name": estimator_name(trainer.estimator), "estimator_model": model and public_name(model)}
        for option, value in changed_options(args).items():
            if option.startswith("bm25_"):
                estimator[option] = value
    described = trainer.describe()
    if merging := described.get("merging"):
        described["merging"] = merging | {"base": public_name(merging["base"])}
    splits = {} if trainer.train_split is None else {"train": trainer.train_split}
    trained = {name: split.corpus for name, split in splits.items()}
    if statistics is None:
        if isinstance(trainer.eval_dataset, Split):
            splits["valid"] = trainer.eval_dataset
        statistics = data_statistics(splits, trainer.encoder, trainer.processing_class)
    callback = trainer.estimator_callback
    return (
        described
        | {
            "format": RECORD_FORMAT,
            "base_model": starting.name and public_name(starting.name),
            "license": license_of(starting.name),
            "dataset": None,
            "languages": languages_in(trained),
            "statistics": statistics,
            "options": public_options(*trainer.options, args),
            DEPENDS_ON: trainer.run_fingerprint,
            "estimator": estimator,
            "weights": callback.histogram if callback else None,
            "encoder": dataclasses.asdict(trainer.encoder) | named,
        }
        | trainer.about
    )


def public_options(*options) -> dict[str, object]:
    """Returns the options that affect results, in a form to publish: a local path is reduced to its last part."""
    values = {name: value for name, value in option_values(*options).items() if affects_results(name)}
    for reference in references(OF_A_RUN, values):
        on_hub = reference.kind in ("rows", "encoder")
        values[reference.option] = ",".join(public_name(value, on_hub) for value in reference.values)
    return plain_settings(values)


def flat_results(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Flattens `{set: {system: metrics}}` to keys `SET_SYSTEM_METRIC`, or `SET_METRIC` for the trained encoder."""
    flat = {}
    for name, systems in results.items():
        for system, metrics in systems.items():
            prefix = name if system == "trained" else f"{name}_{system}"
            for metric, value in metrics.items():
                flat[f"{prefix}_{metric}"] = value
    return flat


def draw_training(folder: Path, history: Sequence[Mapping]) -> Path | None:
    """Draws `training.png`: the loss and the MRR at each step.

    Args:
        history: the trainer's log.

    Returns:
        The path of the file, or None if matplotlib (the extra `plots`) is missing, or if the log has fewer than two
        losses and fewer than two MRRs.
    """
    points = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in PLOTTED}
    drawn = [name for name in PLOTTED if len(points[name]) > 1]
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = new_figure(4 * len(drawn), 3)
    for place, name in enumerate(drawn, 1):
        axes = figure.add_subplot(1, len(drawn), place)
        axes.plot(*zip(*points[name], strict=True), color=COLORS[place - 1], marker=".")
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(PLOTTED[name])
    return save_png(figure, folder / TRAINING_PICTURE)
