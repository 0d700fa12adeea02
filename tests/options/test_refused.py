"""Every option of `TrainingArguments` and every argument of `Trainer` works, is refused, or has no role here.

A field of the installed version that is in none of the tables fails the test. A field of a newer version only warns.
"""

import dataclasses
import inspect
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from refusals import refused
from transformers import Trainer, TrainingArguments

from soft_trainer.files import check_writable
from soft_trainer.options.resolve import REFUSED, check_options
from soft_trainer.options.training import SoftInfoNCETrainingArguments

TESTS = Path(__file__).parents[1]
READ = Version("5.23")  # the tables were written with this version at hand

# Options that work. test_what_works_is_used_in_a_test checks that a test uses each.
WORKS = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs optim gradient_accumulation_steps bf16 activation_checkpointing gradient_checkpointing
    torch_compile torch_compile_backend neftune_noise_alpha auto_find_batch_size logging_strategy logging_steps
    logging_first_step logging_nan_inf_filter include_num_input_tokens_seen eval_strategy eval_steps
    per_device_eval_batch_size eval_on_start save_only_model save_strategy save_steps save_total_limit push_to_hub
    hub_token hub_revision hub_private_repo hub_model_id hub_strategy hub_always_push load_best_model_at_end
    metric_for_best_model greater_is_better seed data_seed use_cpu dataloader_drop_last dataloader_num_workers
    dataloader_multiprocessing_context dataloader_prefetch_factor remove_unused_columns
    train_sampling_strategy ddp_broadcast_buffers ddp_find_unused_parameters do_train do_eval do_predict
    resume_from_checkpoint
""".split()
# Options of which some values are refused, as tests/test_bad_inputs.py shows.
REFUSED_VALUES = {"dataloader_persistent_workers", "accelerator_config", "fp16", "report_to"}
# Options for batch-wise evaluation, labels, tokens and kernels of other models. Nothing here reads them.
UNREAD = """
    batch_eval_metrics use_liger_kernel enable_jit_checkpoint dataloader_in_order
    eval_do_concat_batches
    eval_use_gather_object label_names length_column_name average_tokens_across_devices liger_kernel_config
""".split()
# Options that only `Trainer` reads. This package neither reads nor affects them.
UNTOUCHED = """
    warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules max_grad_norm tf32
    activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_mode use_cache log_on_each_node
    log_level log_level_replica disable_tqdm run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_delay save_on_each_node ignore_data_skip full_determinism fsdp torch_empty_cache_steps
    dataloader_pin_memory ddp_bucket_cap_mb ddp_backend ddp_timeout deepspeed debug skip_memory_metrics local_rank
""".split()
# Three options that other tests cover: refused unless every process has its batch
# (test_processes_that_share_a_batch_are_refused), set by a launcher
# (test_sharded_weights_train_and_evaluate_as_whole_ones), and on by default
# (test_early_stopping_resumes_where_it_was).
SHOWN_ELSEWHERE = {"parallelism_config", "fsdp_config", "restore_callback_states_from_checkpoint"}

# Arguments of `Trainer` that work.
ARGUMENTS = """
    model args data_collator train_dataset eval_dataset processing_class model_init compute_metrics callbacks
    optimizers optimizer_cls_and_kwargs
""".split()


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


@pytest.mark.parametrize("name", [*WORKS, *ARGUMENTS])
def test_what_works_is_used_in_a_test(name):
    given = re.compile(rf"""["'-]{name}["' ]|\b{name}=""")
    assert any(given.search(path.read_text()) for path in TESTS.rglob("*.py") if path != Path(__file__))


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
        trainer_of(plain=plain, max_steps=1).train()
    assert "warning: " not in capsys.readouterr().err


def test_a_loss_that_would_not_be_called_is_refused(trainer_of):
    with refused("estimator is not an argument: pass the estimator in callbacks=[...]"):
        trainer_of(arguments={"estimator": None})
    with refused("compute_loss_func is not supported"):
        trainer_of(arguments={"compute_loss_func": lambda *arguments: 0})


def test_an_argument_that_is_no_encoder_is_refused(trainer_of):
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


def test_a_push_without_a_login_is_announced_before_training(trainer_of, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("soft_trainer.training.reporting.get_token", lambda: None)
    trainer_of(max_steps=1, hub_model_id="USER/NAME").train()
    assert "warning: hub_model_id=USER/NAME: log in with `hf auth login` before pushing" in capsys.readouterr().err
