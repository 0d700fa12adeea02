"""The options of `TrainingArguments` that have no meaning here, and the values that training would stumble over."""

from __future__ import annotations

import difflib
import math
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import SchedulerType, Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames, ParallelMode

from soft_trainer.encoders.matryoshka import parse_dims
from soft_trainer.errors import UserError


@dataclass(frozen=True)
class WithoutMeaning:
    """An option that changes nothing here.

    Args:
        default: the value that is accepted without a word.
        reason: why it has no meaning, or the alternative.
    """

    default: object
    reason: str


# Arguments of `Trainer.__init__`.
REFUSED_ARGUMENTS = {
    "compute_loss_func": "choose a loss with args.loss, or override compute_loss",
    "preprocess_logits_for_metrics": "there are no logits; compute_metrics gets ranks and the top codes",
}
# Refused, because the result would not be the one that the option promises.
REFUSED = {
    "label_smoothing_factor": WithoutMeaning(0.0, "Soft-InfoNCE's weights soften the loss"),
    "fp16_full_eval": WithoutMeaning(False, "evaluation runs in the precision of training"),
    "bf16_full_eval": WithoutMeaning(False, "evaluation runs in the precision of training, use bf16"),
    "batch_eval_metrics": WithoutMeaning(False, "metrics are computed over all queries at once"),
    "include_for_metrics": WithoutMeaning([], "compute_metrics gets ranks and the top codes"),
    "use_liger_kernel": WithoutMeaning(False, "its kernels are for models that generate text"),
    "enable_jit_checkpoint": WithoutMeaning(False, "every run saves a checkpoint on SIGTERM already"),
    "dataloader_in_order": WithoutMeaning(True, "all processes must take the same batches at the same step"),
    "ddp_static_graph": WithoutMeaning(None, "the number of forward passes changes from batch to batch"),
}
REFUSED_OF_ACCELERATOR = {
    "split_batches": WithoutMeaning(False, "each process takes its share of a global batch"),
    "dispatch_batches": WithoutMeaning(None, "each process makes its own batches"),
    "even_batches": WithoutMeaning(True, "a short last batch stays short, or dataloader_drop_last leaves it out"),
    "use_seedable_sampler": WithoutMeaning(True, "seed and epoch alone decide the batches"),
}
# Named in a warning, because the result is the same.
IGNORED = {
    "prediction_loss_only": WithoutMeaning(False, "evaluation ranks codes"),
    "eval_accumulation_steps": WithoutMeaning(None, "only the ranks of an evaluation are kept"),
    "eval_do_concat_batches": WithoutMeaning(True, "an evaluation ranks all queries at once"),
    "eval_use_gather_object": WithoutMeaning(False, "ranks are gathered as tensors"),
    "label_names": WithoutMeaning(None, "a query's label is its own code"),
    "length_column_name": WithoutMeaning("length", "group_by_length counts the tokens itself"),
    "average_tokens_across_devices": WithoutMeaning(True, "the loss is a mean over queries, not over tokens"),
    "liger_kernel_config": WithoutMeaning(None, "use_liger_kernel is refused"),
}
# Kinds of parallelism whose processes share a batch.
SHARED_BATCH = ("tp_size", "cp_size", "sp_size")
FALLING = ("reduce_lr_on_plateau", "greedy")  # schedules that watch a metric, which falls unless told otherwise


def check_options(args: TrainingArguments) -> None:
    """Refuses options that have no meaning here, and values that training would stumble over.

    Raises:
        UserError: names the option and what works.
    """
    _check_numbers(args)
    parse_dims(getattr(args, "matryoshka_dims", None))
    _check_output_dir(args)
    _check_without_meaning(args)
    _check_loader(args)
    _check_together(args)
    _check_reports(args)
    _check_optimizer(args)


def ignored_options(args: TrainingArguments) -> list[str]:
    """A line for every option that was set and changes nothing."""
    return [
        f"warning: {name} has no effect on this training: {option.reason}"
        for name, option in IGNORED.items()
        if getattr(args, name, option.default) not in (option.default, None)
    ]


