"""Checks a run's arguments and resolves them into a frozen `Plan`, which no other code needs to check."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import SchedulerType, TrainingArguments

from soft_trainer.criterion import Criterion
from soft_trainer.encoders.encoding import parse_dims
from soft_trainer.errors import UserError
from soft_trainer.options.choices import COMPARE_CODES
from soft_trainer.options.fields import SoftInfoNCEOptions, TrainingOptions, check_steps
from soft_trainer.options.loss_options import LossOptions
from soft_trainer.options.references import name_functions
from soft_trainer.options.spec import OptionSpec, check_values, option_specs
from soft_trainer.system.files import check_writable

# Options that cannot be turned on, each with the reason.
REFUSED = {
    "label_smoothing_factor": "Soft-InfoNCE's weights soften the loss",
    "fp16_full_eval": "evaluation runs in the precision of training",
    "bf16_full_eval": "evaluation runs in the precision of training; set bf16",
    "prediction_loss_only": "evaluation ranks functions and computes no loss",
    "eval_accumulation_steps": "an evaluation keeps only the embeddings",
    "include_for_metrics": "compute_metrics gets ranks, top functions and targets",
    "batch_eval_metrics": "compute_metrics gets the ranks of all queries at once",
    "eval_use_gather_object": "processes exchange embeddings and ranks",
    "include_num_input_tokens_seen": "total_flos is 6 x parameters x tokens",
    "ddp_static_graph": "the number of forward passes changes from batch to batch",
}
REFUSED_OF_ACCELERATOR = {
    "split_batches": "each process takes a slice of the global batch",
    "dispatch_batches": "each process makes its batches itself",
}
# Parallelism in which several processes work on the same batch.
SHARED_BATCH = ("tp_size", "cp_size", "sp_size")
FALLING = ("reduce_lr_on_plateau", "greedy")  # schedules that by default expect the metric to fall

# The ranges of further options of `transformers` whose invalid values would fail late or be replaced silently.
RANGES = {
    "gradient_accumulation_steps": OptionSpec(least=1),
    "max_grad_norm": OptionSpec(least=0),
    "neftune_noise_alpha": OptionSpec(least=0),
}


@dataclass(frozen=True)
class Plan:
    """The checked settings of a training run, with all defaults filled in.

    Args:
        criterion: the loss and its settings, including defaults that come from the estimator.
        options: a copy of the options for batches and negatives.
        train_sampling_strategy: how rows are grouped into batches.
        dims: the numbers of leading dimensions that are trained as embeddings, largest first. If empty, only the full
            embedding is trained.
        batch_size: the number of pairs in one process's batch.
        processes: the number of processes.
        gathers: True if functions from all processes are used as negatives.
    """

    criterion: Criterion
    options: SoftInfoNCEOptions
    train_sampling_strategy: str
    dims: tuple[int, ...]
    batch_size: int
    processes: int
    gathers: bool

    @property
    def global_batch_size(self) -> int:
        """N, the number of functions that each query is compared with in each step, without hard negatives."""
        if self.gathers:
            return self.batch_size * self.processes
        return self.batch_size

    @property
    def unread(self) -> dict[str, str]:
        """The options for the loss, batches and negatives that have no effect, each with the reason."""
        reasons = self.criterion.unread
        if self.train_sampling_strategy != "similar":
            reasons["group_size"] = "it needs train_sampling_strategy=similar"
        if not self.options.negatives_per_query:
            reasons["negative_ratio"] = "negatives_per_query is not set"
        return reasons

    @property
    def effective_batches(self) -> dict[str, object]:
        """The options for batches and negatives that have an effect, keyed by name."""
        unread = self.unread
        effective = {}
        for name, declared in option_specs(self.options).items():
            value = getattr(self.options, name)
            of_batches = name not in unread and name != "teacher" and not hasattr(self.criterion, name)
            if of_batches and (value != declared.default or name in ("group_size", "negative_ratio")):
                effective[name] = value
        if self.options.false_negatives == "mask" and not self.criterion.can_exclude:
            name = self.criterion.loss.rpartition(":")[2]
            effective["false_negatives"] = f"not masked (`{name}` takes no negatives)"
        return effective

    @property
    def masks_false_negatives(self) -> bool:
        """True if other relevant functions in a batch are excluded from a query's negatives."""
        return self.options.false_negatives != "ignore" and self.criterion.can_exclude


