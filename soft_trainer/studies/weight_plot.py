"""Draws the weights that estimators give to one batch, and one query's negatives (Figure 2 and Appendix D.2)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from torch import Tensor

from soft_trainer.data.codesearchnet import load_folder, load_jsonl
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.errors import UserError
from soft_trainer.estimators.registry import ESTIMATORS, choose_estimator
from soft_trainer.evaluation.figures import COLORS, MARKERS, new_figure, save_png
from soft_trainer.mining.documentation import document_tokens
from soft_trainer.options.commands import WeightPlotArguments
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import shortened, table
from soft_trainer.weights import checked_similarity, negative_weights, smallest_batch

FLOOR = 0.1


@dataclass(frozen=True)
class Estimate:
    """The weights that an estimator gives to a batch."""

    name: str
    label: str  # its name and settings
    similarity: Tensor  # raw, Tensor[B, B]
    weights: Tensor  # Eq. 4 with the estimator's own alpha, beta and temperature, Tensor[B, B]


def show_weights(arguments: WeightPlotArguments) -> tuple[str, Path | None]:
    """Draws the weights of a batch or of pairs, and returns those of one query as a table, and the picture's path.

    Raises:
        UserError: a value that an option does not take, rows or an encoder that cannot be loaded, or no matplotlib.
    """
    rows = batch_rows(arguments)
    query = arguments.query
    if query is not None and not 0 <= query < len(rows):
        raise UserError(f"query={query}: use 0 to {len(rows) - 1}")
    drawn = arguments.output.lower() != "none"
    if drawn:
        new_figure(1, 1)  # reports a missing matplotlib before anything is encoded
    estimates = [estimate(name, estimator, rows) for name, estimator in choose_estimators(arguments).items()]
    queries = list(column_texts(rows, text_column(rows, ("docstring", "docstring_tokens"), "query")))
    if arguments.pairs:
        query = query or 0
        negatives = [column for column in range(len(rows)) if column != query]
        shown = [query, *negatives]
    else:
        query = most_varied_query(estimates) if query is None else query
        shown = negatives = chosen_negatives(estimates, query, arguments.negatives)
    path = save_png(draw_weights(estimates, queries, query, negatives), arguments.output) if drawn else None
    return f"Query: {' '.join(queries[query].split())}\n\n{negatives_table(estimates, queries, query, shown)}", path


def estimate(name: str, estimator, rows: Dataset) -> Estimate:
    """Fits an estimator on the batch alone and weighs its negatives.

    Raises:
        UserError: the batch is too small for Eq. 4 with the estimator's alpha and beta.
    """
    alpha, beta, temperature = (getattr(estimator, setting, 1.0) for setting in ("alpha", "beta", "temperature"))
    least = smallest_batch(alpha, beta)
    if len(rows) < least:
        raise UserError(f"{len(rows)} rows are too few for {name}: take at least {least}")
    estimator.fit(rows)
    similarity = checked_similarity(estimator, range(len(rows)), range(len(rows)))
    weights = negative_weights(similarity, alpha, beta, temperature, FLOOR)
    return Estimate(name, f"{name} (α {alpha:g}, β {beta:g}, t {temperature:g})", similarity, weights)


def choose_estimators(arguments: WeightPlotArguments) -> dict[str, object]:
    """Makes the estimators by name, in the order of `--estimators`.

    Raises:
        UserError: see `choose_estimator`.
    """
    names = arguments.estimators.split(",")
    different = len(set(names)) == len(names) <= len(COLORS)
    if "none" in names:
        raise UserError("estimators: none gives no weights; leave it out")
    if not different:
        raise UserError(f"estimators={arguments.estimators!r}: up to {len(COLORS)} different names are expected")
    models = iter((arguments.estimator_model or "").split(","))
    chosen = {}
    for name in names:
        takes_model = name in ESTIMATORS and ESTIMATORS[name].takes_model
        model = (next(models, "") or None) if takes_model else None
        options = DataArguments(estimator=name, estimator_model=model, no_estimator_cache=True)
        chosen[name] = choose_estimator(options, trust_remote_code=arguments.trust_remote_code)
    return chosen


def batch_rows(arguments: WeightPlotArguments) -> Dataset:
    """Returns the rows of the batch, with `docstring_tokens`.

    Raises:
        UserError: a file cannot be read, or has fewer rows than the batch.
    """
    if (arguments.data_dir is None) == (arguments.pairs is None):
        raise UserError("data_dir and pairs: give one of them")
    if arguments.pairs:
        rows = load_jsonl(Path(arguments.pairs))
        rows = rows.select_columns([name for name in rows.column_names if None not in rows[name]])
        text_column(rows, ("docstring",), "query")  # checks that it is there
        tokens = [document_tokens(text) for text in rows["docstring"]]
        return rows if "docstring_tokens" in rows.column_names else rows.add_column("docstring_tokens", tokens)
    rows = load_folder(arguments.data_dir, ("train",))["train"]
    size = arguments.batch_size
    if len(rows) < size:
        raise UserError(f"{arguments.data_dir}: {len(rows)} training rows, batch_size={size}")
    return rows.select(np.random.default_rng(arguments.seed).permutation(len(rows))[:size])


def most_varied_query(estimates: Sequence[Estimate]) -> int:
    """Returns the query whose negatives' weights vary most, over all estimators."""
    return int(sum(estimate.weights.double().std(1) for estimate in estimates).argmax())