def _check_numbers(args) -> None:
    """Refuses numbers outside their range."""
    for name in ("learning_rate", "num_train_epochs", "weight_decay", "max_grad_norm", "warmup_steps", "eval_delay"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UserError(f"{name}={value}: must be a finite number, 0 or more")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)}: must be 1 or more")
    chunk = getattr(args, "gradient_cache_chunk_size", None)
    if chunk is not None and chunk < 1:
        raise UserError(f"gradient_cache_chunk_size={chunk}: must be 1 or more")
    if args.max_steps != -1 and args.max_steps < 1:
        raise UserError(f"max_steps={args.max_steps}: must be 1 or more, or -1 to train for num_train_epochs")
    for kind in ("logging", "eval", "save"):
        steps = getattr(args, f"{kind}_steps")
        if getattr(args, f"{kind}_strategy") == "steps" and not (math.isfinite(steps) and steps > 0):
            raise UserError(f"{kind}_steps={steps}: must be above 0, below 1 for a share of all steps")
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < 2**32:
            raise UserError(f"{name}={value}: must be from 0 to 2^32 - 1")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise UserError(f"save_total_limit={args.save_total_limit}: must be 1 or more; --save_strategy no keeps none")


def _check_output_dir(args) -> None:
    """Refuses an output folder that cannot be written."""
    if args.output_dir is None:
        return
    folder = Path(args.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"output_dir={args.output_dir}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"output_dir={args.output_dir}: {there} cannot be written")


def _check_without_meaning(args) -> None:
    """Refuses options of `REFUSED`."""
    accelerator = getattr(args, "accelerator_config", None)
    for options, owner, prefix in ((REFUSED, args, ""), (REFUSED_OF_ACCELERATOR, accelerator, "accelerator_config.")):
        for name, option in options.items():
            value = getattr(owner, name, option.default)
            if value != option.default and (value or option.default):
                raise UserError(f"{prefix}{name}={value}: has no meaning for this training; {option.reason}")
    sizes = {name: getattr(getattr(args, "parallelism_config", None), name, None) or 1 for name in SHARED_BATCH}
    if max(sizes.values()) > 1:
        raise UserError(
            "parallelism_config: processes that share a batch (tensor, context or sequence parallelism) are not "
            "supported; use data parallelism, FSDP or DeepSpeed"
        )


def _check_loader(args) -> None:
    """Refuses options that a `DataLoader` would refuse after hours of preparation."""
    workers, context = args.dataloader_num_workers, getattr(args, "dataloader_multiprocessing_context", None)
    if workers < 0:
        raise UserError(f"dataloader_num_workers={workers}: must be 0 or more")
    if args.dataloader_persistent_workers and workers == 0:
        raise UserError("dataloader_persistent_workers: needs --dataloader_num_workers above 0")
    if args.dataloader_prefetch_factor is not None and args.dataloader_prefetch_factor < 1:
        raise UserError(f"dataloader_prefetch_factor={args.dataloader_prefetch_factor}: must be 1 or more")
    if isinstance(context, str) and context not in (allowed := multiprocessing.get_all_start_methods()):
        raise UserError(f"dataloader_multiprocessing_context={context!r}: use one of {', '.join(allowed)}")


def _check_together(args) -> None:
    """Refuses options that contradict each other."""
    cached = getattr(args, "gradient_cache_chunk_size", None) is not None
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
    if args.include_num_input_tokens_seen not in ("no", "all", "non_padding"):
        raise UserError(
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}: use no, all or non_padding"
        )


def _check_reports(args) -> None:
    """Refuses a logger that is unknown or not installed."""
    available = get_available_reporting_integrations()
    for name in args.report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            nearest = difflib.get_close_matches(str(name), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"use {', '.join(INTEGRATION_TO_CALLBACK)} or none"
            raise UserError(f"report_to={name!r}: unknown; {hint}")
        if name not in (*available, "flyte"):  # the one integration that transformers does not list
            raise UserError(f"report_to={name!r}: its package is not installed; install it, or use --report_to none")


def _check_optimizer(args) -> None:
    """Refuses an optimizer or a schedule that cannot be made from its options, by making it for one parameter."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    try:
        if args.optim_target_modules is None:  # such an optimizer looks for them in the model
            kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
            if kind.__module__.startswith("torch.optim"):
                optimizer = kind(parameters, **settings)
    except (ImportError, ValueError, TypeError) as error:
        raise UserError(f"optim={OptimizerNames(args.optim).value}: {_one_line(error)}") from error
    name, settings = SchedulerType(args.lr_scheduler_type).value, args.lr_scheduler_kwargs
    if not isinstance(settings, dict | None):
        raise UserError(f"lr_scheduler_kwargs={settings!r}: expected is a mapping such as '{{\"num_cycles\": 2}}'")
    mode = "max" if args.greater_is_better else "min"
    if name in FALLING and (settings or {}).get("mode", "min") != mode:
        raise UserError(
            f"lr_scheduler_type={name}: {args.metric_for_best_model} is better when "
            f'{"larger" if args.greater_is_better else "smaller"}; set --lr_scheduler_kwargs \'{{"mode": "{mode}"}}\''
        )
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(10), 10, settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"lr_scheduler_type={name}, lr_scheduler_kwargs={settings}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
