"""Shows the page of the metric's Space, which computes the mean reciprocal rank."""

from pathlib import Path

import evaluate
import gradio  # pyright: ignore[reportMissingImports]

METRIC = evaluate.load(str(Path(__file__).parent / "mrr.py"))


def compute(ranks: str, pool_size: float, max_rank: float | None) -> dict:
    """Computes the MRR of ranks separated by commas or spaces."""
    try:
        predictions = [int(rank) for rank in ranks.replace(",", " ").split()]
        pools = [int(pool_size)] * len(predictions)
        if max_rank:
            max_rank = int(max_rank)
        return METRIC.compute(predictions=predictions, references=pools, max_rank=max_rank or None)
    except (ValueError, TypeError) as error:
        raise gradio.Error(str(error)) from None


PAGE = gradio.Interface(
    compute,
    [
        gradio.Textbox("1, 3, 2, 120", label="Rank of the relevant code for each query"),
        gradio.Number(1000, precision=0, label="Codes in the corpus"),
        gradio.Number(None, precision=0, label="Ranks beyond this count 0 (empty: no limit)"),
    ],
    gradio.JSON(label="Result"),
    title="Mean reciprocal rank",
    description=METRIC.description,
)

if __name__ == "__main__":
    PAGE.launch()