def chosen_negatives(estimates: Sequence[Estimate], query: int, number: int) -> list[int]:
    """Returns the columns of the negatives that some estimator finds most similar, the most similar first."""
    similarity = np.stack([estimate.similarity[query].double().numpy() for estimate in estimates])
    places = (-similarity).argsort(1, kind="stable").argsort(1)
    others = [column for column in range(similarity.shape[1]) if column != query]
    chosen = sorted(others, key=lambda column: (places[:, column].min(), places[:, column].sum()))[:number]
    return sorted(chosen, key=lambda column: places[:, column].sum())


def draw_weights(estimates: Sequence[Estimate], queries: Sequence[str], query: int, negatives: Sequence[int]):
    """Draws the paper's Figure 2: left the sorted weights of the batch, right one query's negatives, as a figure."""
    figure = new_figure(15, 2.2 + 0.55 * max(len(negatives), 7))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    size = len(queries)
    places = np.arange(len(negatives))
    for number, (each, color, marker) in enumerate(zip(estimates, COLORS, MARKERS, strict=False)):
        rows = each.weights.double().numpy()[~np.eye(size, dtype=bool)].reshape(size, size - 1)
        low, median, high = np.quantile(np.sort(rows, 1), (0.1, 0.5, 0.9), axis=0)
        left.fill_between(range(1, size), low, high, color=color, alpha=0.15, lw=0)
        left.plot(range(1, size), median, f"{marker}-", color=color, markersize=4, lw=1.5, label=each.label)
        offset = 0.16 * (number - (len(estimates) - 1) / 2)  # equal weights would hide one another
        right.plot(each.weights[query, list(negatives)], places + offset, marker, color=color, markersize=8)
    title = f"Sorted weights of {size} queries, median and 10 to 90 %"
    left.set_title(title, fontsize=11, fontweight="bold", loc="left")
    left.set_xscale("log", base=2)  # most weights differ from 1 among the first few only
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set(xlabel="negative, the most similar first", ylabel="weight")
    right.set_yticks(places, [_label(queries[column]) for column in negatives], fontsize=10)
    right.set_ylim(len(negatives) - 0.5, -0.5)
    right.hlines(places[1:] - 0.5, 0, 1, transform=right.get_yaxis_transform(), color="0.9", lw=0.8)
    title = right.set_title(_label(f"Negatives of: {queries[query]}", 60), fontsize=11, fontweight="bold", loc="left")
    for text in (title, *right.get_yticklabels()):
        text.set_parse_math(False)  # `$name` in a docstring is not a formula
    right.set_xlabel("weight")
    for axis, line in ((left, left.axhline), (right, right.axvline)):
        line(1, color="0.5", lw=1, label="InfoNCE (weight 1)")
        line(FLOOR, color="0.5", lw=1, ls=":", label=f"floor ({FLOOR:g})")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=11)
    return figure


def _label(text: str, width: int = 52) -> str:
    """Returns a text in at most two lines of `width` characters."""
    return "\n".join(textwrap.wrap(" ".join(text.split()), width, max_lines=2, placeholder=" …"))


def negatives_table(estimates: Sequence[Estimate], queries: Sequence[str], query: int, columns: Sequence[int]) -> str:
    """Returns a Markdown table of one query's codes: similarity and weight of each code under each estimator.

    A code is named by its own query; `=>` marks the code of `query`, the positive.
    """
    headers = ["code of", *(f"{each.name} {figure}" for each in estimates for figure in ("similarity", "weight"))]
    figures = np.stack([part[query] for each in estimates for part in (each.similarity, each.weights)]).astype(float)
    names = [("=> " if column == query else "") + shortened(queries[column], 80) for column in columns]
    rows = [[name.replace("|", "\\|"), *figures[:, column]] for name, column in zip(names, columns, strict=True)]
    return table(headers, rows)
