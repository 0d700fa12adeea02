"""Show the weights that estimators give to one batch, as in the paper's Figure 2 and Appendix D.2.

soft-trainer weights --data_dir DIR --estimators bm25,simcse,trained_model --estimator_model A,B
soft-trainer weights --pairs PAIRS.jsonl --estimators bm25,simcse

The picture is written to --output, and the same figures are printed as a Markdown table. With --pairs the table has
all pairs, the query's own code (=>) first.
"""

from __future__ import annotations

import sys

from soft_trainer.errors import UserError
from soft_trainer.options.commands import WeightPlotArguments

OPTIONS = (WeightPlotArguments,)


def run(arguments: WeightPlotArguments) -> None:
    """Draws the batch or the pairs, and prints the table."""
    # Imported here, so that --help need not wait for torch.
    from soft_trainer.data.tokens import text_column, texts
    from soft_trainer.evaluation.figures import new_figure, save_png
    from soft_trainer.studies.weight_plot import (
        batch_rows,
        choose_estimators,
        chosen_negatives,
        draw_weights,
        estimate,
        most_varied_query,
        negatives_table,
    )

    rows = batch_rows(arguments)
    if arguments.query is not None and not 0 <= arguments.query < len(rows):
        raise UserError(f"query={arguments.query}: use 0 to {len(rows) - 1}")
    drawn = arguments.output.lower() != "none"
    if drawn:
        new_figure(1, 1)  # reports a missing matplotlib before anything is encoded
    estimators = choose_estimators(arguments)
    estimates = [estimate(name, estimator, rows) for name, estimator in estimators.items()]
    queries = texts(rows[text_column(rows, ("docstring", "docstring_tokens"), "query")])
    if arguments.pairs:
        query = arguments.query or 0
        negatives = [column for column in range(len(rows)) if column != query]
        shown = [query, *negatives]
    else:
        query = most_varied_query(estimates) if arguments.query is None else arguments.query
        shown = negatives = chosen_negatives(estimates, query, arguments.negatives)
    path = save_png(draw_weights(estimates, queries, query, negatives), arguments.output) if drawn else None
    sys.stdout.write(f"Query: {' '.join(queries[query].split())}\n\n")
    sys.stdout.write(negatives_table(list(estimators), estimates, queries, query, shown) + "\n")
    if drawn:
        sys.stderr.write(f"Written to {path}\n")
