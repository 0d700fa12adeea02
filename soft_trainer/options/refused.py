"""The options of `TrainingArguments` that have no meaning here, and the values that training would stumble over."""

from __future__ import annotations

from transformers import SchedulerType, TrainingArguments
from transformers.training_args import ParallelMode

from soft_trainer.errors import UserError
from soft_trainer.files import check_writable
from soft_trainer.options.declared import Declared

# Option -> the value that is accepted without a word, and why it has no meaning, or the alternative.
# Refused, because the result would not be the one that the option promises.
REFUSED = {
    "label_smoothing_factor": (0.0, "Soft-InfoNCE's weights soften the loss"),
    "fp16_full_eval": (False, "evaluation runs in the precision of training"),
    "bf16_full_eval": (False, "evaluation runs in the precision of training, use bf16"),
    "batch_eval_metrics": (False, "metrics are computed over all queries at once"),
    "include_for_metrics": ([], "compute_metrics gets ranks and the top codes"),
    "use_liger_kernel": (False, "its kernels are for models that generate text"),
    "enable_jit_checkpoint": (False, "every run saves a checkpoint on SIGTERM already"),
    "dataloader_in_order": (True, "all processes must take the same batches at the same step"),
    "ddp_static_graph": (None, "the number of forward passes changes from batch to batch"),
}
REFUSED_OF_ACCELERATOR = {
    "split_batches": (False, "each process takes its share of a global batch"),
    "dispatch_batches": (None, "each process makes its own batches"),
    "even_batches": (True, "a short last batch stays short, or dataloader_drop_last leaves it out"),
    "use_seedable_sampler": (True, "seed and epoch alone decide the batches"),
}
# Named in a warning, because the result is the same.
IGNORED = {
    "dataloader_persistent_workers": (False, "every epoch starts its workers, so that a resumed run is exact"),
    "prediction_loss_only": (False, "evaluation ranks codes"),
    "eval_accumulation_steps": (None, "only the ranks of an evaluation are kept"),
    "eval_do_concat_batches": (True, "an evaluation ranks all queries at once"),
    "eval_use_gather_object": (False, "ranks are gathered as tensors"),
    "label_names": (None, "a query's label is its own code"),
    "length_column_name": ("length", "group_by_length counts the tokens itself"),
    "average_tokens_across_devices": (True, "the loss is a mean over queries, not over tokens"),
    "liger_kernel_config": (None, "use_liger_kernel is refused"),
}
# Kinds of parallelism whose processes share a batch.
SHARED_BATCH = ("tp_size", "cp_size", "sp_size")
FALLING = ("reduce_lr_on_plateau", "greedy")  # schedules that watch a metric, which falls unless told otherwise

# Values that training would silently take for another, or stumble over when the rows are prepared.
RANGES = {
    "dataloader_num_workers": Declared(least=0),
    "num_train_epochs": Declared(least=0),
    "per_device_train_batch_size": Declared(least=1),
    "per_device_eval_batch_size": Declared(least=1),
}


def check_options(args: TrainingArguments) -> None:
    """Refuses options that have no meaning here, and values that training would stumble over.

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


def ignored_options(args: TrainingArguments) -> list[str]:
    """Returns a line for every option that was set and changes nothing."""
    return [
        f"warning: {name} has no effect on this training: {reason}"
        for name, (default, reason) in IGNORED.items()
        if getattr(args, name, default) not in (default, None)
    ]


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
    if cached and args.torch_empty_cache_steps is not None:
        raise UserError("torch_empty_cache_steps: has no meaning with gradient_cache_chunk_size, use one of them")
    if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise UserError("fsdp: needs several processes, start with `accelerate launch` or torchrun")
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
    """Refuses a schedule that would lower the learning rate as the encoder gets better."""
    name = SchedulerType(args.lr_scheduler_type).value
    if name not in FALLING:
        return
    if args.greater_is_better:
        mode = "max"
        better = "larger"
    else:
        mode = "min"
        better = "smaller"
    if (args.lr_scheduler_kwargs or {}).get("mode", "min") != mode:
        raise UserError(
            f"lr_scheduler_type={name}: {args.metric_for_best_model} is better when {better}; set "
            f'--lr_scheduler_kwargs \'{{"mode": "{mode}"}}\''
        )
