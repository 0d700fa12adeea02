"""A run owns what it wrote in its output folder: the next one removes that and no more, and readers read that."""

import json

import pytest
from refusals import refused

from soft_trainer.files import LISTED, RECORD, listed_files, write_json
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.folder import RunFolder
from soft_trainer.run.record import Run, check_output_dir
from soft_trainer.run.run_data import RunData
from soft_trainer.studies.compare import ranks_of
from soft_trainer.trainer import SoftInfoNCETrainer


@pytest.fixture
def folder(tmp_path):
    """An output folder with what a run has written, and files of somebody else."""
    (tmp_path / "log.txt").write_text("a study's")
    (tmp_path / "config.json").write_text("{}")
    files = RunFolder(tmp_path)
    for name in ("ranks-valid-trained.parquet", "README.md", "model.safetensors", "trainer_state.json"):
        (tmp_path / name).write_text(f"first {name}")
    (tmp_path / "log.txt").write_text("grows")
    (tmp_path / "notes.md").write_text("mine")
    write_json(tmp_path / RECORD, files.record({}))
    return tmp_path


def test_a_run_lists_what_it_wrote(folder):
    listed = json.loads((folder / RECORD).read_text())[LISTED]
    assert {name: each["pushed"] for name, each in listed.items()} == {
        "README.md": True,
        "model.safetensors": True,
        "ranks-valid-trained.parquet": False,
        "trainer_state.json": False,
    }


def test_the_next_run_removes_what_the_list_names_and_nothing_else(folder):
    (folder / "ranks-old-trained.parquet").write_text("of no run")
    files = RunFolder(folder)
    files.take_over(trains=True)
    left = {path.name for path in folder.iterdir()}
    assert left == {"log.txt", "notes.md", "config.json", "ranks-old-trained.parquet"}
    (folder / "model.safetensors").write_text("second")
    assert set(files.written()) == {"model.safetensors"}


def test_a_run_that_only_measures_keeps_the_encoder(folder):
    files = RunFolder(folder)
    files.take_over(trains=False)
    assert not (folder / "ranks-valid-trained.parquet").exists()
    (folder / "ranks-test-trained.parquet").write_text("new")
    kept = {"README.md", "model.safetensors", "trainer_state.json"}
    assert set(files.written()) == kept | {"ranks-test-trained.parquet"}


def test_a_run_that_resumes_removes_nothing_but_lists_only_its_own(folder):
    files = RunFolder(folder, resumes=True)
    files.take_over(trains=True)
    assert (folder / "ranks-valid-trained.parquet").exists() and files.written() == {}


def test_a_list_from_elsewhere_names_nothing_outside(folder):
    write_json(folder / RECORD, {LISTED: {"../victim": {}, "/tmp/victim": {}, "a": {}}})
    assert set(listed_files(folder)) == {"a"}


def test_ranks_that_the_record_does_not_list_are_not_compared(folder):
    (folder / "ranks-test-trained.parquet").write_text("of an earlier run")
    with refused("ranks-test-trained.parquet: not from the run in this folder"):
        ranks_of(folder, "test")
    (folder / "ranks-valid-trained.parquet").write_text("changed")
    with refused("ranks-valid-trained.parquet: has changed since the run in this folder wrote it"):
        ranks_of(folder, "valid")


# ---- The check of an output folder ----


@pytest.fixture
def finished(model, tokenizer, profile, tmp_path, rows, monkeypatch):
    """Returns a function that makes the options of a run, and the folder of a finished run with these options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_check.py").write_text("def plain(scores, positives):\n    return scores.mean()\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("{}\n")

    def options(**changes):
        given = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none", "do_train": True}
        data = {"language": "python", "data_dir": "rows"}
        for name in {*changes} & set(DataArguments.__dataclass_fields__):
            data[name] = changes.pop(name)
        encoder = ModelArguments(**{name: changes.pop(name) for name in {"model_name_or_path"} & {*changes}})
        return encoder, DataArguments(**data), SoftInfoNCETrainingArguments(**given | changes)

    encoder, data, args = options(loss="own_check:plain")
    args.disable_tqdm = True
    args.do_train = True
    trainer = SoftInfoNCETrainer(model=model, args=args, processing_class=tokenizer, encoder=profile)
    Run(trainer, RunData.of_tables({}), encoder, data, {}).finish()
    return options


def test_the_same_run_may_write_to_its_folder_again(finished):
    check_output_dir(*finished(loss="own_check:plain"))


def test_changed_content_is_refused_like_a_changed_option(finished, tmp_path):
    with refused("contains another run (seed was 42, is 7)"):
        check_output_dir(*finished(loss="own_check:plain", seed=7))
    (tmp_path / "own_check.py").write_text("def plain(scores, positives):\n    return 2 * scores.mean()\n")
    with refused("contains another run (the content of loss changed)"):
        check_output_dir(*finished(loss="own_check:plain"))
    (tmp_path / "rows" / "train.jsonl").write_text("{}\n{}\n")
    with refused("the content of data_dir changed"):
        check_output_dir(*finished(loss="own_check:plain"))
    check_output_dir(*finished(loss="own_check:plain", overwrite=True))


def test_a_run_that_would_remove_what_it_reads_is_refused(finished, tmp_path):
    (tmp_path / "out" / "pushed_rows").mkdir()
    for name, value in {"model_name_or_path": "out", "data_dir": "out/pushed_rows"}.items():
        with refused(f"{name}={value}: lies in the output folder"):
            check_output_dir(*finished(overwrite=True, **{name: value}))


@pytest.mark.slow
def test_a_run_that_takes_the_folder_over_leaves_nothing_of_the_earlier_one(script, data_dir, tmp_path):
    tiny = {"from_scratch": "32x1", "vocabulary_size": 400, "max_steps": 1, "per_device_train_batch_size": 6}
    tiny |= {"use_cpu": True, "language": "python", "data_dir": data_dir, "examples": 0, "lexical": False}
    code, said = script(**tiny, output_dir=tmp_path)
    assert code == 0, said
    assert "README.md" in listed_files(tmp_path) and ranks_of(tmp_path, "valid")
    again = {"overwrite": True, "model_card": False, "do_train": True, "do_predict": True, "seed": 7}
    assert script(**tiny | again, output_dir=tmp_path)[0] == 0
    assert not (tmp_path / "README.md").exists() and ranks_of(tmp_path, "test")
    assert {path.name for path in tmp_path.glob("ranks-*")} == {
        f"ranks-test-{each}.parquet" for each in ("trained", "untrained")
    }
    with refused("no ranks of valid"):
        ranks_of(tmp_path, "valid")
    # A run that cannot begin removes nothing.
    assert script(**tiny | again | {"seed": 8, "report_to": "nothing"}, output_dir=tmp_path)[0] == 2
    assert ranks_of(tmp_path, "test")
