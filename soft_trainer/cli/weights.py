"""Show the weights that estimators give to one batch, as in the paper's Figure 2 and Appendix D.2.

soft-trainer weights --data_dir DIR --estimators bm25,simcse,trained_model --estimator_model A,B
soft-trainer weights --pairs PAIRS.jsonl --estimators bm25,simcse

The picture is written to --output, and the same figures are printed as a Markdown table. With --pairs the table has
all pairs, the query's own code (=>) first.
"""

from __future__ import annotations

import sys

from soft_trainer.options.commands import WeightPlotArguments

OPTIONS = (WeightPlotArguments,)


def run(arguments: WeightPlotArguments) -> None:
    """Draws the batch or the pairs, and prints the table."""
    from soft_trainer.studies.weight_plot import show_weights  # imports torch, for which --help need not wait

    text, path = show_weights(arguments)
    sys.stdout.write(f"{text}\n")
    if path:
        sys.stderr.write(f"Written to {path}\n")
