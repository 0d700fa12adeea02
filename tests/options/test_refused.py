"""Every option of `TrainingArguments` and every argument of `Trainer` works, is refused, or has no role here.

A field of the installed version that is in none of the tables fails the test. A field of a newer version only warns.
"""

import dataclasses
import inspect
import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from refusals import refused
from transformers import Trainer, TrainingArguments

from soft_trainer import BM25Estimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.fields import DataArguments, EstimatorOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import OF_A_RUN, as_argv, parse
from soft_trainer.options.resolve import RANGES, REFUSED, check_options, resolve
from soft_trainer.options.spec import OptionSpec, option_specs
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.system.files import check_writable

READ = Version("5.23")  # the tables were written with this version at hand

# Options that work and that other tests give to a trainer or a run.
WORKS = """
    activation_checkpointing auto_find_batch_size bf16 data_seed dataloader_drop_last
    dataloader_multiprocessing_context dataloader_num_workers dataloader_prefetch_factor ddp_broadcast_buffers
    ddp_find_unused_parameters do_eval do_predict do_train eval_on_start eval_steps eval_strategy
    gradient_accumulation_steps gradient_checkpointing greater_is_better hub_always_push hub_model_id hub_private_repo
    hub_revision hub_strategy hub_token learning_rate load_best_model_at_end
    logging_first_step logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_steps
    metric_for_best_model neftune_noise_alpha num_train_epochs optim output_dir per_device_eval_batch_size
    per_device_train_batch_size push_to_hub remove_unused_columns resume_from_checkpoint save_only_model save_steps
    save_strategy save_total_limit seed torch_compile torch_compile_backend train_sampling_strategy use_cpu
""".split()
# Arguments of `Trainer` that work, likewise.
ARGUMENTS = """
    args callbacks compute_metrics data_collator eval_dataset model model_init optimizer_cls_and_kwargs optimizers
    processing_class train_dataset
""".split()
# Options of which some values are refused: see MISTAKES.
REFUSED_VALUES = {"accelerator_config", "fp16"}
# Options for batch-wise evaluation, labels, tokens and kernels of other models. Nothing here reads them.
UNREAD = """
    use_liger_kernel enable_jit_checkpoint dataloader_in_order eval_do_concat_batches label_names length_column_name
    average_tokens_across_devices liger_kernel_config
""".split()
# Options that only `Trainer` reads. This package neither reads nor affects them.
UNTOUCHED = """
    report_to logging_nan_inf_filter dataloader_persistent_workers warmup_steps optim_args weight_decay adam_beta1
    adam_beta2 adam_epsilon optim_target_modules max_grad_norm tf32 activation_checkpointing_kwargs
    gradient_checkpointing_kwargs torch_compile_mode use_cache log_on_each_node log_level log_level_replica
    disable_tqdm run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay
    save_on_each_node ignore_data_skip full_determinism fsdp torch_empty_cache_steps dataloader_pin_memory
    ddp_bucket_cap_mb ddp_backend ddp_timeout deepspeed debug skip_memory_metrics local_rank
""".split()
# Three options that other tests cover: refused unless every process has its batch
# (test_processes_that_share_a_batch_are_refused), set by a launcher
# (test_sharded_weights_train_and_evaluate_as_whole_ones), and on by default
# (test_early_stopping_resumes_where_it_was).
SHOWN_ELSEWHERE = {"parallelism_config", "fsdp_config", "restore_callback_states_from_checkpoint"}


def check_classified(names: set[str], classes: list) -> None:
    """Checks that each name is in exactly one class. If transformers is newer than the classes, it only warns."""
    strangers = {name for name in names if sum(name in classified for classified in classes) != 1}
    if Version(transformers.__version__).release[:2] > READ.release[:2]:
        if strangers:
            warnings.warn(f"transformers {transformers.__version__}: options of no class: {strangers}", stacklevel=2)
    else:
        assert strangers == set()


def test_every_option_has_a_class():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    check_classified(fields, [WORKS, REFUSED, UNREAD, REFUSED_VALUES, UNTOUCHED, SHOWN_ELSEWHERE])


def test_every_argument_has_a_class():
    arguments = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    check_classified(arguments, [ARGUMENTS, {"compute_loss_func", "preprocess_logits_for_metrics"}])


# ---- Values ----


def outside(spec: OptionSpec) -> list:
    """Returns values outside an option's range or choices."""
    values = [limit + step for limit, step in ((spec.least, -1), (spec.most, 1)) if limit is not None]
    values += [limit for limit in (spec.above, spec.below) if limit is not None]
    if spec.choices:
        values += ["nothing such", 3]
    if spec.choices or spec.of_estimator is not None or spec.range != "a finite number":
        values.append(float("nan"))
    return values


def test_every_declared_limit_is_checked():
    declared = dict(RANGES)
    for kind in (ModelArguments, DataArguments, SoftInfoNCETrainingArguments):
        declared |= option_specs(kind)
    for name, spec in declared.items():
        for value in outside(spec):
            with refused(f"{name}={value!r}: "):
                spec.checked(name, value)


