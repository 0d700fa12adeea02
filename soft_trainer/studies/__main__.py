"""Run a grid of runs: each in a process of its own, what others need first, what is done never again.

python -m soft_trainer.studies --config recipes/paper/overall.yaml --dry_run
python -m soft_trainer.studies --config recipes/paper/overall.yaml --only language=ruby,seed=1234
python -m soft_trainer.studies --config recipes/smoke/study.yaml --set data_dir=DIR/{language} model_name_or_path=DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.studies import plan
from soft_trainer.studies.execution import Stopped
from soft_trainer.studies.grid import read_study
from soft_trainer.studies.session import Session, check_changes, stop_on_signals
from soft_trainer.terminal import exit_on_user_error, print_on_main


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m soft_trainer.studies", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE.yaml", help="the study")
    parser.add_argument("--dry_run", action="store_true", help="print the plan, with its time, and run nothing")
    parser.add_argument("--only", metavar="AXIS=NAME,...", help="these cells, and what they need")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of every cell of the grid; NAME.OPTION=VALUE for a run of `once`",
    )
    parser.add_argument("--output_dir", help="where every cell has its folder")
    parser.add_argument("--launcher", help="what starts a script, 'accelerate launch --num_processes 2' for example")
    parser.add_argument("--seconds_per_step", type=float, help="for the estimate of the time")
    parser.add_argument("--redo", action="store_true", help="remove and make again cells whose options changed")
    parser.add_argument(
        "--keep_checkpoints", action="store_true", default=None, help="keep the checkpoints of finished cells"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run or plan a study; 0 where all chosen cells are done, 1 where one is not, 128 + the signal that ended it."""
    arguments = parse(argv)
    unset = [word for word in arguments.set if "=" not in word]
    if unset:
        raise UserError(f"set {unset[0]}: write OPTION=VALUE")
    study = read_study(
        arguments.config,
        dict(word.split("=", 1) for word in arguments.set),
        output_dir=arguments.output_dir,
        launcher=arguments.launcher,
        keep_checkpoints=arguments.keep_checkpoints,
    )
    chosen = study.chosen(arguments.only)
    parsed = {run.name: plan.check(study, run) for run in chosen}
    session = Session(study, chosen, parsed, arguments.seconds_per_step)
    if arguments.dry_run:
        sys.stdout.write(session.plan())
        return 0
    check_changes(session, arguments.redo)
    stop_on_signals()
    try:
        session.run()
    except Stopped as stopped:
        print_on_main(f"\n{session.summary()}\n\nstopped by {stopped}; the same command goes on from here")
        return 128 + stopped.number
    print_on_main(f"\n{session.summary()}\n")
    return 0 if all(outcome.good for outcome in session.outcomes.values()) else 1


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
