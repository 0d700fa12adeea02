"""Lists removed options and commands. For one version, each raises an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Iterable

from soft_trainer.errors import UserError

_NEGATIVES = "give the rows a column `negatives`, or use --negatives_per_query with --negative_ratio"
_OTHER_QUERIES = "use --eval_data_dir, whose queries are measured before, during and after training, with intervals"
_SIMILAR = "leave it out: --train_sampling_strategy similar groups rows by the estimator's own neighbours"
_PROMPT = "use --query_prompt and --code_prompt; special tokens before them come with --profile"
_MIXTURE = "name one estimator; a mixture can be a class of your own, --estimator module:Class"
_COLUMNS = "rename the columns (anchor, positive, negative_1; here docstring, code, negatives)"

# Maps removed options, arguments, functions and commands to what to use instead.
REMOVED: dict[str, str] = {
    "baseline": "use benchmarks/baseline.py, which trains with sentence-transformers' own trainer",
    "body": "leave it out; a query is the subject of a commit",
    "cache_dir": "give it to the estimator",
    "chunk_by_length": "leave it out; a batch is always encoded in chunks of similar length",
    "clamp_negative_scores": "leave it out; scores below 0 are used as they are",
    "code_prefix": _PROMPT,
    "early_stopping_patience": "use --load_best_model_at_end true; in Python, transformers has EarlyStoppingCallback",
    "equal_texts_apart": _SIMILAR,
    "from_sentence_transformers": _COLUMNS,
    "guard": _OTHER_QUERIES,
    "guard_tolerance": _OTHER_QUERIES,
    "guards": "use eval_dataset, a dict of evaluation sets",
    "max_functions": "leave it out; commits that change more than five functions are left out",
    "max_file_bytes": "leave it out; files over 1,000,000 bytes are skipped",
    "mine-negatives": _NEGATIVES,
    "mixture_shares": _MIXTURE,
    "mixture_temperatures": _MIXTURE,
    "nearest_apart": _SIMILAR,
    "negative_candidates": "leave it out; 64 codes are looked at for each query",
    "negative_margin": "use --negative_ratio",
    "negative_max_score": "use --negative_ratio",
    "negative_ranks": "use --negative_ratio",
    "negative_temperature": "leave it out; the candidates below --negative_ratio are equally likely",
    "negatives": _NEGATIVES,
    "negatives_meet": "leave it out; a query meets its own negatives",
    "neighbours": "leave it out; the 32 nearest rows are found for each row",
    "no_estimator_cache": "use --estimator_cache_dir none",
    "order_loss_scale": "leave it out; --distill_weight learns from the estimator",
    "order_loss_weight": "use --distill_weight, which learns from the estimator",
    "query_prefix": _PROMPT,
    "simcse": "use examples/simcse.py, which trains with sentence-transformers' own trainer",
    "weights": "use `soft-trainer report`, which draws the weights of a batch",
    "random_share": _SIMILAR,
    "similar_by": "use --estimator bm25 for neighbours by BM25",
    "to_sentence_transformers": _COLUMNS,
}


def refuse_removed(names: Iterable[str], place: str = "") -> None:
    """Raises UserError if any of the names has been removed. The message begins with `place`."""
    for name in names:
        if name in REMOVED:
            raise UserError(f"{place}{name}: was removed in version 0.2.0; {REMOVED[name]}")


class RefusesRemoved:
    """The base class of option dataclasses. For a removed option, it raises an error that says what to use instead."""

    def __new__(cls, *args, **options):
        """Creates the instance.

        Raises:
            UserError: an option has been removed.
        """
        refuse_removed(name for name in options if name not in cls.__dataclass_fields__)
        return super().__new__(cls)
