"""A study starts runs with several seeds."""

import re

import pytest
import yaml
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.run.folder import lock_file
from soft_trainer.studies.study import check_options, read_study
from soft_trainer.system.files import write_json

STUDIES = [path for path in sorted(RECIPES.rglob("*.yaml")) if "runs" in read_recipe(path)]


@pytest.fixture
def study_file(tmp_path):
    """Returns a function that writes a study of two methods and two seeds, changed by keywords."""

    def write(**changes):
        content = {
            "output_dir": str(tmp_path / "out" / "{language}"),
            "seeds": [1, 2],
            "options": {"language": "python", "data_dir": str(tmp_path / "rows"), "from_scratch": "32x1"},
            "runs": {
                "infonce": {"loss": "info_nce", "estimator": "none"},
                "frozen": {"estimator": "trained_model", "estimator_model": "{infonce}"},
            },
        }
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return write


def test_every_run_has_its_options_and_a_folder_for_each_seed(study_file, tmp_path):
    study = read_study(study_file(), {"num_train_epochs": "3"})
    assert [run.name for run in study.runs] == ["infonce/1", "frozen/1", "infonce/2", "frozen/2"]
    frozen = study.runs[3]
    assert frozen.options["seed"] == 2
    assert frozen.options["num_train_epochs"] == "3"
    assert frozen.options["output_dir"] == str(tmp_path / "out" / "python" / "frozen" / "2")
    assert frozen.options["estimator_model"] == str(tmp_path / "out" / "python" / "infonce" / "2")


def test_a_run_starts_from_a_recipe_whose_options_the_others_override(study_file, tmp_path):
    (tmp_path / "base.yaml").write_text("learning_rate: 0.5\nlanguage: go\noutput_dir: elsewhere\n")
    (run, _) = read_study(study_file(runs={"a": {"config": "base.yaml"}})).runs
    assert run.options["learning_rate"] == 0.5
    assert run.options["language"] == "python"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": {}}, "unknown key 'grid'"),
        ({"runs": []}, "runs: expected a mapping of names to options"),
        ({"seeds": 3}, "seeds: expected a list"),
        ({"output_dir": None}, "set output_dir, the parent"),
        ({"runs": {"a": {"data_dir": "{nothing}"}}}, "no option or run has this name"),
        ({"runs": {"a": {"seed": 7}}}, "a has seed, which the study sets"),
        ({"runs": {"a": {"output_dir": "b"}}}, "a has output_dir, which the study sets"),
    ],
)
def test_an_invalid_study_is_refused(study_file, changes, words):
    with refused(words):
        read_study(study_file(**changes))


def test_the_name_of_a_run_may_be_a_number(study_file, tmp_path):
    (run, _) = read_study(study_file(runs={0.5: {"learning_rate": 0.5}})).runs
    assert run.name == "0.5/1"


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_the_studies_of_the_package_have_options_that_exist(path):
    study = read_study(path, {"model_name_or_path": "encoder", "data_dir": "rows"} if "smoke" in path.parts else {})
    for run in study.runs:
        check_options(run)


def test_an_unknown_option_is_named_with_its_run(study_file):
    study = read_study(study_file(runs={"a": {"learning_rat": 1}}))
    with refused("a/1: unknown option 'learning_rat'"):
        check_options(study.runs[0])


def test_a_run_replaces_the_language_in_its_rows_itself(study_file):
    study = read_study(study_file(), {"data_dir": "rows/{language}", "language": "python,ruby"})
    assert {run.options["data_dir"] for run in study.runs} == {"rows/{language}"}


@pytest.mark.slow
def test_the_mrr_of_several_tests_is_their_mean(study_file, capsys):
    results = {
        "test-a": {"trained": {"mrr": 0.5}},
        "test-b": {"trained": {"mrr": 0.7}},
        "valid-a": {"trained": {"mrr": 1}},
    }
    study = study_file(seeds=[1], launcher="true")  # a command that does nothing
    for run in read_study(study).runs:
        run.folder.mkdir(parents=True)
        write_json(run.folder / "run.json", {"results": results})
    assert run_command(["study", "--config", str(study)]) == 0
    assert re.search(r"\| infonce/1 +\| done +\| +0\.600 \|", capsys.readouterr().err)


def test_a_run_that_another_study_has_open_is_skipped(study_file, capsys):
    study = read_study(study_file())
    folder = study.runs[0].folder
    folder.mkdir(parents=True)
    words = ["study", "--config", str(study_file(seeds=[1])), "--only", "infonce"]
    with (folder / "log.txt").open("ab") as log:
        assert lock_file(log)
        assert run_command(words) == 1
    assert "skipped: another study has it open" in "".join(capsys.readouterr())
    assert not (folder / "recipe.yaml").exists()


def test_the_plan_and_a_choice_of_runs(study_file, capsys):
    study = read_study(study_file())
    study.runs[0].folder.mkdir(parents=True)
    write_json(study.runs[0].folder / "run.json", {"results": {}})
    assert run_command(["study", "--config", str(study_file()), "--only", "infonce", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "| infonce/1 | finished" in printed
    assert "| infonce/2 | new" in printed
    assert "frozen" not in printed
    with refused("only=infonc: no such run; did you mean 'infonce'?"):
        run_command(["study", "--config", str(study_file()), "--only", "infonc", "--dry_run"])
    with refused("seed, which the study sets"):
        run_command(["study", "--config", str(study_file()), "--set", "seed=7", "--dry_run"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"), [([], "command to continue"), (["--redo"], "command without --redo to continue")]
)
def test_ctrl_c_ends_a_study_with_the_way_to_continue(study_file, capsys, words, says):
    study = study_file(launcher="sh -c 'kill -INT $PPID'")
    assert run_command(["study", "--config", str(study), *words]) == 130
    assert f"stopped; run the same {says}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_runs_skips_and_repeats(data_dir, tmp_path, capsys):
    tiny = {"from_scratch": "32x1", "vocabulary_size": 400, "max_steps": 2, "per_device_train_batch_size": 5}
    tiny |= {"use_cpu": True, "language": "python", "data_dir": str(data_dir), "examples": 0, "lexical": False}
    tiny["bf16"] = False  # the study starts new processes, which see what the processor computes in
    runs = {"infonce": {"estimator": "none"}, "broken": {"data_dir": str(tmp_path / "nothing")}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "o"), "seeds": [1], "options": tiny, "runs": runs}))
    words = ["study", "--config", str(path)]
    assert run_command(words) == 1
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "infonce/1 | done" in shown
    assert "failed: error: " in shown and "no such folder" in shown
    assert (tmp_path / "o" / "infonce" / "1" / "model.safetensors").is_file()
    cell = tmp_path / "o" / "infonce" / "1"
    before = (cell / "model.safetensors").read_bytes()
    assert run_command([*words, "--only", "infonce"]) == 0
    assert "already done" in (cell / "log.txt").read_text()
    assert (cell / "model.safetensors").read_bytes() == before
    assert run_command([*words, "--only", "infonce", "--set", "learning_rate=0.5", "--redo"]) == 0
    assert (cell / "model.safetensors").read_bytes() != before
