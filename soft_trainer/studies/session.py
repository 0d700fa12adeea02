"""One pass over a study: each run in a process of its own, what others need first, what is done never again."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from soft_trainer.errors import UserError
from soft_trainer.studies import cells, planning
from soft_trainer.studies.grid import Cell, Study
from soft_trainer.terminal import print_on_main, table


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
