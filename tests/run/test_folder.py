"""A run's output folder: a run overwrites only its own files, and an interrupted run continues."""

import json
import os
import shutil
from pathlib import Path

import pytest
from refusals import refused
from trees import source_tree

from soft_trainer.cli.__main__ import run_command
from soft_trainer.run.fingerprint import FORMAT
from soft_trainer.run.folder import (
    DONE,
    NEW,
    OTHER,
    STOPPED,
    OutputFolder,
    lock_file,
    mark_complete,
    state_of,
)
from soft_trainer.studies.compare import ranks_of
from soft_trainer.system.files import DEPENDS_ON, WRITTEN, signed, write_json

THIS = {"format": FORMAT, "do_train": True, "seed": 1, "processes": 1, "versions": {}, "max_steps": 3}
SHORTER = THIS | {"max_steps": 2}
ANOTHER = THIS | {"seed": 2}
OLD = {"options": {"seed": 1, "do_train": True}}


def finished(folder, fingerprint):
    """Writes the files of a finished run."""
    (folder / "model.safetensors").write_text("weights")
    write_json(folder / "run.json", {DEPENDS_ON: fingerprint, "results": {}})


def unmeasured(folder, fingerprint):
    """Writes the files of a run that was killed after training, before it was evaluated."""
    (folder / "model.safetensors").write_text("weights")
    write_json(folder / "run.json", {DEPENDS_ON: fingerprint})