# Options of the command line that are refused before any row is read, with a part of the message.
FALLING = {"eval_strategy": "epoch", "metric_for_best_model": "mean_rank", "greater_is_better": False}
FALLING |= {"lr_scheduler_type": "reduce_lr_on_plateau"}
MISTAKES = [
    # One row for each class that declares options, and for those of transformers.
    ({"max_train_rows": 0}, "max_train_rows=0: must be 1 or more"),
    ({"test_fraction": 0.7}, "test_fraction=0.7: must be above 0 and below 0.5"),
    ({"lora_r": 0}, "lora_r=0: must be 1 or more"),
    ({"seed": -1}, "seed=-1: must be 0 or more"),
    ({"test_fraction": 0.5}, "test_fraction=0.5: must be above 0 and below 0.5"),
    ({"score_scale": "nan"}, "score_scale=nan: must be a finite number"),
    ({"dataloader_num_workers": -7}, "dataloader_num_workers=-7: must be -1 (chosen by the device), 0 or more"),
    ({"matryoshka_dims": "16,0"}, "matryoshka_dims=16,0: expected distinct, comma-separated whole numbers above 0"),
    ({"matryoshka_dims": "16,16"}, "matryoshka_dims=16,16: expected distinct"),
    # Options that need another one.
    ({"lora_alpha": 8}, "lora_alpha: has no effect without lora_r"),
    ({"lora_target_modules": "query"}, "lora_target_modules: has no effect without lora_r"),
    ({"from_scratch": "32x1", "model": "a"}, "from_scratch and model_name_or_path: set only one of them"),
    ({"from_scratch": "32x1", "lora_r": 4}, "lora_r: an encoder from scratch has no trained weights to freeze"),
    ({"from_scratch": "32x1", "dtype": "float32"}, "dtype and attn_implementation do not apply with from_scratch"),
    ({"save_strategy": "best"}, "save_strategy=best: needs an evaluation"),
    ({"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"}, '{"mode": "max"}'),
    (
        FALLING | {"lr_scheduler_kwargs": '{"mode": "max"}'},
        "mean_rank has greater_is_better=False; set lr_scheduler_kwargs",
    ),
    ({"accelerator_config": '{"split_batches": true}'}, "accelerator_config.split_batches=True: has no effect"),
    # Errors of libraries.
    ({"accelerator_config": "nowhere.json"}, "nowhere.json"),
    ({"tf32": True}, "--tf32 requires Ampere"),
    ({"fp16": True, "bf16": True}, "At most one of fp16 and bf16"),
    ({"logging_steps": 0}, "requires non-zero --logging_steps"),
    ({"dataloader_num_workers": 0, "dataloader_prefetch_factor": 2}, "--dataloader_prefetch_factor can only be set"),
    ({"optim": "adam"}, "argument --optim"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=str)
def test_a_mistake_in_options_is_refused_before_rows_are_read(options, message, tmp_path):
    with refused(message):
        *_, args = parse(OF_A_RUN, as_argv({"use_cpu": True, "output_dir": str(tmp_path)} | options))
        resolve(args, BM25Estimator())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "json:JSONDecoder"}, "the class has no method fit; an estimator needs fit and similarity"),
        ({"estimator": "os:getcwd"}, "the class has no method fit"),
        ({"estimator": "trained_model"}, "estimator=trained_model: set estimator_model to a folder or a Hub name"),
    ],
)
def test_an_estimator_that_cannot_be_made(options, message):
    with refused(message):
        choose_estimator(EstimatorOptions(**options))


OTHER_VALUES = {
    "label_smoothing_factor": 0.1,
    "include_for_metrics": ["loss"],
    "ddp_static_graph": True,
    "dispatch_batches": True,
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_promises_another_result_is_refused(trainer_of, name, plain):
    if not hasattr(TrainingArguments, name) and name not in {f.name for f in dataclasses.fields(TrainingArguments)}:
        pytest.skip("this version of transformers does not have it")
    with refused(f"{name}=", REFUSED[name]):
        trainer_of(plain=plain, **{name: OTHER_VALUES.get(name, True)})


@pytest.mark.slow
def test_nothing_is_named_without_cause(trainer_of, capsys):
    for plain in (True, False):
        trainer_of(plain=plain, max_steps=1, arguments={"eval_dataset": None, "codebase": None}).train()
    assert "warning: " not in capsys.readouterr().err


def test_a_loss_that_would_not_be_called_is_refused(trainer_of):
    with refused("estimator is not an argument: pass the estimator in callbacks=[...]"):
        trainer_of(arguments={"estimator": None})
    with refused("compute_loss_func is not supported"):
        trainer_of(arguments={"compute_loss_func": lambda *arguments: 0})
    with refused("preprocess_logits_for_metrics is not supported"):
        trainer_of(arguments={"preprocess_logits_for_metrics": lambda *arguments: 0})


def test_an_argument_that_is_not_an_encoder_is_refused(trainer_of):
    for argument, value, word in (
        ("model", None, "model_init"),
        ("model", 3, "not int"),
        ("processing_class", None, "tokenizer"),
    ):
        with refused(word):
            trainer_of(arguments={argument: value})


def test_processes_that_share_a_batch_are_refused(trainer_of):
    from accelerate.utils import ParallelismConfig

    trainer = trainer_of()
    trainer.args.parallelism_config = ParallelismConfig(dp_replicate_size=2)
    check_options(trainer.args)
    trainer.args.parallelism_config = ParallelismConfig(tp_size=2)
    with refused("parallelism_config"):
        trainer.train()


def test_the_loader_has_the_options_of_a_loader(trainer_of):
    options = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}
    loader = trainer_of(dataloader_multiprocessing_context="fork", **options).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_a_folder_below_one_that_may_not_be_entered_is_not_writable(tmp_path, monkeypatch):
    stat = os.stat

    def closed(path, **options):
        if Path(path).parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused(f"output_dir=out: {tmp_path} is not writable"):
        check_writable(tmp_path / "out", "output_dir=out")


def test_bfloat16_without_an_accelerator_trains_on_the_cpu():
    assert SoftInfoNCETrainingArguments("unused", bf16=True).use_cpu is not torch.accelerator.is_available()
