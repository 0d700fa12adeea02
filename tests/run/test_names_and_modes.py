"""Whatever a folder, a file or a set of queries is called, a run ends with its results, in readable files."""

import itertools
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from refusals import refused

from soft_trainer import EstimatorCallback, load_rows
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.studies.compare import ranks_of
from soft_trainer.system.files import ranks_file, read_json

NAMES = [
    "test",
    "org/name",
    "a b:c",
    "50 % off",
    "..",
    "x" * 150,
    "größe",
    "con*?<>|",
    'the "best"',
    "a\\b",
    "-x",
    "%2F",
]


def test_different_sets_have_different_files():
    near = {"".join(name) for size in (1, 2, 3) for name in itertools.product("a/%2F:.", repeat=size)}
    files = {ranks_file(name, "trained") for name in near}
    assert len(files) == len(near) and not any("/" in file or ":" in file for file in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "umask"), [("minilm:v1", 0o022), ("~", 0o027), ("a b/c#d?e%20", 0o077), ("größe", 0o002), ("-x", 0o022)]
)
def test_a_run_in_a_folder_of_any_name(trainer_of, dataset, tmp_path, monkeypatch, folder, umask):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True)
    number = NAMES.index("org/name") + umask + len(folder)
    names = [NAMES[(number + step) % len(NAMES)] for step in range(3)]
    sets = {name: dataset.select(range(4 * row, 4 * row + 4)) for row, name in enumerate(names)}
    arguments = {"eval_dataset": sets, "codebase": None, "compute_metrics": lambda _: {"own": np.array(0.5)}}
    before = os.umask(umask)
    try:
        trainer = trainer_of(
            report=True, output_dir=f"./{folder}", save_strategy="steps", save_steps=3, arguments=arguments
        )
        trainer.train()
    finally:
        os.umask(before)
    for path in Path(folder).rglob("*"):
        assert not path.is_file() or stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path
    results = read_json(Path(folder) / "run.json")["results"]
    for name in names:
        ranks = ranks_of(f"./{folder}", name).ranks
        assert (1 / ranks).mean() == pytest.approx(results[name]["trained"]["mrr"])
        assert results[name]["trained"]["own"] == 0.5


def pairs(numbers):
    return [{"query": f"adds {n} and {n * n}", "code": f"x + {n} * {n * n}"} for n in numbers]


@pytest.mark.parametrize("name", ["rows:v1.parquet", "~.parquet", "a b%20#?.jsonl", "größe.csv"])
def test_rows_in_a_file_of_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = Dataset.from_list(pairs(range(30)))
    write = {".parquet": rows.to_parquet, ".jsonl": rows.to_json, ".csv": rows.to_csv}
    write[Path(name).suffix](str(tmp_path / "plain"))
    (tmp_path / "plain").rename(tmp_path / name)
    for path in (name, f"~/{name}", tmp_path / name):
        assert sum(len(split.judgments) for split in load_rows(path).values()) == 30


@pytest.mark.parametrize("name", ["bad/nope.csv", "bad/nope.jsonl.gz", "nope.parquet"])
def test_a_file_that_is_missing_is_no_name_on_the_hub(name):
    with refused(f"{name}: no such folder or file"):
        load_rows(name)


def test_a_copy_of_a_data_set_of_the_hub_is_read_as_datasets_reads_it(tmp_path):
    (tmp_path / "data").mkdir()
    for split, numbers in {"train": range(20), "test": range(20, 30)}.items():
        Dataset.from_list(pairs(numbers)).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    for split, name in {"train": "train", "validation": "test"}.items():
        card += f"  - split: {split}\n    path: data/{name}-*\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    assert {name: len(split.judgments) for name, split in load_rows(tmp_path).items()} == {"train": 20, "valid": 10}


def test_of_an_endless_stream_only_the_rows_of_the_steps_are_read(trainer_of):
    def endless():
        for number in itertools.count():
            yield {"docstring": f"adds {number}", "code": f"x + {number}", "url": f"u{number}"}

    stream = IterableDataset.from_generator(endless)
    trainer = trainer_of(max_steps=2, arguments={"train_dataset": stream})
    trainer.train()
    assert 16 <= len(trainer.train_dataset) <= 1024


def test_rows_that_are_both_trained_on_and_measured_are_counted(trainer_of, dataset, capsys):
    load_rows({"train": pairs(range(9)), "test": pairs(range(6, 12))})
    assert "warning: test: 3 of 6 pairs share" in capsys.readouterr().err
    trainer_of(max_steps=1, arguments={"eval_dataset": dataset.select(range(5))}).train()
    assert "warning: eval: 5 of 5 pairs share" in capsys.readouterr().err


def test_an_estimator_that_reads_a_renamed_column_is_told_its_name(trainer_of):
    class Own:
        def fit(self, split):
            self.values = split.queries["question"]

        def similarity(self, query_rows, code_rows):
            raise AssertionError

    rows = [{"question": row["query"], "answer": row["code"]} for row in pairs(range(20))]
    arguments = {"train_dataset": rows, "callbacks": [EstimatorCallback(Own())]}
    with refused("Own: the column 'question' is called 'docstring' in the split"):
        trainer_of(arguments=arguments).train()


def test_an_interrupted_run_is_said_to_be_interrupted(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1, "depends on": {}}')
    (tmp_path / "checkpoint-4").mkdir()
    for read in (load_encoder, lambda folder: ranks_of(folder, "test")):
        with refused("this run was interrupted; rerun its command to finish it, or name a checkpoint, such as"):
            read(tmp_path)
