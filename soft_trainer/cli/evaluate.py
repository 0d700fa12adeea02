"""Evaluate an encoder on a data set, without training it.

soft-trainer evaluate MODEL --data_dir DIR
soft-trainer evaluate outputs/quickstart --source_dir ~/src/my_project --language python
soft-trainer evaluate USER/NAME --eval_data_dir COSQA --output_dir outputs/cosqa --run_file outputs/cosqa.trec

The encoder and lexical BM25 each rank the corpus for every test query. If only --eval_data_dir is set, only its sets
are evaluated.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from soft_trainer.cli.shared_options import add_shared_options
from soft_trainer.errors import UserError
from soft_trainer.files import check_writable
from soft_trainer.option_spec import check_values, option_specs
from soft_trainer.options.fields import CODESEARCHNET, DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.shell.sources import check_sources
from soft_trainer.terminal import one_line_errors, print_on_main

SHARED = {}
for kind in (DataArguments, TrainingOptions, ModelArguments):
    SHARED[kind] = [name for name, declared in option_specs(kind).items() if declared.evaluation]
ABOUT_TRAINING = ("estimator", "loss", "model_id", "revision", "statistics", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer evaluate` to a parser."""
    parser.add_argument("model", metavar="MODEL", help="the encoder: a name on the Hub, or a folder")
    parser.add_argument("--output_dir", help="Folder for ranks and results. Default: nothing is written.")
    parser.add_argument(
        "--dataset_name", help=f"Data set on the Hub. Default: {CODESEARCHNET}, unless another option supplies rows."
    )
    parser.add_argument(
        "--run_file",
        metavar="FILE",
        help="Write rankings for trec_eval, ranx or ir-measures to FILE, and judgments to FILE.qrels. With several "
        "sets, the file names get the sets' names.",
    )
    parser.add_argument(
        "--run_depth",
        type=int,
        default=1000,
        metavar="N",
        help="Functions to list in --run_file for each query. MAP needs the whole corpus. Default: 1000.",
    )
    add_shared_options(parser, SHARED)


def run(arguments: argparse.Namespace) -> None:
    """Evaluates an encoder and prints a table. If there is an output folder, writes ranks and results to it."""
    with tempfile.TemporaryDirectory(prefix="soft-trainer-") as temporary, one_line_errors():
        if arguments.run_depth < 1:
            raise UserError(f"run_depth={arguments.run_depth}: must be 1 or more")
        model_args, data_args, args = training_arguments(arguments, arguments.output_dir or temporary)
        args.from_command_line = True
        # Imported here, so that errors in options are reported without waiting for torch.
        from soft_trainer import SoftInfoNCETrainer, distributed
        from soft_trainer.encoders.loading import profile_warnings
        from soft_trainer.evaluation.ranked_queries import LABELS
        from soft_trainer.evaluation.results import metrics_table
        from soft_trainer.run.folder import record_of
        from soft_trainer.run.record import write_run
        from soft_trainer.run.reporting import print_examples
        from soft_trainer.shell.opening import open_run

        distributed.use_the_cores()
        encoder, rows = open_run(model_args, data_args, args)
        run_files = {}
        if arguments.run_file:
            path = Path(arguments.run_file)
            check_writable(path.parent, f"run_file={path}")
            for name in rows.measured:
                run_files[name] = path.with_stem(f"{path.stem}-{name}") if len(rows.measured) > 1 else path
            for file in run_files.values():
                if not args.overwrite and (file.exists() or Path(f"{file}.qrels").exists()):
                    raise UserError(
                        f"run_file={path}: {file} or {file}.qrels would be overwritten; set another run_file, or "
                        "--overwrite true"
                    )
        trainer = SoftInfoNCETrainer(encoder, args, details=dataclasses.replace(rows, followed=()))
        if data_args.source_dir and data_args.mining_keep is None:
            mined = record_of(Path(model_args.model_name_or_path)).get("options", {}).get("mining_keep")
            if mined:
                print_on_main(f"The encoder's rows were mined with mining_keep={mined}, but this run ignores no rule")
        for warning in profile_warnings(trainer.model, encoder.profile):
            print_on_main(warning)

        def finish(run) -> None:
            if not distributed.is_main():
                return
            for name, file in run_files.items():
                print_on_main(run.outputs[name]["trained"].write_run_file(file, run.measured[name]))
            sys.stdout.write(metrics_table(run.results, {**LABELS, "trained": encoder.label}) + "\n")
            print_examples(run)
            if arguments.output_dir:
                write_run(
                    run, {name: value for name, value in run.trainer.record().items() if name not in ABOUT_TRAINING}
                )
                print_on_main(f"Written to {args.output_dir}")

        trainer.measure("trained", finish, arguments.run_depth if arguments.run_file else 10)
        distributed.close()


def training_arguments(
    arguments: argparse.Namespace, folder: str
) -> tuple[ModelArguments, DataArguments, TrainingOptions]:
    """Returns the training arguments of a run that only evaluates an encoder, with `folder` as the output folder."""

    def given(kind: type) -> dict[str, object]:
        return {name: getattr(arguments, name) for name in SHARED[kind]}

    dataset = arguments.dataset_name or CODESEARCHNET
    own = arguments.data_dir or arguments.source_dir
    if arguments.eval_data_dir and not own and not arguments.dataset_name:
        dataset = "none"
    model_args = ModelArguments(model_name_or_path=arguments.model, **given(ModelArguments))
    data_args = DataArguments(dataset_name=dataset, **given(DataArguments))
    options = given(TrainingOptions)
    check_values(TrainingOptions(**options))
    check_sources(data_args)
    from soft_trainer.options.training import SoftInfoNCETrainingArguments  # imports torch

    args = SoftInfoNCETrainingArguments(output_dir=folder, do_predict=True, report_to="none", **options)
    return model_args, data_args, args
