"""One pass over the runs of a study, in order: the plan, the runs, and the summary."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from soft_trainer.errors import UserError
from soft_trainer.studies import plan
from soft_trainer.studies.execution import LOG, RunningElsewhere, Stopped, execute, progress
from soft_trainer.studies.grid import PlannedRun, Study
from soft_trainer.terminal import print_on_main, table


@dataclass
class Outcome:
    """The outcome of a run (`done`, `done before`, `failed`, `stopped`, `not run`) and its reason."""

    state: str
    reason: str = ""

    @property
    def good(self) -> bool:
        """True if the run is done."""
        return self.state.startswith("done")


class Session:
    """One pass over the runs of a study.

    Args:
        chosen: the runs, each after those that it needs.
        parsed: the arguments of each run, by name.
        seconds_per_step: for the estimates, if known.
    """

    def __init__(
        self, study: Study, chosen: Sequence[PlannedRun], parsed: dict, seconds_per_step: float | None = None
    ):
        self.study, self.chosen, self.parsed = study, chosen, parsed
        self.states: dict[str, str] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.estimates = plan.Estimates(plan.process_count(study), seconds_per_step)
        self.start = time.monotonic()
        for run in chosen:
            now = progress(study, run)
            self.states[run.name] = now.state
            self.estimates.learn(run, now.finished)

    def plan(self) -> str:
        """The runs with their steps and expected time, and the expected time of all that is not done."""
        rows = []
        for number, run in enumerate(self.chosen, 1):
            parsed, state = self.parsed[run.name], self.states[run.name]
            expected = None if state == "done" else self.estimates.seconds(run, parsed)
            time_text = None if expected is None else plan.duration(expected)
            steps = plan.steps(parsed, self.estimates.processes)
            rows.append([number, run.name, state, ", ".join(run.needs), steps, time_text])
        done = list(self.states.values()).count("done")
        return (
            table(("", "run", "state", "needs", "steps", "time"), rows)
            + f"\n\n{len(self.chosen)} runs, {done} of them done; output in {self.study.output_dir}; "
            f"expected: {self._remaining()} ({self.estimates.source})\n"
        )

    def run(self) -> None:
        """Executes every run that is not done and whose needs are done.

        Raises:
            Stopped: a signal told the study to end.
        """
        for number, run in enumerate(self.chosen, 1):
            try:
                self.outcomes[run.name] = self._outcome(run, f"[{number}/{len(self.chosen)}] {run.name}")
            except Stopped as stopped:
                self.outcomes[run.name] = Outcome("stopped", f"by {stopped}")
                raise

    def _outcome(self, run: PlannedRun, title: str) -> Outcome:
        state = progress(self.study, run).state  # another study may have changed it meanwhile
        if state == "done":
            return Outcome("done before")
        missing = [needed for needed in run.needs if not self.outcomes[needed].good]
        if missing:
            return Outcome("not run", f"needs {missing[0]}, which is {self.outcomes[missing[0]].state}")
        elapsed = plan.duration(time.monotonic() - self.start)
        print_on_main(
            f"{title}: {'resumes' if state == 'stopped' else 'starts'}; {elapsed} elapsed, about {self._remaining()} "
            f"to go; output in {self.study.folder(run.name) / LOG}"
        )
        try:
            error = execute(self.study, run)
        except RunningElsewhere:
            return Outcome("not run", "another study, or a run left over from one, holds it now")
        if error is not None:
            print_on_main(f"{title}: failed: {error}")
            return Outcome("failed", error)
        now = progress(self.study, run)
        self.estimates.learn(run, now.finished)
        mrr = "" if now.mrr is None else f", MRR {now.mrr:.3f} on test"
        print_on_main(f"{title}: done in {plan.duration(now.spent)}{mrr}")
        return Outcome("done")

    def _remaining(self) -> str:
        left = [run for run in self.chosen if run.name not in self.outcomes and self.states[run.name] != "done"]
        return plan.total(self.estimates.seconds(run, self.parsed[run.name]) for run in left)

    def summary(self) -> str:
        """The outcome of every run that has started."""
        rows = []
        for run in self.chosen:
            if outcome := self.outcomes.get(run.name):
                now = progress(self.study, run)
                time_text = plan.duration(now.finished[0]) if outcome.good and now.finished else None
                rows.append([run.name, outcome.state, now.mrr, time_text, outcome.reason])
        return table(("run", "state", "MRR on test", "time", "reason"), rows)


def check_changes(session: Session, redo: bool) -> None:
    """Refuses runs that were made with other options, or removes them if they are to be made again.

    Raises:
        UserError: names the first of them and its changes.
    """
    changed = [run for run in session.chosen if session.states[run.name] == "changed"]
    if changed and not redo:
        raise UserError(
            f"{len(changed)} runs were made with other options, the first is {session.study.folder(changed[0].name)}: "
            f"{'; '.join(progress(session.study, changed[0]).changes)}. Write to another --output_dir, or remove and "
            "make them again with --redo"
        )
    for run in changed:
        shutil.rmtree(session.study.folder(run.name), ignore_errors=True)
        session.states[run.name] = "new"


def stop_on_signals() -> None:
    """Makes SIGINT and SIGTERM raise `Stopped`."""

    def stop(number, frame):
        raise Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
