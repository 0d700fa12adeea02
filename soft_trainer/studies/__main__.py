"""Run a grid of runs: each in a process of its own, what others need first, what is done never again.

python -m soft_trainer.studies --config recipes/paper/overall.yaml --dry_run
python -m soft_trainer.studies --config recipes/paper/overall.yaml --only language=ruby,seed=1234
python -m soft_trainer.studies --config recipes/smoke/study.yaml --set data_dir=DIR/{language} model_name_or_path=DIR
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.studies import cells, planning
from soft_trainer.studies.grid import Cell, Study, read_study
from soft_trainer.terminal import exit_on_user_error, print_on_main, table


@dataclass
class Outcome:
    """What came of a cell: `done`, `done before`, `failed`, `cut`, `not run`; and why."""

    state: str
    note: str = ""

    @property
    def good(self) -> bool:
        return self.state.startswith("done")


class Session:
    """One pass over the cells of a study, in their order.

    Args:
        chosen: the cells, what is needed first.
        parsed: the arguments of each, by name.
        seconds_per_step: for the estimates, where given.
    """

    def __init__(self, study: Study, chosen: Sequence[Cell], parsed: dict, seconds_per_step: float | None = None):
        self.study, self.chosen, self.parsed = study, chosen, parsed
        self.states = {cell.name: cells.state(study, cell) for cell in chosen}
        self.outcomes: dict[str, Outcome] = {}
        self.estimates = planning.Estimates(planning.processes(study), seconds_per_step)
        self.start = time.monotonic()
        for cell in chosen:
            self.estimates.learn(cell, cells.spent(study, cell))

    def plan(self) -> str:
        """The cells that are chosen, with steps and expected time, and the sum of what is not done."""
        rows = []
        for number, cell in enumerate(self.chosen, 1):
            parsed, done = self.parsed[cell.name], self.states[cell.name] == "done"
            expected = None if done else self.estimates.seconds(cell, parsed)
            steps = planning.steps(parsed, self.estimates.processes)
            shown = None if expected is None else planning.duration(expected)
            rows.append([number, cell.name, self.states[cell.name], ", ".join(cell.needs), steps, shown])
        done = sum(state == "done" for state in self.states.values())
        return (
            table(("", "cell", "state", "needs first", "steps", "time"), rows)
            + f"\n\n{len(self.chosen)} runs, {done} of them done; to {self.study.output_dir}; "
            f"expected: {self._remaining()} ({self.estimates.source})\n"
        )

    def run(self) -> None:
        """Run every cell that is not done and whose needs are.

        Raises:
            Stopped: told to end.
        """
        for number, cell in enumerate(self.chosen, 1):
            try:
                self.outcomes[cell.name] = self._outcome(cell, f"[{number}/{len(self.chosen)}] {cell.name}")
            except cells.Stopped as stopped:
                self.outcomes[cell.name] = Outcome("cut", f"told to end by {stopped}")
                raise

    def _outcome(self, cell: Cell, title: str) -> Outcome:
        state = cells.state(self.study, cell)  # which another study may have changed meanwhile
        if state == "done":
            return Outcome("done before")
        missing = [needed for needed in cell.needs if not self.outcomes[needed].good]
        if missing:
            return Outcome("not run", f"needs {missing[0]}, which is {self.outcomes[missing[0]].state}")
        elapsed, log = planning.duration(time.monotonic() - self.start), self.study.folder(cell.name) / cells.LOG
        print_on_main(
            f"{title}: {'goes on' if state == 'cut' else 'starts'}; {elapsed} elapsed, about {self._remaining()} to "
            f"go; output in {log}"
        )
        try:
            error = cells.run(self.study, cell)
        except cells.RunningElsewhere:
            return Outcome("not run", "another study, or a run left over from one, holds it now")
        if error is not None:
            print_on_main(f"{title}: failed: {error}")
            return Outcome("failed", error)
        spent = cells.spent(self.study, cell)
        self.estimates.learn(cell, spent)
        mrr = cells.mrr_on_test(self.study, cell)
        print_on_main(
            f"{title}: done in {planning.duration(spent[0])}" + (f", MRR {mrr:.3f} on test" if mrr is not None else "")
        )
        return Outcome("done")

    def _remaining(self) -> str:
        left = [c for c in self.chosen if c.name not in self.outcomes and self.states[c.name] != "done"]
        return planning.total(self.estimates.seconds(cell, self.parsed[cell.name]) for cell in left)

    def summary(self) -> str:
        """What came of every cell that was come to."""
        rows = []
        for cell in self.chosen:
            if outcome := self.outcomes.get(cell.name):
                seconds = (cells.spent(self.study, cell) or (None,))[0] if outcome.good else None
                shown = None if seconds is None else planning.duration(seconds)
                rows.append([cell.name, outcome.state, cells.mrr_on_test(self.study, cell), shown, outcome.note])
        return table(("cell", "state", "MRR on test", "time", "why"), rows)


def check_changes(session: Session, redo: bool) -> None:
    """Refuse cells that were made with other options, or, to make them again, clear them.

    Raises:
        UserError: names the first of them and what changed.
    """
    changed = [cell for cell in session.chosen if session.states[cell.name] == "changed"]
    if changed and not redo:
        what = "; ".join(cells.changes(session.study, changed[0]))
        raise UserError(
            f"{len(changed)} cells were made with other options, the first is "
            f"{session.study.folder(changed[0].name)}: {what}. Write to another --output_dir, or remove and make them "
            "again with --redo"
        )
    for cell in changed:
        cells.clear(session.study, cell)
        session.states[cell.name] = "new"


def stop_on_signals() -> None:
    """Make SIGINT and SIGTERM raise `Stopped`."""

    def stop(number, frame):
        raise cells.Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


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
    parsed = {cell.name: planning.check(study, cell) for cell in chosen}
    session = Session(study, chosen, parsed, arguments.seconds_per_step)
    if arguments.dry_run:
        sys.stdout.write(session.plan())
        return 0
    check_changes(session, arguments.redo)
    stop_on_signals()
    try:
        session.run()
    except cells.Stopped as stopped:
        print_on_main(f"\n{session.summary()}\n\nstopped by {stopped}; the same command goes on from here")
        return 128 + stopped.number
    print_on_main(f"\n{session.summary()}\n")
    return 0 if all(outcome.good for outcome in session.outcomes.values()) else 1


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
