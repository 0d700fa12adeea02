"""What is said and what is refused before the first step."""

from __future__ import annotations

from soft_trainer.console import table
from soft_trainer.errors import SetupError
from soft_trainer.estimators.mixture import MixtureEstimator


def banner(trainer) -> str:
    """What a run is about to do, as a table."""
    args, objective = trainer.args, trainer.objective
    joined = trainer.joined_batch_size
    estimator = type(trainer.estimator_callback.estimator).__name__ if trainer.estimator_callback else "none"
    weights = f"{objective.alpha:g} / {objective.beta:g} / {objective.temperature:g}, floor {objective.floor:g}"
    rows = [
        ("batch per process", args.per_device_train_batch_size),
        ("processes", args.world_size),
        ("codes a query meets (N)", joined),
        ("negatives per query", joined - 1),
        ("accumulated batches", args.gradient_accumulation_steps),
        ("loss", objective.loss),
        ("estimator", estimator),
        ("alpha / beta / temperature", weights if objective.needs_similarity else "not used"),
        (
            "score",
            f"{trainer.encoder.score_function} x {trainer.encoder.score_scale:g}, {trainer.encoder.pooling} pooling",
        ),
        ("precision", trainer.precision),
    ]
    return table(("training", ""), rows)


def check_setup(trainer) -> None:
    """Refuse before training what cannot work in it.

    Raises:
        SetupError: what is wrong, with the values that work.
    """
    args, objective = trainer.args, trainer.objective
    if args.n_gpu > 1:
        raise SetupError(
            f"{args.n_gpu} GPUs without a launcher would be wrapped in DataParallel, which splits the negatives "
            "of a batch: start with `accelerate launch`, or show one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if objective.needs_similarity and trainer.estimator_callback is None:
        raise SetupError(
            f"loss={objective.loss}, cancel={objective.cancel} needs an estimator: pass "
            "callbacks=[EstimatorCallback(...)], or use loss=info_nce"
        )
    if objective.cancel == "ratio" and isinstance(trainer.estimator_callback.estimator, MixtureEstimator):
        raise SetupError("cancel=ratio: a mixture's similarities are logarithms, use cancel=top_k")
    if trainer.train_dataset is not None and trainer.joined_batch_size < objective.smallest_batch:
        raise SetupError(
            f"a query meets N={trainer.joined_batch_size} codes, too few for loss={objective.loss} with "
            f"alpha={objective.alpha:g}, beta={objective.beta:g}, cancel={objective.cancel}: beta must be above "
            f"alpha / (N - 1); the smallest N that works is {objective.smallest_batch}"
        )
    if args.load_best_model_at_end and args.metric_for_best_model in ("loss", "eval_loss"):
        raise SetupError(
            "metric_for_best_model='loss': evaluation measures retrieval, use metric_for_best_model='mrr'"
        )
    if args.fp16 and args.device.type == "cpu":
        raise SetupError("fp16 needs a GPU: use --bf16, or leave it out, on a CPU")
