"""Guard sets: queries that training must not make worse, measured before, during and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from soft_trainer.data.codesearchnet import target_rows
from soft_trainer.data.sources import as_rows
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.evaluation.retrieval import RetrievalOutput, graded_ranking
from soft_trainer.terminal import print_on_main, table

# a guard is measured often, so a larger one is sampled
QUERIES = 2000
CODES = 2000
DIFFERENCE = "difference ± 95 %"


class GuardSets:
    """The guard sets of a training, and their rankings before and after it.

    Args:
        guards: `{name: (queries, corpus)}`. Large ones are sampled: 2,000 queries over 2,000 codes.
        predict: `SoftInfoNCETrainer.predict`.

    Raises:
        UserError: `guards` has another form, or rows are no data set.
    """

    def __init__(self, guards: Mapping[str, tuple] | None, predict: Callable[..., RetrievalOutput]):
        given = {} if guards is None else guards
        form = f"a dict {{name: (queries, corpus)}} is expected, not {type(guards).__name__}"
        if not isinstance(given, Mapping):
            raise UserError(f"guards: {form}")
        self.sets = tuple(_set_of(name, pair) for name, pair in given.items())
        self._predict = predict
        self._outputs: dict[str, dict[str, RetrievalOutput]] = {}

    def outputs(self, system: str) -> dict[str, RetrievalOutput]:
        """Returns the rankings of every set before ("untrained") or after ("trained") training.

        The first call for a system ranks with the encoder as it is then; `forget` allows another.
        """
        if system not in self._outputs:
            self._outputs[system] = self._ranked()
        return self._outputs[system]

    def reciprocal_ranks(self, system: str | None = None) -> dict[str, np.ndarray]:
        """Returns float64[Q] of every set before or after training, or with the encoder as it is now when None."""
        outputs = self._ranked() if system is None else self.outputs(system)
        ranks = ((each.name, best_ranks(each, outputs[each.name])) for each in self.sets)
        return {name: 1 / best.double().numpy(force=True) for name, best in ranks}

    def mrr(self, system: str | None = None) -> dict[str, float]:
        """Returns the mean of `reciprocal_ranks` of every set."""
        return {name: float(ranks.mean()) for name, ranks in self.reciprocal_ranks(system).items()}

    def forget(self, system: str) -> None:
        """Forgets the rankings of a system."""
        self._outputs.pop(system, None)

    def report(self, tolerance: float) -> None:
        """Prints every set before and after training, and warns of one that fell by more than `tolerance`."""
        before = self.reciprocal_ranks("untrained")
        after = self.reciprocal_ranks("trained")
        means = {name: (before[name].mean(), after[name].mean()) for name in before}
        rows = [(name, *means[name], difference(before[name], after[name])) for name in before]
        print_on_main(table(["guard, MRR", "before training", "after", DIFFERENCE], rows, floats=".4f"))
        for name, (was, now) in means.items():
            if now < was - tolerance:
                print_on_main(
                    f"warning: the guard {name} fell from {was:.4f} to {now:.4f}: set --merge_ratio "
                    "auto, or --distill_weight 0.3 with --estimator initial_model, or a lower --learning_rate"
                )

    def _ranked(self) -> dict[str, RetrievalOutput]:
        return {each.name: self._predict(each.queries, each.codebase, each.name) for each in self.sets}


def _set_of(name: str, pair: tuple) -> EvaluationSet:
    """Makes a guard of its queries and corpus."""
    whole = isinstance(pair, (tuple, list)) and len(pair) == 2 and not any(rows is None for rows in pair)
    if not whole:
        raise UserError(f"guards[{name!r}]: a pair (queries, corpus) is expected")
    return sampled(EvaluationSet(name, *(as_rows(rows, f"guards[{name!r}]") for rows in pair)))


def best_ranks(evaluation_set: EvaluationSet, output: RetrievalOutput) -> Tensor:
    """Returns LongTensor[Q] of a set's queries; of a query with several right codes the best one counts."""
    ranking = output.ranking
    if evaluation_set.graded:
        queries = evaluation_set.queries
        ranking = graded_ranking(ranking, queries["query_number"], queries["relevance"]).ranking
    return ranking.ranks


def difference(before: np.ndarray, after: np.ndarray) -> str:
    """Formats the mean difference of numbers of the same queries, with half its 95 % interval: -0.0012 ± 0.0110."""
    differences = after - before
    half = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return f"{differences.mean():+.4f} ± {half:.4f}"


def sampled(evaluation_set: EvaluationSet, queries: int = QUERIES, codes: int = CODES) -> EvaluationSet:
    """Returns at most `queries` queries of a set over their codes and others, `codes` in all, and says so."""
    generator = np.random.default_rng(0)
    rows = evaluation_set.queries
    corpus = evaluation_set.codebase
    numbers = np.asarray(rows["query_number"]) if evaluation_set.graded else np.arange(len(rows))
    total = len(np.unique(numbers))
    if total <= queries and len(corpus) <= codes:
        return evaluation_set
    if total > queries:
        drawn = np.sort(generator.permutation(np.unique(numbers))[:queries])
        places = np.flatnonzero(np.isin(numbers, drawn))
        rows = rows.select(places)
        if evaluation_set.graded:  # they are numbered from 0 without gaps
            renumbered = np.searchsorted(drawn, numbers[places])
            rows = rows.remove_columns("query_number").add_column("query_number", renumbered)
    own = np.unique(target_rows(rows, corpus, evaluation_set.name))
    others = generator.permutation(np.setdiff1d(np.arange(len(corpus)), own))[: max(codes - len(own), 0)]
    kept = np.sort(np.concatenate([own, others]))
    print_on_main(
        f"{evaluation_set.name}: a guard of {min(total, queries):,} of {total:,} queries over {len(kept):,} of "
        f"{len(corpus):,} codes, drawn at random"
    )
    return EvaluationSet(evaluation_set.name, rows, corpus.select(kept))
