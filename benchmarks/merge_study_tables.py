"""Prints every table of benchmarks/merge_study.md that the finished cells of merge_study.json allow.

python benchmarks/merge_study_tables.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from merge_study import ABLATED, CONFIRMATION, ablations, chosen_ratio, load_study, mrr

from soft_trainer.evaluation.significance import difference_text, holm, reciprocal_ranks
from soft_trainer.studies.compare import PooledComparison, SetComparison, p_text
from soft_trainer.terminal import table


def phase_as_confirmation(study: dict, phase: str) -> dict:
    """The study with the cells of another phase in the place of the confirmation's."""
    cells = {name: cell for name, cell in study["cells"].items() if name.startswith(f"{phase}/")}
    return study | {"cells": {name.replace(phase, "confirm", 1): cell for name, cell in cells.items()}}


def screen_table(study: dict) -> str:
    """Every setting of the screen: its ratio, and the MRR of each set merged and unmerged."""
    rows = []
    for name, cell in study["cells"].items():
        phase, language, _, method = name.split("/")
        if phase != "screen":
            continue
        before = study["cells"][f"screen/{language}/0/untrained"]["ranks"]
        ratio = 0.0 if method == "untrained" else chosen_ratio(study["cells"], name, cell)
        at = cell["ranks"] | before
        merged, whole = (at[key] for key in (f"{ratio:g}", "1" if "1" in at else "0"))
        values = [f"{mrr(merged[key]):.3f} ({mrr(whole[key]):.3f})" for key in merged]
        rows.append([language, method, ratio, *values, cell.get("seconds")])
    header = ["rows", "method", "ratio", "valid: merged (not)", "CoSQA", "judged", "CPU s"]
    return table(header, rows, floats=".2f")


def reported(study: dict, language: str, method: str, key: str, seeds: Iterable[str], ratio=None) -> np.ndarray:
    """The reciprocal ranks of a method on a set that reports, float64[S, Q]; at its own ratio when None."""
    cells = study["cells"]
    before = cells[f"confirm/{language}/0/untrained"]["report"]["0"]
    rows = []
    for seed in sorted(seeds, key=int):
        names = (f"{phase}/{language}/{seed}/{method}" for phase in ("confirm", "ablate"))
        cell = cells[next(name for name in names if name in cells)]
        chosen = cell.get("ratio", 0.0) if ratio is None else ratio
        rows.append(reciprocal_ranks(cell["report"].get(f"{chosen:g}", before)[key]))
    return np.stack(rows)


def trained_on(study: dict, method: str) -> dict[str, set[str]]:
    """The languages of a method's finished cells after the screen, each with its seeds."""
    found: dict[str, set[str]] = {}
    for name in study["cells"]:
        phase, language, seed, own = name.split("/")
        if phase in ("confirm", "ablate") and own == method:
            found.setdefault(language, set()).add(seed)
    return found


def pairs(study: dict, method: str, other: str, key="test", languages=CONFIRMATION, ratios=(None, None)):
    """Compares two methods on the languages and seeds that both have finished."""
    done, sets = [trained_on(study, name) for name in (method, other)], []
    for language in languages:
        if seeds := done[0].get(language, set()) & done[1].get(language, set()):
            sides = tuple(
                reported(study, language, name, key, seeds, ratio)
                for name, ratio in zip((method, other), ratios, strict=True)
            )
            sets.append(SetComparison(language, sides))
    return PooledComparison(tuple(sets))


def guard_table(study: dict) -> str:
    """Each reporting guard, before and after training. All languages and seeds are repetitions of the same queries."""
    rows = []
    for method, ratio in itertools.product(study["frozen"].values(), (None, 1.0)):
        strata, label = [], f"{method}, {'merged' if ratio is None else 'unmerged'}"
        for key in ("cosqa-report", "judged-report"):
            runs = trained_on(study, method).items()
            after = np.concatenate([reported(study, language, method, key, seeds, ratio) for language, seeds in runs])
            before = reported(study, next(iter(runs))[0], "untrained", key, "0")
            strata.append(SetComparison(key, (after, np.repeat(before, len(after), 0))))
        pooled = PooledComparison(tuple(strata))
        for each in strata:
            a, b = (side.mean() for side in each.reciprocal)
            rows.append([label, each.name, b, a, difference_text(a - b, pooled.interval([each]))])
        a, b = pooled.means
        rows.append([label, "pooled", b, a, difference_text(a - b, pooled.interval())])
    return table(["method", "guard", "before", "after", "difference (95 %)"], rows, floats=".4f")


def set_table(study: dict) -> str:
    """The MRR of each set before training, merged and not, and the ratios that the rule chose, one for each seed."""
    rows = []
    for language, method in itertools.product(CONFIRMATION, study["frozen"].values()):
        seeds = sorted(trained_on(study, method).get(language, ()), key=int)
        if seeds:
            before = reported(study, language, "untrained", "test", "0").mean()
            merged, whole = (reported(study, language, method, "test", seeds, ratio).mean() for ratio in (None, 1.0))
            ratios = (study["cells"][f"confirm/{language}/{seed}/{method}"]["ratio"] for seed in seeds)
            rows.append([language, method, before, merged, whole, ", ".join(f"{ratio:g}" for ratio in ratios)])
    return table(["set", "method", "before", "merged", "unmerged", "ratios"], rows, floats=".4f")


def secondary(study: dict) -> str:
    """Merging, batches, weights, distilling and rate, Holm-corrected."""
    ours, baseline = study["frozen"]["ours"], study["frozen"]["baseline"]
    asked = [("not merged", pairs(study, ours, baseline, ratios=(1.0, 1.0)))]
    for key in ("test", "cosqa-report", "judged-report"):
        asked.append((f"without merging: {key}", pairs(study, ours, ours, key, ABLATED, (None, 1.0))))
    asked += [(name, pairs(study, ours, name, "test", ABLATED)) for name in ablations(study)]
    asked = [(name, each) for name, each in asked if each.sets]
    rows = []
    for (name, each), p in zip(asked, holm([each.p for _, each in asked]), strict=True):
        a, b = each.means
        rows.append([name, len(each.sets), difference_text(a - b, each.interval()), p_text(p)])
    return table(["secondary comparison", "sets", "difference (95 %)", "p, Holm-corrected"], rows)


def main() -> None:
    """Prints the tables."""
    study = load_study()
    print(screen_table(study), study["frozen"], sep="\n\n")
    for phase in ("confirm", "repeat"):
        own = study if phase == "confirm" else phase_as_confirmation(study, phase)
        if study["frozen"] and (primary := pairs(own, *(study["frozen"][side] for side in ("ours", "baseline")))).sets:
            print(f"\n{phase}", primary.describe(), set_table(own), guard_table(own), secondary(own), sep="\n\n")


if __name__ == "__main__":
    main()