def resolve(args: TrainingArguments, estimator=None, batch_size: int | None = None) -> Plan:
    """Checks the training options, fills in defaults and returns the `Plan`.

    Args:
        args: `SoftInfoNCETrainingArguments`, or plain `TrainingArguments`, in which case the package's options have
            their defaults.
        estimator: the estimator that supplies the weights, or None.
        batch_size: the number of pairs in one process's batch. By default, `per_device_train_batch_size`.

    Raises:
        UserError: an option cannot work. The message gives values that work.
    """
    check_options(args)
    given = {field.name: getattr(args, field.name, None) for field in fields(SoftInfoNCEOptions)}
    options = SoftInfoNCEOptions(**{name: value for name, value in given.items() if value is not None})
    loss = resolve_loss(options, estimator, args.world_size)
    return Plan(
        loss,
        options,
        args.train_sampling_strategy,
        parse_dims(options.matryoshka_dims),
        args.per_device_train_batch_size if batch_size is None else batch_size,
        args.world_size,
        gathers=args.world_size > 1 and options.gather_negatives is not False,
    )


def resolve_loss(options: SoftInfoNCEOptions, estimator=None, processes: int = 1) -> Criterion:
    """Returns the loss settings of a run. The estimator supplies defaults for options that are None.

    Raises:
        UserError: a value is out of range, or the settings do not work with the estimator.
    """
    name_functions(options)
    check_values(options)
    settings = {field.name: getattr(options, field.name) for field in fields(Criterion)}
    settings["loss"] = options.loss or ("info_nce" if estimator is None else "soft_info_nce")
    aware = options.weighting == "positive_aware"
    for name, declared in option_specs(LossOptions).items():
        if declared.of_estimator is not None and settings[name] is None:
            of_positives = name == "margin" or (name == "temperature" and aware)
            attribute = f"positive_{name}" if of_positives else name
            settings[name] = getattr(estimator, attribute, declared.of_estimator)
    loss = Criterion(**settings)
    name = type(estimator).__name__
    if loss.temperature == 0 and not aware:
        raise UserError("temperature=0: must be above 0")
    if loss.weighting != "linear" and not loss.uses_weights:
        raise UserError(f"weighting={loss.weighting}: loss={loss.loss} uses no weights; set loss=soft_info_nce")
    if options.false_negatives == "positives" and not loss.reads_extra_positives:
        raise UserError(
            f"false_negatives=positives: loss={loss.loss} has no argument `extra_positives` for the other positives"
        )
    if loss.cancel != "none" and not loss.can_exclude:
        raise UserError(f"cancel={loss.cancel}: loss={loss.loss} has no argument `negatives` to exclude functions")
    if loss.needs_similarity and estimator is None:
        raise UserError(
            f"{loss.settings_that_need_similarity} needs an estimator: set estimator=bm25 (in Python, pass "
            "callbacks=[EstimatorCallback(BM25Estimator())]), or loss=info_nce"
        )
    if aware and not getattr(estimator, "compares_codes", True):
        raise UserError(
            f"weighting=positive_aware: {name} does not compare queries with functions; use {COMPARE_CODES}"
        )
    reads_all = "similarity" in loss.read_by_loss and "estimated" not in loss.read_by_loss
    if getattr(estimator, "partial", False) and reads_all:
        raise UserError(
            f"loss={loss.loss} compares all functions of a batch, but {name} knows the similarity of few of them; set "
            "loss=soft_info_nce, or loss=info_nce with distill_weight"
        )
    if ":" in loss.loss + loss.weighting:  # tests try out the package's own functions
        divided_by = f"{processes} processes" if processes > 1 else ""
        if options.gradient_cache_chunk_size is not None:
            divided_by = f"gradient_cache_chunk_size={options.gradient_cache_chunk_size}"
        loss.try_out(divided_by)
    return loss


