"""Every option of `TrainingArguments` and every argument of `Trainer`: it works, is refused or named, or is untouched.

A field of the installed version that is in none of the tables fails the test; one of a newer version warns.
"""

import ast
import dataclasses
import inspect
import warnings
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from refusals import refused
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from soft_trainer.options.refused import IGNORED, REFUSED, REFUSED_OF_ACCELERATOR, check_options
from soft_trainer.training.preflight import REFUSED_ARGUMENTS

TESTS = Path(__file__).parents[1]
READ = Version("5.23")  # the tables were written with this version at hand

OPTIONS = "training/test_trainer_options.py"
HUB = "hub/test_training.py"
SCRIPT = "test_script.py"
PROCESSES = "training/test_processes.py"
# Options that work -> the test that shows it.
WORKS = {
    "output_dir": "test_script.py::test_the_default_output_folder_says_what_was_trained",
    "per_device_train_batch_size": "training/test_combinations.py::test_a_training_has_the_plain_loss_or_is_refused",
    "num_train_epochs": "test_script.py::test_a_run_writes_its_results_and_every_rank",
    "max_steps": f"{OPTIONS}::test_every_strategy_trains",
    "learning_rate": "test_trainer.py::test_every_parameter_moves_and_the_loss_falls",
    "lr_scheduler_type": f"{OPTIONS}::test_a_schedule_that_watches_a_metric_steps_on_it",
    "lr_scheduler_kwargs": f"{OPTIONS}::test_a_schedule_that_watches_a_metric_steps_on_it",
    "optim": f"{OPTIONS}::test_other_optimizers",
    "gradient_accumulation_steps": "test_trainer.py::test_accumulating_two_batches_is_not_one_batch_of_twice_the_size",
    "bf16": f"{OPTIONS}::test_bfloat16_on_a_cpu_is_near_float32",
    "activation_checkpointing": f"{OPTIONS}::test_activation_checkpointing_changes_no_gradient",
    "gradient_checkpointing": f"{OPTIONS}::test_activation_checkpointing_changes_no_gradient",
    "torch_compile": f"{OPTIONS}::test_a_compiled_model_trains_as_a_plain_one",
    "torch_compile_backend": f"{OPTIONS}::test_a_compiled_model_trains_as_a_plain_one",
    "neftune_noise_alpha": f"{OPTIONS}::test_noise_on_embeddings_is_the_same_in_both_passes_of_gradient_caching",
    "auto_find_batch_size": f"{OPTIONS}::test_a_batch_that_does_not_fit_in_memory_is_made_smaller",
    "logging_strategy": f"{OPTIONS}::test_weights_are_logged_whenever_a_loss_is",
    "logging_steps": "test_trainer.py::test_the_log_tells_of_the_weights",
    "logging_first_step": f"{OPTIONS}::test_weights_are_logged_whenever_a_loss_is",
    "logging_nan_inf_filter": f"{OPTIONS}::test_hidden_losses_stop_the_run_too",
    "include_num_input_tokens_seen": f"{OPTIONS}::test_tokens_are_counted",
    "eval_strategy": f"{OPTIONS}::test_several_evaluation_sets_are_measured_apart_and_their_mean_chooses",
    "eval_steps": f"{OPTIONS}::test_several_evaluation_sets_are_measured_apart_and_their_mean_chooses",
    "per_device_eval_batch_size": f"{PROCESSES}::test_two_processes_train_as_one",
    "eval_on_start": f"{OPTIONS}::test_evaluation_before_the_first_step",
    "save_only_model": f"{OPTIONS}::test_training_resumes_from_the_last_checkpoint",
    "save_strategy": "test_trainer.py::test_a_half_written_checkpoint_is_passed_over",
    "save_steps": "test_trainer.py::test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one",
    "save_total_limit": f"{HUB}::test_a_push_that_failed_during_training_is_said_and_made_good_at_the_end",
    "push_to_hub": f"{HUB}::test_every_strategy_pushes_an_encoder_that_loads_by_name",
    "hub_token": f"{HUB}::test_private_on_a_branch_and_without_a_card",
    "hub_revision": f"{HUB}::test_private_on_a_branch_and_without_a_card",
    "hub_private_repo": f"{HUB}::test_private_on_a_branch_and_without_a_card",
    "hub_model_id": f"{HUB}::test_every_strategy_pushes_an_encoder_that_loads_by_name",
    "hub_strategy": f"{HUB}::test_every_strategy_pushes_an_encoder_that_loads_by_name",
    "hub_always_push": f"{HUB}::test_every_strategy_pushes_an_encoder_that_loads_by_name",
    "load_best_model_at_end": f"{OPTIONS}::test_several_evaluation_sets_are_measured_apart_and_their_mean_chooses",
    "metric_for_best_model": f"{OPTIONS}::test_one_of_several_evaluation_sets_can_choose",
    "greater_is_better": f"{OPTIONS}::test_compute_metrics_gets_ranks_top_codes_and_targets",
    "seed": f"{OPTIONS}::test_the_seed_of_the_data_decides_the_batches",
    "data_seed": f"{OPTIONS}::test_the_seed_of_the_data_decides_the_batches",
    "use_cpu": f"{OPTIONS}::test_every_strategy_trains",
    "dataloader_drop_last": "test_trainer.py::test_a_short_last_batch_trains_with_weights_of_one",
    "dataloader_num_workers": f"{PROCESSES}::test_workers_of_any_start_method_serve_one_process",
    "dataloader_multiprocessing_context": f"{PROCESSES}::test_workers_of_any_start_method_serve_one_process",
    "dataloader_persistent_workers": "options/test_refused.py::test_the_loader_has_the_options_of_a_loader",
    "dataloader_prefetch_factor": "options/test_refused.py::test_the_loader_has_the_options_of_a_loader",
    "remove_unused_columns": f"{OPTIONS}::test_columns_of_a_pair_are_kept",
    "train_sampling_strategy": f"{OPTIONS}::test_every_strategy_trains",
    "ddp_broadcast_buffers": f"{PROCESSES}::test_two_processes_train_as_one",
    "ddp_find_unused_parameters": f"{PROCESSES}::test_two_processes_train_as_one",
    "fsdp_config": f"{PROCESSES}::test_sharded_weights_train_and_evaluate_as_whole_ones",
    "do_train": "test_script.py::test_a_run_without_training_only_measures",
    "do_eval": "test_script.py::test_a_run_without_training_only_measures",
    "do_predict": "test_script.py::test_a_run_without_training_only_measures",
    "resume_from_checkpoint": f"{SCRIPT}::test_the_same_run_again_gives_the_same_figures_and_a_checkpoint_goes_on",
    "restore_callback_states_from_checkpoint": f"{OPTIONS}::test_early_stopping_resumes_where_it_was",
}
# Options that work unless the value is one of these: the options of a training that is refused.
REFUSED_VALUES = {
    "accelerator_config": {"accelerator_config": {"split_batches": True}},
    "fp16": {"fp16": True},
    "fsdp": {"fsdp": "full_shard"},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 2, "gradient_cache_chunk_size": 4},
    "report_to": {"report_to": ["tensorbord"]},
}
# Options that only `Trainer` deals with: neither read nor affected here.
UNTOUCHED = """
    warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules max_grad_norm tf32
    activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_mode use_cache log_on_each_node
    log_level log_level_replica disable_tqdm run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_delay save_on_each_node ignore_data_skip full_determinism
    dataloader_pin_memory ddp_bucket_cap_mb ddp_backend ddp_timeout deepspeed debug skip_memory_metrics local_rank
""".split()
# Refused unless every process has its own batch: test_processes_that_share_a_batch_are_refused.
REFUSED_ELSEWHERE = {"parallelism_config"}

