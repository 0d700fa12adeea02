"""Run a grid of runs, each in a separate process and after the runs that it needs. Finished runs are skipped.

soft-trainer study --config paper/overall --dry_run
soft-trainer study --config paper/overall --only language=ruby,seed=1234
soft-trainer study --config smoke/study --set data_dir=DIR/{language} model_name_or_path=DIR
"""

from __future__ import annotations

import argparse
import sys

from soft_trainer.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("--config", required=True, metavar="STUDY", help="a YAML file, or the name of a recipe")
    add("--dry_run", action="store_true", help="print the plan and run nothing")
    add("--only", metavar="AXIS=NAME,...", help="choose these runs, and those that they need")
    add(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of every run of the grid; NAME.OPTION=VALUE for a run of `once`",
    )
    add("--output_dir", help="folder that holds a folder for each run")
    add("--launcher", help="the command that starts a run, for example 'accelerate launch --num_processes 2'")
    add("--redo", action="store_true", help="delete and repeat runs whose options changed")
    add("--keep_checkpoints", action="store_true", default=None, help="keep the checkpoints of finished runs")


def run(arguments: argparse.Namespace) -> int:
    """Runs or plans a study; see `run_all` for the exit code."""
    unset = next((word for word in arguments.set if "=" not in word), None)
    if unset is not None:
        raise UserError(f"set {unset}: write OPTION=VALUE")
    # Imported here, so that --help does not wait for torch.
    from soft_trainer.options.recipes import recipe_path
    from soft_trainer.studies.execution import check, check_changes, plan, run_all
    from soft_trainer.studies.grid import read_study

    options = dict(word.split("=", 1) for word in arguments.set)
    given = {name: getattr(arguments, name) for name in ("output_dir", "launcher", "keep_checkpoints")}
    study = read_study(recipe_path(arguments.config), options, **given)
    chosen = study.chosen(arguments.only)
    for run in chosen:
        check(study, run)
    if arguments.dry_run:
        sys.stdout.write(plan(study, chosen))
        return 0
    check_changes(study, chosen, arguments.redo)
    return run_all(study, chosen)
