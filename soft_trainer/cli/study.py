"""Run a list of configurations with several seeds. Finished runs are skipped, and interrupted runs are resumed.

soft-trainer study --config paper/overall --dry_run
soft-trainer study --config paper/overall --set language=python --only unixcoder-infonce,unixcoder-bm25
soft-trainer study --config smoke/study --set data_dir=DIR model_name_or_path=DIR
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from soft_trainer.errors import UserError
from soft_trainer.system.terminal import nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer study` to a parser."""
    add = parser.add_argument
    add("--config", required=True, metavar="STUDY", help="a YAML file, or the name of a recipe")
    add("--dry_run", action="store_true", help="print the plan without running anything")
    add("--only", metavar="NAME,...", help="start only the runs with these names")
    add("--set", action="extend", nargs="+", default=[], metavar="OPTION=VALUE", help="set an option of every run")
    add("--output_dir", help="parent folder of the runs' output folders")
    add("--redo", action="store_true", help="repeat the runs from the beginning")


def run(arguments: argparse.Namespace) -> int:
    """Runs a study, or prints its plan. Returns the exit code; see `run_all`."""
    # Imported here, so that --help does not wait for torch.
    from soft_trainer.options.recipes import recipe_path
    from soft_trainer.studies.study import check_options, plan, read_study, run_all

    changes = {}
    for word in arguments.set:
        name, separator, value = word.partition("=")
        if not separator:
            raise UserError(f"set {word}: expected OPTION=VALUE")
        changes[name] = value
    study = read_study(recipe_path(arguments.config), changes, arguments.output_dir)
    if arguments.only:
        names = [name.strip() for name in arguments.only.split(",")]
        known = {run.name.split("/")[0] for run in study.runs}
        for name in names:
            if name not in known:
                raise UserError(f"only={name}: no such run{nearest(name, known, '--dry_run lists them all')}")
        study = dataclasses.replace(study, runs=[run for run in study.runs if run.name.split("/")[0] in names])
    for planned in study.runs:
        check_options(planned)
    if arguments.dry_run:
        sys.stdout.write(f"{plan(study)}\n\n{len(study.runs)} runs; output in {study.output_dir}\n")
        return 0
    return run_all(study, arguments.redo)
