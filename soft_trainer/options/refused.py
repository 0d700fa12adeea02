"""Refuses options of `TrainingArguments` without meaning here, and values that would make training fail."""

from __future__ import annotations

from transformers import SchedulerType, TrainingArguments

from soft_trainer.errors import UserError
from soft_trainer.files import check_writable
from soft_trainer.options.declared import Declared

# Option -> its default, and why no other value has a meaning: the result would not be the one that it promises.
REFUSED = {
    "label_smoothing_factor": (0.0, "Soft-InfoNCE's weights soften the loss"),
    "fp16_full_eval": (False, "evaluation runs in the precision of training"),
    "bf16_full_eval": (False, "evaluation runs in the precision of training, use bf16"),
    "ddp_static_graph": (None, "the number of forward passes changes from batch to batch"),
}
REFUSED_OF_ACCELERATOR = {
    "split_batches": (False, "each process takes its share of a global batch"),
    "dispatch_batches": (None, "each process makes its own batches"),
}
# Kinds of parallelism whose processes share a batch.
SHARED_BATCH = ("tp_size", "cp_size", "sp_size")
FALLING = ("reduce_lr_on_plateau", "greedy")  # schedules that watch a metric, which falls unless told otherwise

# Values that training would silently take for another, or stumble over when the rows are prepared.
RANGES = {
    "num_train_epochs": Declared(least=0),
    "per_device_train_batch_size": Declared(least=1),
    "per_device_eval_batch_size": Declared(least=1),
}


def check_options(args: TrainingArguments) -> None:
    """Refuses options without meaning here, and values that would make training fail.

    Raises:
        UserError: names the option and what works.
    """
    for name, declared in RANGES.items():
        declared.check(name, getattr(args, name, None))
    accelerator = getattr(args, "accelerator_config", None)
    for options, owner, prefix in ((REFUSED, args, ""), (REFUSED_OF_ACCELERATOR, accelerator, "accelerator_config.")):
        for name, (default, reason) in options.items():
            value = getattr(owner, name, default)
            wrong = value != default and (value or default)
            if wrong:
                raise UserError(f"{prefix}{name}={value}: has no meaning for this training; {reason}")
    _check_together(args)
    _check_schedule(args)


def _check_together(args) -> None:
    """Refuses options that contradict each other or the machine."""
    cached = getattr(args, "gradient_cache_chunk_size", None) is not None
    parallelism = getattr(args, "parallelism_config", None)
    if args.output_dir:
        check_writable(args.output_dir, f"output_dir={args.output_dir}")
    if any((getattr(parallelism, name, None) or 1) > 1 for name in SHARED_BATCH):
        raise UserError(
            "parallelism_config: processes that share a batch (tensor, context or sequence parallelism) are not "
            "supported; use data parallelism, FSDP or DeepSpeed"
        )
    if cached and args.deepspeed_plugin is not None:
        raise UserError("gradient_cache_chunk_size: DeepSpeed allows one backward pass a step; use DDP or FSDP")
    if args.auto_find_batch_size and args.world_size > 1:
        raise UserError(
            "auto_find_batch_size: works on one process only, since several would wait for the one that has run out "
            "of memory; use gradient_cache_chunk_size for large batches"
        )
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise UserError(
            "save_strategy=best: saves after an evaluation, and there is none; set --eval_strategy epoch, for example"
        )
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs without a launcher would be wrapped in DataParallel, which splits the negatives of a "
            "batch: start with `accelerate launch`, or show one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    # also when the launcher chose it
    if args.mixed_precision == "fp16" and args.device.type == "cpu":
        raise UserError("fp16 needs a GPU: use bf16 (--bf16 true, or the launcher's --mixed_precision bf16) on a CPU")


def _check_schedule(args) -> None:
    """Refuses a schedule that lowers the learning rate when the encoder improves."""
    name = SchedulerType(args.lr_scheduler_type).value
    if name in FALLING and (args.lr_scheduler_kwargs or {}).get("mode") != "max":
        raise UserError(
            f"lr_scheduler_type={name}: {args.metric_for_best_model} is better when larger; set "
            '--lr_scheduler_kwargs \'{"mode": "max"}\''
        )
