"""Training arguments: the options declared in `fields.py`, together with those of `transformers`."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field

from transformers import TrainingArguments

from soft_trainer.errors import UserError
from soft_trainer.objective import name_functions
from soft_trainer.options.declared import documented
from soft_trainer.options.fields import PARTS, TrainingOptions

# Options of `transformers` that affect results. The package's own options declare this with `results`.
OF_TRANSFORMERS = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "auto_find_batch_size",
    "data_seed",
    "dataloader_drop_last",
    "deepspeed",
    "do_train",
    "fp16",
    "fsdp",
    "fsdp_config",
    "gradient_accumulation_steps",
    "load_best_model_at_end",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "optim",
    "optim_args",
    "optim_target_modules",
    "tf32",
    "torch_compile",
    "use_liger_kernel",
    "warmup_steps",
    "weight_decay",
)


def _default(name: str, value):
    """Redeclares an option of `transformers` with a different default."""
    return field(default=value, metadata=TrainingArguments.__dataclass_fields__[name].metadata)


class _SignatureOfInit:
    """The signature of a class whose `__new__` takes anything: that of its `__init__`."""

    def __get__(self, instance, owner: type) -> inspect.Signature:
        parameters = list(inspect.signature(owner.__init__).parameters.values())
        return inspect.Signature(parameters[1:])


@documented
@dataclass
class SoftInfoNCETrainingArguments(TrainingOptions, TrainingArguments):
    """Extends `transformers.TrainingArguments` with options for the loss, the batches and the negatives.

    Some defaults differ from those of `transformers`: batches of 32, 10 epochs and a `learning_rate` of 2e-5. The last
    incomplete batch is dropped, the best model is the one with the highest `mrr`, NaN losses appear in the log, and
    DDP does not broadcast buffers. For some encoders, `options/defaults.py` chooses other defaults.

    Args:
    OPTIONS

    Attributes:
        named: the names of the options that the caller set.
    """

    named = frozenset()
    __signature__ = _SignatureOfInit()

    logging_steps: float = _default("logging_steps", 50)
    logging_nan_inf_filter: bool = _default("logging_nan_inf_filter", False)
    save_strategy: str = _default("save_strategy", "epoch")
    save_total_limit: int | None = _default("save_total_limit", 2)
    dataloader_drop_last: bool = _default("dataloader_drop_last", True)
    dataloader_num_workers: int = _default("dataloader_num_workers", -1)  # none on a CPU, up to 4 on a GPU
    ddp_broadcast_buffers: bool | None = _default("ddp_broadcast_buffers", False)
    restore_callback_states_from_checkpoint: bool = _default("restore_callback_states_from_checkpoint", True)
    metric_for_best_model: str | None = _default("metric_for_best_model", "mrr")

    def __new__(cls, *args, **given):
        arguments = super().__new__(cls)
        arguments.named = frozenset(given)
        return arguments

    def __post_init__(self):
        name_functions(self)
        asked = [name for name in PARTS if getattr(self, name)]
        if not asked:  # run all parts, except those that the command line turned off
            asked = [name for name in PARTS if getattr(self, name) is None] or PARTS
        for name in PARTS:
            setattr(self, name, name in asked)
        workers = self.dataloader_num_workers
        if workers < -1:
            raise UserError(f"dataloader_num_workers={workers}: must be -1 (chosen by the device), 0 or more")
        self.dataloader_num_workers = max(workers, 0)
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name, None)
            if isinstance(value, str) and value.startswith("{"):
                try:
                    json.loads(value)
                except ValueError as error:
                    raise UserError(f"{name}={value}: not valid JSON: {error}") from error
        folder = self.output_dir
        super().__post_init__()
        self.output_dir = folder  # keep None, so that the script can choose a folder
        if workers < 0 and self.device.type != "cpu":
            self.dataloader_num_workers = 4
