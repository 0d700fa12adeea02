"""Executes the runs of a study in order and reports the outcome of each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import timedelta

from soft_trainer.errors import UserError
from soft_trainer.studies.execution import LOG, execute, progress
from soft_trainer.studies.grid import PlannedRun, Study
from soft_trainer.terminal import print_on_main, table

DONE = ("done", "done before")


def plan(study: Study, chosen: Sequence[PlannedRun]) -> str:
    """Returns the runs in order, each with the state of its folder and the runs that it needs, as a table."""
    states = [progress(study, run).state for run in chosen]
    rows = [
        [number, run.name, state, ", ".join(run.needs)]
        for number, (run, state) in enumerate(zip(chosen, states, strict=True), 1)
    ]
    done = f"{len(chosen)} runs, {states.count('done')} of them done; output in {study.output_dir}"
    return f"{table(('', 'run', 'state', 'needs'), rows)}\n\n{done}\n"


def check_changes(study: Study, chosen: Sequence[PlannedRun], redo: bool) -> None:
    """Refuses runs that were made with other options, or deletes them if they should be repeated.

    Raises:
        UserError: names the first of them and its changes.
    """
    changed = {run.name: now.changes for run in chosen if (now := progress(study, run)).state == "changed"}
    if changed and not redo:
        first = next(iter(changed))
        raise UserError(
            f"{len(changed)} runs were made with other options, the first is {study.folder(first)}: "
            f"{'; '.join(changed[first])}. Write to another --output_dir, or delete and repeat them with --redo"
        )
    for name in changed:
        shutil.rmtree(study.folder(name), ignore_errors=True)


def run_all(study: Study, chosen: Sequence[PlannedRun]) -> int:
    """Executes every run that is not done and whose needs are done, and prints a summary.

    Returns:
        0 if all are done, 1 if one is not, 130 after Ctrl-C.
    """
    outcomes: dict[str, tuple[str, str]] = {}  # name -> `done`, `done before`, `failed`, `not run`; the reason
    try:
        for number, run in enumerate(chosen, 1):
            outcomes[run.name] = _outcome(study, run, f"[{number}/{len(chosen)}] {run.name}", outcomes)
    except KeyboardInterrupt:
        outcomes[run.name] = ("stopped", "by Ctrl-C")
        print_on_main(f"\n{_summary(study, chosen, outcomes)}\n\nstopped; the same command continues from here")
        return 130
    print_on_main(f"\n{_summary(study, chosen, outcomes)}\n")
    return 0 if all(state in DONE for state, _ in outcomes.values()) else 1


def _outcome(study: Study, run: PlannedRun, title: str, outcomes: dict) -> tuple[str, str]:
    state = progress(study, run).state  # another study may have changed it meanwhile
    if state == "done":
        return "done before", ""
    if missing := [needed for needed in run.needs if outcomes[needed][0] not in DONE]:
        return "not run", f"needs {missing[0]}, which is {outcomes[missing[0]][0]}"
    verb = "resumes" if state == "stopped" else "starts"
    print_on_main(f"{title}: {verb}; output in {study.folder(run.name) / LOG}")
    try:
        error = execute(study, run)
    except BlockingIOError:
        return "not run", "another study, or a run left over from one, holds it now"
    if error is not None:
        print_on_main(f"{title}: failed: {error}")
        return "failed", error
    now = progress(study, run)
    mrr = "" if now.mrr is None else f", MRR {now.mrr:.3f} on test"
    print_on_main(f"{title}: done in {timedelta(seconds=round(now.seconds))}{mrr}")
    return "done", ""


def _summary(study: Study, chosen: Sequence[PlannedRun], outcomes: dict) -> str:
    """The outcome of every run that has started."""
    rows = []
    for run in chosen:
        if run.name in outcomes:
            now, (state, reason) = progress(study, run), outcomes[run.name]
            seconds = timedelta(seconds=round(now.seconds)) if state in DONE else None
            rows.append([run.name, state, now.mrr, seconds and str(seconds), reason])
    return table(("run", "state", "MRR on test", "time", "reason"), rows)
