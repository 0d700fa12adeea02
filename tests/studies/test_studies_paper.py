"""Every study of the recipes can be planned, every run of one is accepted, and one of each kind trains."""

import json
import sys
from pathlib import Path

import pytest

from soft_trainer.cli.__main__ import run_command
from soft_trainer.options.parse import as_argv
from soft_trainer.options.recipes import read_recipe
from soft_trainer.studies.execution import check
from soft_trainer.studies.grid import PlannedRun, read_study

ROOT = Path(__file__).parents[2]
PAPER = sorted(path for path in (ROOT / "recipes/paper").glob("*.yaml") if "grid" in read_recipe(path))
SMALL = sorted((ROOT / "recipes/smoke").glob("study*.yaml"))
GIVEN = {"data_dir": "rows/{language}", "model_name_or_path": "encoder"}  # what the small studies leave open
# The runs that a table or figure of the paper has, and the SimCSE encoder where one is needed.
RUNS = {
    "overall": 3 * 6 * 4 * 3 + 1,
    "losses": 3 * 6 * 4 * 3 + 1,
    "cancellation": 8 * 3 + 1,
    "alpha_beta": 8 * 3 + 1,
    "seeds": 4 * 3 + 1,
    "time": 4,
}
# Options that make any run small and local; 6 is a batch that BM25's alpha and beta allow.
TINY = {
    "from_scratch": "32x1", "model_name_or_path": "", "vocabulary_size": 400, "language": "python", "filters": "",
    "max_steps": 2, "per_device_train_batch_size": 6, "lexical": False, "model_card": False,
    "no_estimator_cache": True, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
# The InfoNCE runs keep the recipes' evaluation and checkpoints; the others only test the loss.
LOSS_ONLY = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no"}


def kinds() -> dict[str, PlannedRun]:
    """The first run of each encoder x loss x estimator x kind of cancellation of the paper's studies."""
    found = {}
    for path in PAPER:
        for run in read_study(path).chosen():
            if run.place:
                kind = (run.options.get(name, "none") for name in ("loss", "estimator", "cancel"))
                found.setdefault("-".join((run.place["encoder"], *kind)), run)
    return found


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_study_plans_the_runs_of_its_table_what_is_needed_first(path, capsys):
    study = read_study(path)
    names = [run.name for run in study.chosen()]
    assert len(names) == len(set(names)) == RUNS[path.stem]
    for run in study.chosen():
        assert all(names.index(needed) < names.index(run.name) for needed in run.needs)
    only = f"seed=1234,language={'python' if path.stem in ('alpha_beta', 'cancellation') else 'ruby'}"
    assert run_command(["study", "--config", str(path), "--dry_run", "--only", only]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split("|")[2].strip() for line in lines if line.startswith("|")][2:]
    assert listed == [run.name for run in study.chosen(only)]
    assert f"{len(listed)} runs, 0 of them done" in lines[-1]


def test_the_studies_are_those_of_the_paper_and_a_run_of_two_is_one_run():
    assert sorted(RUNS) == [path.stem for path in PAPER]
    runs: dict[Path, PlannedRun] = {}
    for study in map(read_study, PAPER):
        for run in study.chosen():
            assert runs.setdefault(study.folder(run.name), run) == run
    assert len(runs) == 1 + 216 + 162 + 18 + 21 + 4


def test_the_small_study_needs_rows_and_an_encoder_only():
    study = read_study(SMALL[0], GIVEN)
    assert len(study.chosen()) == 16
    simcse = study.runs["ruby/simcse/7"]
    assert simcse.options["estimator_model"] == "encoder" and simcse.options["data_dir"] == "rows/ruby"
    assert study.runs["python/trained_model/7"].needs == ("python/infonce/7",)


@pytest.mark.slow
def test_every_run_of_every_study_is_accepted():
    studies = [*map(read_study, PAPER), *(read_study(path, GIVEN) for path in SMALL)]
    runs = {(study.output_dir, run.name): (study, run) for study in studies for run in study.chosen()}
    for study, run in runs.values():
        parsed = check(study, run)
        assert parsed[-1].seed == run.options["seed"]
        if run.module is None:
            assert parsed[1].language == run.options["language"] and parsed[1].estimator == run.options["estimator"]


@pytest.fixture(scope="module")
def trained(script_module, data_dir, tmp_path_factory):
    """Trains a run on tiny rows in this process, after those that it needs; returns its folder."""
    folder, chosen = tmp_path_factory.mktemp("paper"), kinds()

    def train(kind: str) -> Path:
        output, run = folder / kind, chosen[kind]
        if not output.exists():
            options = {**run.options, **TINY, "data_dir": data_dir, "output_dir": output}
            if run.options["estimator"] in ("simcse", "trained_model"):  # the SimCSE encoder is any encoder here
                options["estimator_model"] = train(f"{run.place['encoder']}-info_nce-none-none")
            if run.options["estimator"] != "none":
                options |= LOSS_ONLY
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["run_codesearch.py", *as_argv(options)])
                script_module.main()
        return output

    return train


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_a_run_of_each_kind_trains(kind, trained):
    results = json.loads((trained(kind) / "run.json").read_text())
    encoder, loss, estimator, _ = kind.split("-")
    assert results["training"]["steps"] == 2
    assert results["results"]["test"]["trained"]["mrr"] > 0
    names = {"bm25": "BM25Estimator", "simcse": "SimCSEEstimator", "trained_model": "TrainedModelEstimator"}
    assert results["loss"]["loss"] == loss and results["loss"]["estimator"] == names.get(estimator)