ARGUMENTS = {
    "model": "test_trainer.py::test_every_parameter_moves_and_the_loss_falls",
    "args": "test_trainer.py::test_plain_training_arguments_mean_soft_info_nce_with_an_estimator_and_info_nce_without",
    "data_collator": "test_trainer.py::test_chunks_of_like_length_give_the_loss_and_gradients_of_one_padded_batch",
    "train_dataset": "test_trainer.py::test_rows_may_be_lists_of_dicts_everywhere",
    "eval_dataset": f"{OPTIONS}::test_several_evaluation_sets_are_measured_apart_and_their_mean_chooses",
    "processing_class": "test_trainer.py::test_evaluation_equals_brute_force",
    "model_init": f"{OPTIONS}::test_a_model_is_made_anew_for_every_training",
    "compute_metrics": f"{OPTIONS}::test_compute_metrics_gets_ranks_top_codes_and_targets",
    "callbacks": f"{OPTIONS}::test_an_estimator_that_is_added_later_weighs",
    "optimizers": f"{OPTIONS}::test_an_optimizer_with_two_sets_of_weights_is_asked_for_those_of_evaluation",
    "optimizer_cls_and_kwargs": f"{OPTIONS}::test_an_optimizer_of_ones_own",
}


def unclassified(names: set[str], classes: list) -> set[str]:
    """Returns the names that are in no class, or in several."""
    return {name for name in names if sum(name in classified for classified in classes) != 1}


