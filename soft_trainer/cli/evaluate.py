"""Measure an encoder on a data set, without training it.

soft-trainer evaluate MODEL --data_dir DIR
soft-trainer evaluate outputs/quickstart --source_dir ~/src/my_project --language python
soft-trainer evaluate USER/NAME --eval_data_dir COSQA --output_dir outputs/cosqa

Every query of test looks for its own code in the corpus, and lexical BM25 does the same. With --eval_data_dir alone
only those sets are measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from soft_trainer.arguments import CODESEARCHNET, DataArguments, ModelArguments, SoftInfoNCETrainingArguments
from soft_trainer.cli.shared_options import add_shared_options
from soft_trainer.terminal import print_on_main

# The options that training has too, with the same names, help and defaults.
SHARED = {
    DataArguments: ("data_dir", "source_dir", "eval_data_dir", "language", "split_urls", "filters", "mining_keep")
    + ("lexical",),
    SoftInfoNCETrainingArguments: ("overwrite", "per_device_eval_batch_size", "bf16", "use_cpu", "disable_tqdm")
    + ("matryoshka_dims",),
    ModelArguments: ("model_revision", "trust_remote_code", "attn_implementation", "dtype", "profile", "pooling")
    + ("query_prefix", "code_prefix", "query_prompt", "code_prompt", "include_prompt", "query_length", "code_length")
    + ("data_flow_length", "score_function", "score_scale", "query_columns", "code_columns"),
}

ABOUT_TRAINING = ("estimator", "loss", "model_id", "revision", "statistics", "training", "weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", metavar="MODEL", help="the encoder: a name on the Hub, or a folder")
    parser.add_argument("--output_dir", help="Folder for ranks and results. Default: none are written.")
    parser.add_argument(
        "--dataset_name", help=f"Data set on the Hub. Default: {CODESEARCHNET}, unless a folder or a tree is named."
    )
    add_shared_options(parser, SHARED)


def run(arguments: argparse.Namespace) -> None:
    """Measure the encoder and print the table; write ranks and results if there is a folder for them."""
    with ExitStack() as stack:
        folder = arguments.output_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="soft-trainer-"))
        _measure(*training_arguments(arguments, folder), keep=arguments.output_dir is not None)


def training_arguments(arguments: argparse.Namespace, folder: str) -> tuple:
    """The options as a training run takes them that only measures."""
    given = {options: {name: getattr(arguments, name) for name in names} for options, names in SHARED.items()}
    alone = arguments.eval_data_dir and not (arguments.data_dir or arguments.source_dir)
    name = arguments.dataset_name or ("none" if alone else CODESEARCHNET)
    return (
        ModelArguments(model_name_or_path=arguments.model, **given[ModelArguments]),
        DataArguments(dataset_name=name, **given[DataArguments]),
        SoftInfoNCETrainingArguments(
            output_dir=folder, do_predict=True, report_to="none", **given[SoftInfoNCETrainingArguments]
        ),
    )


def _measure(
    model_args: ModelArguments, data_args: DataArguments, args: SoftInfoNCETrainingArguments, keep: bool
) -> None:
    # Imported here, so that a wrong option need not wait for them.
    from soft_trainer import SoftInfoNCETrainer, distributed
    from soft_trainer.data.sources import load_data, needed_splits
    from soft_trainer.evaluation.evaluation_sets import load_evaluation_sets
    from soft_trainer.evaluation.results import LABELS, metrics_table
    from soft_trainer.files import write_results
    from soft_trainer.studies.run import Run, check_output_dir, flat_results
    from soft_trainer.training.building import build_model, build_profile, build_tokenizer, model_label

    distributed.use_the_cores()
    check_output_dir(model_args, data_args, args)
    profile = build_profile(model_args)
    with args.main_process_first(desc="loading data"):
        data = load_data(data_args, profile, Path(args.output_dir) / "data", needed_splits(data_args, args))
        sets = load_evaluation_sets(data_args, profile, data.get("codebase"))
    tokenizer = build_tokenizer(model_args, profile, None)
    model = build_model(model_args, profile, tokenizer)
    trainer = SoftInfoNCETrainer(model, args, processing_class=tokenizer, encoder=profile)
    run = Run(trainer, data, model_args, data_args, {}, sets)
    run.measure("trained")
    if data_args.lexical:
        run.measure_lexical()
    if distributed.rank_and_world_size()[0] == 0:
        sys.stdout.write(metrics_table(run.results, {**LABELS, "trained": model_label(model_args)}) + "\n")
        if keep:
            record = {name: value for name, value in run.record().items() if name not in ABOUT_TRAINING}
            write_results(args.output_dir, record, eval=flat_results(run.results))
            print_on_main(f"Written to {args.output_dir}")
    distributed.close()
