"""What is said and what is refused before the first step."""

from __future__ import annotations

from soft_trainer.arguments import SoftInfoNCEOptions
from soft_trainer.data.sampling import GlobalBatchSampler, languages_of
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.mixture import MixtureEstimator
from soft_trainer.objective import Objective
from soft_trainer.terminal import table


def banner(trainer) -> str:
    """What a run is about to do, as a table."""
    args, objective = trainer.args, trainer.objective
    joined = trainer.global_batch_size
    estimator = type(trainer.estimator_callback.estimator).__name__ if trainer.estimator_callback else "none"
    weights = f"{objective.alpha:g} / {objective.beta:g} / {objective.temperature:g}, floor {objective.floor:g}"
    rows = [
        ("batch per process", args.per_device_train_batch_size),
        ("processes", f"{args.world_size} ({trainer.accelerator.distributed_type.value})"),
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


def check_run(args, estimator, train_dataset=None, early_stopping_patience: int | None = None) -> None:
    """Refuse settings that cannot work, before a model is loaded.

    Args:
        args: `SoftInfoNCETrainingArguments`, or plain `TrainingArguments`.
        estimator: of the weights, or None.
        train_dataset: the rows to train on.

    Raises:
        UserError: what is wrong, with the values that work.
    """
    options = options_of(args)
    objective = make_objective(options, estimator)
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs without a launcher would be wrapped in DataParallel, which splits the negatives "
            "of a batch: start with `accelerate launch`, or show one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if args.mixed_precision == "fp16" and args.device.type == "cpu":  # also where the launcher asked for it
        raise UserError("fp16 needs a GPU: use bf16 (--bf16 true, or the launcher's --mixed_precision bf16) on a CPU")
    if objective.needs_similarity and estimator is None:
        raise UserError(
            f"loss={objective.loss}, cancel={objective.cancel} needs an estimator: pass "
            "callbacks=[EstimatorCallback(...)], or use loss=info_nce"
        )
    if objective.cancel == "ratio" and isinstance(estimator, MixtureEstimator):
        raise UserError("cancel=ratio: a mixture's similarities are logarithms, use cancel=top_k")
    if args.load_best_model_at_end and args.metric_for_best_model in ("loss", "eval_loss"):
        raise UserError("metric_for_best_model='loss': evaluation measures retrieval, use 'mrr'")
    if early_stopping_patience is not None and args.eval_strategy == "no":
        raise UserError("early_stopping_patience needs evaluations to count: --eval_strategy epoch, for example")
    if train_dataset is not None:
        _check_batches(args, options, objective, train_dataset)
        if isinstance(estimator, Estimator):
            estimator.check(train_dataset)


def _check_batches(args, options, objective: Objective, train_dataset) -> None:
    """Refuse batches that cannot be drawn, or that are too small for the weights."""
    joined = args.per_device_train_batch_size * args.world_size
    strategy = args.train_sampling_strategy
    languages = languages_of(train_dataset) if strategy == "one_language" else ()
    GlobalBatchSampler(
        len(train_dataset), joined, strategy=strategy, drop_last=args.dataloader_drop_last, languages=languages
    )
    meets = joined if options.gather_negatives is not False else args.per_device_train_batch_size
    if meets < objective.smallest_batch:
        raise UserError(
            f"a query meets N={meets} codes, too few for loss={objective.loss} with alpha={objective.alpha:g}, "
            f"beta={objective.beta:g}, cancel={objective.cancel}: beta must be above alpha / (N - 1); the smallest N "
            f"that works is {objective.smallest_batch}"
        )


def options_of(args) -> SoftInfoNCEOptions:
    """The options of the loss; their defaults where `args` are plain `TrainingArguments`."""
    return args if isinstance(args, SoftInfoNCEOptions) else SoftInfoNCEOptions()


def make_objective(options: SoftInfoNCEOptions, estimator) -> Objective:
    """The loss of a run: its options, and the estimator's defaults where an option is None."""
    names = ("floor", "infonce_weight", "kl_weight", "cancel", "cancel_k", "cancel_ratio", "clamp_negative_scores")
    settings = {name: getattr(options, name) for name in names}
    for name in ("alpha", "beta", "temperature"):
        given = getattr(options, name)
        settings[name] = getattr(estimator, name, 1.0) if given is None else given
    return Objective(loss=options.loss or ("info_nce" if estimator is None else "soft_info_nce"), **settings)
