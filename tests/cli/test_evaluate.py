"""`soft-trainer evaluate` evaluates an encoder on a data set, without training."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from refusals import refused

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder, load_rows
from soft_trainer.cli.__main__ import parse_command, run_command
from soft_trainer.cli.evaluate import name_rows
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranked_queries import load_ranks
from soft_trainer.options.fields import DataArguments
from soft_trainer.run.fingerprint import run_fingerprint
from soft_trainer.studies.report import find_runs
from soft_trainer.system.files import DEPENDS_ON, write_json, write_rows
from soft_trainer.system.fingerprints import encoder_files_fingerprint

pytestmark = pytest.mark.usefixtures("own_cache")

HERE = ["--language", "python", "--use_cpu", "true", "--disable_tqdm", "true"]


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]


def test_the_table_has_the_encoder_beside_lexical_bm25(encoder_dir, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(["evaluate", str(encoder_dir), "--data_dir", str(data_dir), *HERE]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["BM25", "tiny", "encoder + BM25"]
    assert all(row[-1] == "24" for row in rows)
    assert not any(path.name != "cache" for path in tmp_path.iterdir())  # without a folder nothing is written


def test_a_run_file_has_the_whole_pool(encoder_dir, data_dir, tmp_path, capsys):
    words = ["evaluate", str(encoder_dir), "--data_dir", str(data_dir), "--lexical", "false", *HERE]
    words += ["--run_file", str(tmp_path / "new" / "run.trec")]
    assert run_command(words) == 0
    assert "the first 24 of 24 functions for each query" in capsys.readouterr().err
    assert len((tmp_path / "new" / "run.trec").read_text().splitlines()) == 4 * 24
    assert len((tmp_path / "new" / "run.trec.qrels").read_text().splitlines()) == 4
    with refused("run_depth=0: must be 1 or more"):
        run_command([*words, "--run_depth", "0"])
    below = tmp_path / "new" / "run.trec" / "run.trec"
    with refused(f"run_file={below}: {below.parent} is a file, not a folder"):
        run_command([*words, "--run_file", str(below)])


@pytest.mark.parametrize(
    ("there", "sets", "says"),
    [
        ("run.trec.qrels", 1, "{0}/run.trec or {0}/run.trec.qrels would be overwritten"),
        ("run-rows.trec.qrels", 2, "{0}/run-rows.trec or {0}/run-rows.trec.qrels would be overwritten"),
        pytest.param("run-old.trec", 1, None, marks=pytest.mark.slow),
        pytest.param("run.trec", 2, None, marks=pytest.mark.slow),
    ],
)
def test_only_run_files_that_would_be_overwritten_are_refused(encoder_dir, data_dir, tmp_path, there, sets, says):
    (tmp_path / there).touch()
    words = ["evaluate", str(encoder_dir), "--data_dir", str(data_dir), "--lexical", "false", *HERE]
    words += ["--run_file", str(tmp_path / "run.trec")]
    if sets == 2:
        words += ["--eval_data_dir", str(shutil.copytree(data_dir, tmp_path / "rows"))]
    if says:
        with refused(f"run_file={tmp_path}/run.trec: {says.format(tmp_path)}; set another run_file"):
            run_command(words)
        words += ["--overwrite", "true"]
    assert run_command(words) == 0


def test_an_encoder_is_measured_by_its_first_dimensions(encoder_dir, data_dir, tmp_path, capsys):
    words = ["evaluate", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(tmp_path / "out"), *HERE]
    assert run_command([*words, "--lexical", "false", "--matryoshka_dims", "8,32", "--include_prompt", "false"]) == 0
    printed = capsys.readouterr()
    assert "include_prompt=False has no effect without" in printed.err
    [header, *_] = printed.out.splitlines()
    assert "MRR, 8 dimensions" in header
    numbers = json.loads((tmp_path / "out/all_results.json").read_text())
    assert {"test_mrr", "test_mrr_8"} <= numbers.keys() and "test_mrr_32" not in numbers
    ranks = load_ranks(tmp_path / "out" / "ranks-test-trained.parquet")
    assert ranks.encoder.decode() == encoder_files_fingerprint(encoder_dir)  # which is not in the output folder
    with pytest.raises(UserError, match="matryoshka_dims=64: must be a whole number from 1 to 32"):
        run_command([*words, "--matryoshka_dims", "64", "--overwrite", "true"])


@pytest.mark.slow
def test_results_and_ranks_are_written_and_are_those_of_the_trainer(encoder_dir, data_dir, tmp_path, capsys):
    words = ["evaluate", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(tmp_path / "out"), *HERE]
    assert run_command([*words, "--lexical", "false"]) == 0
    assert [row[1] for row in rows_of(capsys.readouterr().out)] == ["tiny"]
    encoder, data = load_encoder(encoder_dir, device="cpu"), load_folder(data_dir)
    args = SoftInfoNCETrainingArguments(output_dir=str(tmp_path / "other"), use_cpu=True, disable_tqdm=True)
    trainer = SoftInfoNCETrainer(encoder.model, args, processing_class=encoder.tokenizer, encoder=encoder.profile)
    expected = trainer.predict(data["test"], data["codebase"])
    numbers = json.loads((tmp_path / "out/all_results.json").read_text())
    for name in ("test_mrr", "test_recall@1", "test_recall@5", "test_recall@10", "test_pool_size"):
        assert numbers[name] == expected.metrics[name]
    assert load_ranks(tmp_path / "out/ranks-test-trained.parquet").ranks.tolist() == expected.ranks.tolist()
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["base_model"] == encoder_dir.name and "loss" not in record and "training" not in record
    # Nothing was trained, so a report skips it.
    with pytest.raises(UserError, match="not a training run with results"):
        find_runs([tmp_path / "out"])
    capsys.readouterr()
    assert run_command(["compare", str(tmp_path / "out"), str(tmp_path / "out")]) == 0
    assert "A - B: MRR +0.0000" in capsys.readouterr().out

    assert run_command([*words, "--lexical", "true"]) == 0  # the same again
    with pytest.raises(UserError, match="would be overwritten"):
        run_command([*words, "--code_length", "8"])
    assert run_command([*words, "--code_length", "8", "--overwrite", "true"]) == 0


def test_one_file_has_the_same_splits_in_training_and_evaluation(encoder_dir, rows, tmp_path, capsys):
    pairs = tmp_path / "pairs.csv"
    lines = [f"{row['docstring']} {number},def f{number}(): pass" for number, row in enumerate(rows * 2)]
    pairs.write_text("\n".join(["query,code", *lines]))
    folder = str(shutil.copytree(encoder_dir, tmp_path / "encoder"))
    words = ["evaluate", folder, "--lexical", "false", *HERE[2:]]
    assert run_command([*words, "--data_dir", str(pairs), "--output_dir", str(tmp_path / "out")]) == 0
    ranks = pq.read_table(tmp_path / "out" / "ranks-test-trained.parquet")
    assert len(ranks) == len(load_rows(pairs)["test"])
    assert "was trained on rows" not in capsys.readouterr().err
    trained = run_fingerprint(DataArguments(data_dir=str(pairs)), SoftInfoNCETrainingArguments(use_cpu=True))
    write_json(tmp_path / "encoder" / "run.json", {DEPENDS_ON: trained})
    assert run_command([*words, "--eval_data_dir", str(pairs)]) == 0
    said = capsys.readouterr().err
    assert f"to measure only its test split, set data_dir={pairs}, test_fraction=0.1, split_seed=0" in said
    assert "48 queries (test)" in said
    for options, trained_on in (([], False), (["--split_seed", "1"], True), (["--test_fraction", "0.3"], True)):
        assert run_command([*words, "--data_dir", str(pairs), *options]) == 0
        assert ("was trained on rows" in capsys.readouterr().err) == trained_on
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        shutil.copy(pairs, tmp_path / "split" / f"{name}.csv")
    own_rows = DataArguments(data_dir=str(tmp_path / "split"))
    its_own = run_fingerprint(own_rows, SoftInfoNCETrainingArguments(use_cpu=True))
    write_json(tmp_path / "encoder" / "run.json", {DEPENDS_ON: its_own})
    assert run_command([*words, "--eval_data_dir", str(tmp_path / "split")]) == 0  # its test split alone
    assert "was trained on rows" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, name",
    [
        ([], "code-search-net/code_search_net"),
        (["--dataset_name", "user/rows", "--eval_data_dir", "user/set"], "user/rows"),
        (["--eval_data_dir", "user/set"], "none"),
    ],
)
def test_the_rows_are_those_that_are_named(words, name):
    _, (model_args, data_args, args, _) = parse_command(["evaluate", "some/model", *words, *HERE])
    name_rows(data_args)
    assert (model_args.model_name_or_path, data_args.dataset_name) == ("some/model", name)
    assert args.do_predict and not args.do_train and not args.do_eval


def test_rows_have_the_name_of_their_folder(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    monkeypatch.chdir(tmp_path / "rows")
    assert {DataArguments(data_dir=folder).rows_name for folder in (".", "./", "../rows", "{language}")} == {"rows"}
    assert DataArguments(data_dir="ann/rows").rows_name == "ann/rows"  # a name on the Hub


@pytest.mark.parametrize(
    "words, says",
    [
        (["/nowhere/at/all", "--data_dir", "ROWS"], "/nowhere/at/all: neither a folder here nor"),
        (["/nowhere/at/all", "--data_dir", "ASTRAY"], "row 1: no function in the corpus has the url"),
    ],
)
def test_a_model_or_rows_that_are_not_there_are_one_line(words, says, data_dir, rows, tmp_path):
    write_rows({"test": [rows[0] | {"url": "https://astray"}], "codebase": rows}, tmp_path / "astray")
    paths = {"ROWS": data_dir, "ASTRAY": tmp_path / "astray"}
    words = [str(paths.get(word, word)) for word in words]
    with refused(says):
        run_command(["evaluate", *words, *HERE])
