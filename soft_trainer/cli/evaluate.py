"""Evaluate an encoder on a data set, without training it.

soft-trainer evaluate MODEL --data_dir DIR
soft-trainer evaluate outputs/quickstart --source_dir ~/src/my_project --language python
soft-trainer evaluate USER/NAME --eval_data_dir DIR --output_dir outputs/judged --run_file outputs/judged.trec

The encoder and lexical BM25 each rank the corpus for every test query. If only --eval_data_dir is set, only its sets
are evaluated. --output_dir DIR stores the ranks and results; without it, nothing is written.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.parse import OF_A_RUN
from soft_trainer.options.spec import check_values, option, unset
from soft_trainer.shell.sources import check_sources
from soft_trainer.system.files import check_writable
from soft_trainer.system.terminal import one_line_errors, print_on_main

ABOUT_TRAINING = ("estimator", "loss", "model_id", "revision", "statistics", "training")


@dataclass
class RunFileOptions:
    """Options for a file of rankings."""

    run_file: str | None = unset(
        "Write rankings for trec_eval, ranx or ir-measures to FILE, and judgments to FILE.qrels. With several sets, "
        "the file names get the sets' names.",
        group="output",
    )
    run_depth: int = option(
        1000,
        "Functions to list in --run_file for each query. MAP needs the whole corpus.",
        group="output",
        least=1,
    )

    def __post_init__(self):
        check_values(self)


OPTIONS = (*OF_A_RUN, RunFileOptions)  # all of them, so that it takes the recipe of a run
COMMON = """query_length code_length language data_dir query_column code_column eval_data_dir source_dir bf16 run_file
    run_depth""".split()
DEFAULTS = {"do_predict": True, "report_to": "none"}


def name_rows(data_args: DataArguments) -> None:
    """Evaluates only the sets in `eval_data_dir` if no other option supplies rows."""
    own = data_args.data_dir or data_args.source_dir
    if data_args.eval_data_dir and not own and "dataset_name" not in data_args.named:
        data_args.dataset_name = "none"
        if "language" not in data_args.named:
            data_args.language = None


def check(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions, run_options: RunFileOptions
) -> None:
    """Checks what the package's options refer to, before torch is imported."""
    if model_args.model_name_or_path is None:
        raise UserError("give the encoder: soft-trainer evaluate MODEL")
    name_rows(data_args)
    check_sources(data_args)


def run(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingOptions, run_options: RunFileOptions
) -> None:
    """Evaluates an encoder and prints a table. If there is an output folder, writes ranks and results to it."""
    with tempfile.TemporaryDirectory(prefix="soft-trainer-") as temporary, one_line_errors():
        name_rows(data_args)
        writes = args.output_dir is not None
        args.output_dir = args.output_dir or temporary
        # Imported here, so that --help does not wait for torch.
        from soft_trainer import SoftInfoNCETrainer
        from soft_trainer.encoders.loading import profile_warnings
        from soft_trainer.evaluation.ranked_queries import LABELS
        from soft_trainer.evaluation.results import metrics_table
        from soft_trainer.run.record import write_run
        from soft_trainer.run.reporting import print_examples
        from soft_trainer.shell.opening import open_run
        from soft_trainer.system import distributed

        distributed.use_the_cores()
        encoder, rows = open_run(model_args, data_args, args)
        run_files = {}
        if run_options.run_file:
            path = Path(run_options.run_file)
            check_writable(path.parent, f"run_file={path}")
            for name in rows.measured:
                run_files[name] = path.with_stem(f"{path.stem}-{name}") if len(rows.measured) > 1 else path
            for file in run_files.values():
                if not args.overwrite and (file.exists() or Path(f"{file}.qrels").exists()):
                    raise UserError(
                        f"run_file={path}: {file} or {file}.qrels would be overwritten; set another run_file, or "
                        "--overwrite true"
                    )
        trainer = SoftInfoNCETrainer(encoder, args, _details=dataclasses.replace(rows, followed=()))
        for warning in profile_warnings(trainer.model, encoder.profile):
            print_on_main(warning)

        def finish(run) -> None:
            if not distributed.is_main():
                return
            for name, file in run_files.items():
                print_on_main(run.outputs[name]["trained"].write_run_file(file, run.measured[name]))
            sys.stdout.write(metrics_table(run.results, {**LABELS, "trained": encoder.label}) + "\n")
            print_examples(run)
            if writes:
                write_run(
                    run, {name: value for name, value in run.trainer.record().items() if name not in ABOUT_TRAINING}
                )
                print_on_main(f"Written to {args.output_dir}")

        trainer.measure("trained", finish, run_options.run_depth if run_options.run_file else 10)
        distributed.close()
