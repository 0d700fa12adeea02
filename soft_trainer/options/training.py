"""Defines the training arguments: the options declared in `fields.py` and the arguments of `transformers`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from soft_trainer.errors import UserError
from soft_trainer.options.fields import PARTS, TrainingOptions
from soft_trainer.options.references import name_functions
from soft_trainer.options.spec import check_values, documented
from soft_trainer.system import distributed

# The options of `transformers` that do not affect results, except through metrics that choose the checkpoint or the
# learning rate. All others count in a run fingerprint. The package's options declare whether they affect results
# (`results`).
AFFECT_NOTHING = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs batch_eval_metrics
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_on_start eval_steps eval_strategy eval_use_gather_object gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names length_column_name local_rank
    log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps
    logging_strategy metric_for_best_model prediction_loss_only project remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit skip_memory_metrics torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id use_cache
""".split()

OTHER_DEFAULT = re.compile(r"(?:Will default|Defaults?) to [^.]*\.")  # a sentence in a help text of `transformers`
MOST_WORKERS = 8  # data workers of a process that uses a GPU


def _default(name: str, value):
    """Returns a dataclass field for an option of `transformers` with a different default, which its help omits."""
    metadata = dict(TrainingArguments.__dataclass_fields__[name].metadata)
    metadata["help"] = OTHER_DEFAULT.sub("", metadata["help"]).strip()
    return field(default=value, metadata=metadata)


@documented
@dataclass
class SoftInfoNCETrainingArguments(TrainingOptions, TrainingArguments):
    """The arguments of `transformers`, extended with options for the loss, the batches and the negatives.

    None stands for the default of any option. The learning rate, the epochs, the warm-up, the batch size, the weights
    and the batches are None until a trainer is made; its `args` have the defaults for its encoder
    (`options/defaults.py`). Some other defaults differ from the defaults of `transformers`: the last
    incomplete batch is dropped, the best model is the model with the highest `mrr`, NaN losses appear in the log, and
    DDP does not broadcast buffers.

    Args:
    OPTIONS

    Attributes:
        from_command_line: True if `parse` made the arguments.
        by_encoder: after `apply_defaults`, the names of the options whose values it chose.
    """

    from_command_line = False
    by_encoder = None
    __repr__ = TrainingArguments.__repr__  # hides tokens

    logging_steps: float = _default("logging_steps", 50)
    logging_nan_inf_filter: bool = _default("logging_nan_inf_filter", False)
    save_strategy: str = _default("save_strategy", "epoch")
    save_total_limit: int | None = _default("save_total_limit", 2)
    warmup_steps: float | None = _default("warmup_steps", None)
    dataloader_drop_last: bool | None = _default("dataloader_drop_last", None)
    dataloader_num_workers: int = _default("dataloader_num_workers", -1)  # none on a CPU, up to 8 on a GPU
    ddp_broadcast_buffers: bool | None = _default("ddp_broadcast_buffers", False)
    ddp_timeout: int = _default("ddp_timeout", 3 * 3600)  # other processes wait while one finds neighbours
    restore_callback_states_from_checkpoint: bool = _default("restore_callback_states_from_checkpoint", True)
    metric_for_best_model: str | None = _default("metric_for_best_model", "mrr")

    def __post_init__(self):
        name_functions(self)
        check_values(self)
        asked = [name for name in PARTS if getattr(self, name)]
        if not asked:  # run all parts, except the parts that the command line turned off
            asked = [name for name in PARTS if getattr(self, name) is None] or PARTS
        for name in PARTS:
            setattr(self, name, name in asked)
        workers = self.dataloader_num_workers
        if workers < -1:
            raise UserError(f"dataloader_num_workers={workers}: must be -1 (chosen by the device), 0 or more")
        self.dataloader_num_workers = max(workers, 0)
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, `transformers` refuses bf16
        folder = self.output_dir
        computed = {name: getattr(self, name) for name in ("warmup_steps", "per_device_train_batch_size")}
        for name, value in computed.items():
            if value is None:  # `transformers` computes with them
                setattr(self, name, getattr(TrainingArguments, name))
        super().__post_init__()
        vars(self).update(computed)
        if self.bf16 is False and self.mixed_precision == "bf16":
            self.mixed_precision = "no"  # `transformers` would let the launcher decide
        if folder is None:
            self.output_dir = None  # the script chooses a folder
        if workers < 0 and self.device.type != "cpu":
            self.dataloader_num_workers = min(max(distributed.cores() - 1, 1), MOST_WORKERS)