def check_codes(loss: Criterion, codes: int) -> None:
    """Checks that `codes`, the number of functions that each query is compared with, is large enough for the loss.

    Raises:
        UserError: there are too few functions. The message gives the smallest number that works.
    """
    settings = f"loss={loss.loss}, cancel={loss.cancel}"
    least = loss.smallest_batch
    if loss.uses_weights and loss.weighting == "linear":
        settings += f", alpha={loss.alpha:g}, beta={loss.beta:g} (beta must be above alpha / (N - 1))"
    if codes < least:
        raise UserError(
            f"each query is compared with N={codes} functions, too few for {settings}: the smallest N that works is "
            f"{least}; raise per_device_train_batch_size, or add rows"
        )


# ---- Options of `transformers` ----


def check_options(args: TrainingArguments) -> None:
    """Checks every option that can be checked without rows or an encoder.

    Raises:
        UserError: a value is out of range, an option is not supported or does not work on this machine, or options
            contradict each other. The message lists what works.
    """
    # Plain `TrainingArguments` have some of these options.
    check_values(args, option_specs(TrainingOptions) | RANGES)
    accelerator = getattr(args, "accelerator_config", None)
    for options, owner, prefix in ((REFUSED, args, ""), (REFUSED_OF_ACCELERATOR, accelerator, "accelerator_config.")):
        for name, reason in options.items():
            value = getattr(owner, name, None)
            if value and value != "no":
                raise UserError(f"{prefix}{name}={value}: has no effect in this run; {reason}")
    if args.output_dir:
        check_writable(args.output_dir, f"output_dir={args.output_dir}")
    parallelism = getattr(args, "parallelism_config", None)
    if any((getattr(parallelism, name, None) or 1) > 1 for name in SHARED_BATCH):
        raise UserError(
            "parallelism_config: processes that share a batch (tensor, context or sequence parallelism) are not "
            "supported; use data parallelism, FSDP or DeepSpeed"
        )
    if getattr(args, "gradient_cache_chunk_size", None) is not None and args.deepspeed_plugin is not None:
        raise UserError("gradient_cache_chunk_size: DeepSpeed allows one backward pass per step; use DDP or FSDP")
    if getattr(args, "merge_ratio", None) is not None and (args.fsdp or args.deepspeed):
        raise UserError("merge_ratio: with FSDP or DeepSpeed, no process has all weights")
    if args.auto_find_batch_size and args.world_size > 1:
        raise UserError(
            "auto_find_batch_size: works only with one process, because the others would wait for the one that runs "
            "out of memory; use gradient_cache_chunk_size for large batches"
        )
    if isinstance(args, TrainingOptions):
        # `set_save` and `set_evaluate` set 500 steps beside any strategy.
        check_steps({name: value for name, value in vars(args).items() if value != TrainingArguments.save_steps})
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise UserError(
            "save_strategy=best: needs an evaluation to choose the checkpoint; set eval_strategy=epoch, for example"
        )
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs without a launcher would be wrapped in DataParallel, which splits the negatives of a "
            "batch. Start with `accelerate launch`, or use one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    # With the other mode, these schedules would lower the learning rate while the encoder improves.
    name = SchedulerType(args.lr_scheduler_type).value
    larger = args.greater_is_better is not False
    mode = "max" if larger else "min"
    if name in FALLING and (args.lr_scheduler_kwargs or {}).get("mode", "min") != mode:
        raise UserError(
            f"lr_scheduler_type={name}: {args.metric_for_best_model} has greater_is_better={larger}; set "
            f'lr_scheduler_kwargs={{"mode": "{mode}"}}'
        )