def stopped(folder, fingerprint, step=4):
    """Writes a complete checkpoint, like an interrupted run."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    mark_complete(checkpoint, fingerprint)
    if not (folder / "run.json").exists():
        write_json(folder / "run.json", {DEPENDS_ON: fingerprint})


def unfinished(folder):
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "model.safetensors").touch()


def foreign_checkpoint(folder):
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")


def file(name):
    def write(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")

    return write


STATES = {
    "nothing": (lambda folder: None, NEW, ""),
    "a log and a recipe": (lambda folder: [file(name)(folder) for name in ("log.txt", "recipe.yaml")], NEW, ""),
    "a checkpoint that was never finished": (unfinished, NEW, ""),
    "the same run, finished": (lambda folder: finished(folder, THIS), DONE, ""),
    "another run, finished": (lambda folder: finished(folder, ANOTHER), OTHER, "seed was 2, is now 1"),
    "the same run, interrupted": (lambda folder: stopped(folder, THIS), STOPPED, ""),
    "the same run with a checkpoint, finished": (
        lambda folder: [stopped(folder, THIS), finished(folder, THIS)],
        DONE,
        "",
    ),
    "a shorter run with a checkpoint": (
        lambda folder: [stopped(folder, SHORTER), finished(folder, SHORTER)],
        STOPPED,
        "",
    ),
    "a shorter run without a checkpoint": (
        lambda folder: finished(folder, SHORTER),
        OTHER,
        "this run without a checkpoint to continue from (max_steps was 2, is now 3)",
    ),
    "a longer run": (lambda folder: finished(folder, THIS | {"max_steps": 4}), OTHER, "max_steps was 4, is now 3"),
    "another run, interrupted": (lambda folder: stopped(folder, ANOTHER), OTHER, "seed was 2, is now 1"),
    "the same run, killed while it was measured": (lambda folder: unmeasured(folder, THIS), NEW, ""),
    "the same run with a checkpoint, killed while it was measured": (
        lambda folder: [unmeasured(folder, THIS), stopped(folder, THIS)],
        STOPPED,
        "",
    ),
    "another run, killed while it was measured": (
        lambda folder: unmeasured(folder, ANOTHER),
        OTHER,
        "seed was 2, is now 1",
    ),
    "the record of an evaluation": (file("run.json"), OTHER, "run.json would be overwritten"),
    "a run of an older version": (lambda folder: finished(folder, OLD), OTHER, "format was None"),
    "a damaged record": (
        lambda folder: (folder / "run.json").write_text("{"),
        OTHER,
        "run.json would be overwritten",
    ),
    "a checkpoint of another trainer": (
        foreign_checkpoint,
        OTHER,
        "checkpoint-2/trainer_state.json would be",
    ),
    "a user's page": (file("README.md"), OTHER, "README.md would be overwritten"),
    "a user's configuration": (file("config.json"), OTHER, "config.json would be overwritten"),
    "a user's arguments": (file("training_args.json"), OTHER, "training_args.json would be overwritten"),
    "a user's results": (file("all_results.json"), OTHER, "all_results.json would be overwritten"),
    "ranks": (file("ranks-test-trained.parquet"), OTHER, "ranks-test-trained.parquet would be"),
    "an unmerged encoder": (file("unmerged/config.json"), OTHER, "unmerged/config.json would be"),
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_folder(case, tmp_path):
    make, expected, why = STATES[case]
    make(tmp_path)
    state = state_of(tmp_path, THIS)
    assert state.name == expected
    assert why in state.why
    assert (state.checkpoint is not None) == (expected == STOPPED)


def test_a_run_without_its_weights_is_not_done(tmp_path):
    finished(tmp_path, THIS)
    (tmp_path / "model.safetensors").unlink()
    assert state_of(tmp_path, THIS).name == NEW


def test_a_run_that_only_measures_is_done_without_weights(tmp_path):
    measures = {name: value for name, value in THIS.items() if name != "do_train"}
    write_json(tmp_path / "run.json", {DEPENDS_ON: measures, "results": {}})
    assert state_of(tmp_path, measures).name == DONE


def test_a_folder_is_locked_once(tmp_path):
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert lock_file(first) and not lock_file(second)
    os.close(first)
    assert lock_file(second)


def folder_of(path, overwrite=False, trains=True):
    return OutputFolder(path, trains, overwrite)


def test_clearing_removes_what_a_run_writes_and_keeps_an_edited_card(tmp_path):
    for name in ("README.md", "config.json", "ranks-test-trained.parquet", "run.json", "log.txt", "notes.md"):
        (tmp_path / name).write_text("{}")
    folder_of(tmp_path).clear()
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "notes.md", "README.md.previous", "run.json"}
    assert "results" not in json.loads((tmp_path / "run.json").read_text())


CARD = signed(f"# Card\n\n{WRITTEN} A sentence. -->\n")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (CARD, False),
        (signed(CARD), False),
        (CARD.replace("# Card", "# Our card"), True),
        ("Ours.\n" + CARD, True),
        (CARD + "Ours.\n", False),  # below the line
        (CARD.replace(WRITTEN, "<!-- "), True),
        ("", True),
    ],
)
def test_a_card_that_a_person_edited_is_kept_and_no_other(tmp_path, text, kept):
    (tmp_path / "README.md").write_text(text)
    folder_of(tmp_path).clear()
    assert {path.name for path in tmp_path.iterdir()} == {"run.json"} | ({"README.md.previous"} if kept else set())


def test_an_evaluation_clears_results_alone(tmp_path):
    for name in ("README.md", "config.json", "ranks-test-trained.parquet", "run.json", "all_results.json"):
        (tmp_path / name).write_text("{}")
    folder_of(tmp_path, trains=False).clear()
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "run.json"}


# ---- Commands that refuse to overwrite ----


def test_distil_never_replaces_its_teacher_and_an_encoder_only_if_asked(encoder_dir, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(encoder_dir, teacher)
    before = (teacher / "model.safetensors").read_bytes()
    for words in ([], ["--overwrite"]):
        with refused("this is the folder of the encoder to distil"):
            run_command(["distil", str(teacher), "--output_dir", str(teacher), "--dimensions", "8", *words])
    other = tmp_path / "other"
    shutil.copytree(encoder_dir, other)
    with refused("config.json", "which would be overwritten", "--overwrite true"):
        run_command(["distil", str(teacher), "--output_dir", str(other), "--dimensions", "8"])
    assert (teacher / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes() == before


def test_mine_refuses_to_replace_rows(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl.gz").write_text("mine")
    with refused("has train.jsonl.gz, which would be overwritten"):
        run_command(["mine", str(tmp_path / "tree"), "--language", "python", "--output_dir", str(tmp_path / "rows")])
    assert (tmp_path / "rows" / "train.jsonl.gz").read_text() == "mine"


def test_an_evaluation_never_replaces_the_record_of_a_training(encoder_dir, data_dir, tmp_path):
    folder = shutil.copytree(encoder_dir, tmp_path / "run")
    write_json(folder / "run.json", {DEPENDS_ON: ANOTHER})
    file("ranks-test-untrained.parquet")(folder)
    words = ["evaluate", str(folder), "--output_dir", str(folder), "--overwrite", "true", "--use_cpu", "true"]
    with refused("contains the results of a training run; set another output_dir"):
        run_command([*words, "--data_dir", str(data_dir), "--language", "python"])


def test_an_evaluation_writes_beside_the_checkpoints_of_a_trainer_in_python(encoder_dir, data_dir, tmp_path):
    folder = shutil.copytree(encoder_dir, tmp_path / "run")
    stopped(folder, THIS)
    (folder / "run.json").unlink()
    words = ["evaluate", str(folder), "--output_dir", str(folder), "--use_cpu", "true", "--lexical", "false"]
    words += ["--data_dir", str(data_dir), "--language", "python"]
    assert run_command(words) == 0
    assert {"run.json", "ranks-test-trained.parquet"} <= {path.name for path in folder.iterdir()}
    assert run_command(words) == 0  # the same evaluation may be repeated
    with refused("has all_results.json", "which would be overwritten"):
        run_command([*words, "--matryoshka_dims", "8"])


# ---- Whole runs ----

TINY = {"from_scratch": "32x1", "vocabulary_size": 400, "per_device_train_batch_size": 6, "language": "python"}
TINY |= {"use_cpu": True, "examples": 0, "lexical": False, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def test_a_run_refuses_a_user_s_folder(script, data_dir, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").write_text("my project")
    (folder / "config.json").write_text("{}")
    code, said = script(**TINY, data_dir=data_dir, output_dir=folder)
    assert code == 2 and "README.md, config.json would be overwritten" in said[-1]
    assert (folder / "README.md").read_text() == "my project"


def test_a_run_refuses_a_folder_that_another_run_has_open(script, data_dir, tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    assert lock_file(held)
    code, said = script(**TINY, data_dir=data_dir, output_dir=tmp_path)
    assert code == 2 and "in use by another run" in said[-1]
    os.close(held)


@pytest.mark.slow
def test_a_finished_run_is_done_and_overwriting_leaves_nothing_of_the_earlier_one(script, data_dir, tmp_path):
    run = TINY | {"data_dir": data_dir, "output_dir": tmp_path / "out"}
    code, said = script(**run)
    assert code == 0, said
    out = tmp_path / "out"
    weights = (out / "model.safetensors").read_bytes()
    assert (out / "README.md").is_file() and ranks_of(out, "valid")
    record = (out / "run.json").read_text()
    assert str(tmp_path) not in record and str(data_dir) not in record
    (out / "README.md").write_text("edited")
    code, said = script(**run)
    assert code == 0 and f"{out}: already done" in said[-1]
    code, said = script(**run | {"max_steps": 1})
    assert code == 2 and "max_steps was 2, is now 1" in said[-1]
    for name, how in (("longer", {}), ("resumed", {"resume_from_checkpoint": "last"})):
        longer = tmp_path / name
        shutil.copytree(out, longer)
        code, said = script(**run | {"max_steps": 3, "output_dir": longer} | how)
        assert code == 0 and f"Resuming from {longer / 'checkpoint-2'}" in said
        assert (longer / "README.md.previous").read_text() == "edited"
    assert (tmp_path / "longer" / "model.safetensors").read_bytes() == (longer / "model.safetensors").read_bytes()
    code, said = script(**run | {"seed": 7})
    assert code == 2 and "seed was 42, is now 7" in said[-1] and "--overwrite true" in said[-1]
    again = run | {"overwrite": True, "model_card": False, "do_train": True, "do_predict": True, "seed": 7}
    # A run that cannot start removes nothing.
    assert script(**again | {"report_to": "nothing"})[0] == 2
    assert (out / "model.safetensors").read_bytes() == weights and (out / "checkpoint-1").is_dir()
    assert script(**again)[0] == 0
    assert (out / "README.md.previous").read_text() == "edited" and not (out / "README.md").exists()
    assert {path.name for path in out.glob("ranks-*")} == {
        f"ranks-test-{each}.parquet" for each in ("trained", "untrained")
    }
    assert ranks_of(out, "test")
    assert (out / "model.safetensors").read_bytes() != weights
    assert json.loads((out / "run.json").read_text())[DEPENDS_ON]["seed"] == 7


@pytest.mark.slow
def test_a_finished_run_is_done_until_the_rows_of_its_tree_change(script, tmp_path):
    tree = source_tree(tmp_path / "tree", ["lines", "words", "pages", "notes", "books"])
    run = TINY | {"source_dir": tree, "output_dir": tmp_path / "out", "save_strategy": "no", "save_steps": None}
    assert script(**run)[0] == 0
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    code, said = script(**run)
    assert code == 0 and "already done" in said[-1]
    for path in Path(tree).iterdir():
        path.write_text(path.read_text().replace("long text", "short text"))
    code, said = script(**run)
    assert code == 2 and "the training rows changed" in said[-1] and "--overwrite true" in said[-1]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