def check_classified(names: set[str], classes: list) -> None:
    strangers = unclassified(names, classes)
    if Version(transformers.__version__).release[:2] > READ.release[:2]:
        if strangers:
            warnings.warn(
                f"transformers {transformers.__version__} has options of no class: {strangers}", stacklevel=2
            )
    else:
        assert strangers == set()


def test_every_option_has_a_class():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    check_classified(fields, [WORKS, REFUSED, IGNORED, REFUSED_VALUES, UNTOUCHED, REFUSED_ELSEWHERE])


def test_every_argument_has_a_class():
    arguments = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    check_classified(arguments, [ARGUMENTS, REFUSED_ARGUMENTS])


@pytest.mark.parametrize("test", sorted({*WORKS.values(), *ARGUMENTS.values()}))
def test_the_tests_that_are_named_exist(test):
    file, _, name = test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")}
    assert name in functions


OTHER_VALUES = {
    "label_smoothing_factor": 0.1,
    "include_for_metrics": ["inputs"],
    "dataloader_in_order": False,
    "ddp_static_graph": True,
    "eval_accumulation_steps": 2,
    "eval_do_concat_batches": False,
    "label_names": ["labels"],
    "length_column_name": "size",
    "average_tokens_across_devices": False,
    "liger_kernel_config": {"rope": True},
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": False,
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_promises_another_result_is_refused(trainer_of, name, plain):
    if not hasattr(TrainingArguments, name) and name not in {f.name for f in dataclasses.fields(TrainingArguments)}:
        pytest.skip("this version of transformers does not have it")
    with refused(f"{name}=", REFUSED[name][1]):
        trainer_of(plain=plain, **{name: OTHER_VALUES.get(name, True)})


@pytest.mark.parametrize("name", REFUSED_OF_ACCELERATOR)
def test_an_option_of_a_loader_that_is_not_used_is_refused(trainer_of, name):
    config = AcceleratorConfig(**{name: OTHER_VALUES.get(name, True)})
    with refused(f"accelerator_config.{name}="):
        trainer_of(accelerator_config=config)


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_without_effect_is_named_when_training_starts(trainer_of, capsys, name):
    if name not in {field.name for field in dataclasses.fields(TrainingArguments)}:
        pytest.skip("this version of transformers does not have it")
    trainer_of(max_steps=1, **{name: OTHER_VALUES.get(name, True)}).train()
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"warning: {name} ")]
    assert IGNORED[name][1] in line


@pytest.mark.slow
def test_nothing_is_named_without_cause(trainer_of, capsys):
    for plain in (True, False):
        trainer_of(plain=plain, max_steps=1).train()
    assert "warning: " not in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_a_value_that_does_not_work_is_refused(trainer_of, name):
    with refused(name):
        trainer_of(**REFUSED_VALUES[name])


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_an_argument_without_meaning_is_refused(trainer_of, name):
    with refused(f"{name}: has no meaning"):
        trainer_of(arguments={name: lambda *arguments: 0})


def test_an_argument_that_is_no_encoder_is_refused(trainer_of):
    for argument, value, word in (
        ("model", None, "model_init"),
        ("model", "microsoft/unixcoder-base", "not str"),
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
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
    loader = trainer_of(dataloader_multiprocessing_context="fork", **options).get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, True, 3)
    assert loader.multiprocessing_context.get_start_method() == "fork"
