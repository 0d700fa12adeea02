"""Training in Python ends with the same table and the same files as on the command line."""

import json
import shutil

import pytest
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.run.reporting import results_text


@pytest.mark.slow
def test_a_training_in_python_ends_with_the_table_of_the_shell(trainer_of, dataset, capsys):
    trainer = trainer_of(report=True, max_steps=3)
    before = trainer.predict(dataset).metrics["test_mrr"]
    trainer.train()
    shown = capsys.readouterr().err
    found = trainer.report.results["eval"]
    assert list(found) == ["untrained", "trained", "lexical", "combined"]
    assert found["untrained"]["mrr"] == before
    assert found["trained"]["mrr"] == trainer.predict(dataset).metrics["test_mrr"] != before
    assert {"mrr_change", "mrr_change_margin"} <= found["trained"].keys()
    assert results_text(trainer.report.results) in shown and "| BM25 " in shown
    assert ": none" not in shown  # in Python, nobody asked for further splits


@pytest.mark.slow
def test_a_report_has_a_table_for_each_set_and_a_resumed_training_measures_the_encoder_before_it(
    trainer_of, dataset, model, tmp_path
):
    sets = {"first": dataset.select(range(8)), "second": dataset.select(range(8, 24))}
    arguments = {"eval_dataset": sets, "codebase": {name: dataset for name in sets}, "model": model}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer_of(arguments=arguments, save_strategy="steps", save_steps=2, max_steps=2).train()
    model.load_state_dict(state)
    trainer = trainer_of(arguments=arguments, report=True, max_steps=3)
    expected = trainer.evaluate()
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name in sets:
        assert trainer.report.results[name]["untrained"]["mrr"] == expected[f"eval_{name}_mrr"]


@pytest.mark.slow
def test_nothing_is_reported_unless_asked_and_a_report_needs_rows(trainer_of):
    trainer = trainer_of(max_steps=1)
    trainer.train()
    assert trainer.report is None
    with refused("report=True: pass eval_dataset="):
        trainer = trainer_of(report=True, arguments={"eval_dataset": None, "codebase": None})
        trainer.train()
    assert trainer.ongoing.prepared is None  # the error came before the estimator was fitted


@pytest.mark.slow
def test_a_trainer_that_resumes_keeps_what_it_has_measured_before_training(trainer_of):
    trainer = trainer_of(report=True, max_steps=3, save_strategy="steps", save_steps=2)
    trainer.train()
    before = trainer.report.results["eval"]["untrained"]
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint="last")
    assert trainer.report.results["eval"]["untrained"] == before


HERE = {"language": "python", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8}
FILES = {"README.md", "run.json", "all_results.json", "train_results.json", "eval_results.json", "model.safetensors"}
FILES |= {"soft_trainer.json", "training_args.json", "trainer_state.json"}
SYSTEMS = ("untrained", "trained", "lexical")


@pytest.mark.slow
def test_python_leaves_the_files_of_the_shell(trainer_of, script, encoder_dir, data_dir, dataset, tmp_path, capsys):
    options = HERE | {"max_steps": 3, "save_strategy": "no", "estimator": "bm25", "logging_steps": 1}
    assert script(model=encoder_dir, data_dir=data_dir, output_dir=tmp_path / "shell", **options)[0] == 0
    trainer = trainer_of(report=True, max_steps=3, arguments={"model": str(encoder_dir), "processing_class": None})
    trainer.train()
    of_shell = {path.name for path in (tmp_path / "shell").iterdir() if path.is_file()}
    of_python = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert FILES <= of_python
    assert of_python == {name for name in of_shell if "ranks-" not in name} | {
        f"ranks-eval-{system}.parquet" for system in (*SYSTEMS, "combined")
    }
    records = {}
    for folder in ("shell", "out"):
        records[folder] = json.loads((tmp_path / folder / "run.json").read_text())
    assert records["out"].keys() - records["shell"].keys() == set()
    assert records["shell"].keys() - records["out"].keys() <= {"dataset"}
    assert str(tmp_path) not in json.dumps(records["out"])
    numbers = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert numbers["eval_mrr"] == trainer.report.results["eval"]["trained"]["mrr"]

    card = (tmp_path / "out" / "README.md").read_text()
    assert "encoder after training" in card and "chosen on these rows" not in card
    trainer.save_model()  # nothing changes
    assert (tmp_path / "out" / "README.md").read_text() == card

    capsys.readouterr()
    assert run_command(["compare", str(tmp_path / "out"), str(tmp_path / "out"), "--split", "eval"]) == 0
    assert run_command(["report", str(tmp_path / "out"), "--output_dir", str(tmp_path / "a")]) == 0
    assert run_command(["report", str(tmp_path / "shell"), "--output_dir", str(tmp_path / "b")]) == 0


@pytest.mark.slow
def test_save_model_writes_a_card_unless_it_is_turned_off(train, tmp_path):
    trainer = train(max_steps=1)
    trainer.save_model(str(tmp_path / "there"))
    assert "soft_info_nce" in (tmp_path / "there" / "README.md").read_text()
    assert not (tmp_path / "out" / "README.md").exists()
    trainer.args.model_card = False
    trainer.save_model(str(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "README.md").exists()
    trainer = train(max_steps=2, save_strategy="steps", save_steps=1)
    assert not list((tmp_path / "out").rglob("README.md"))  # a checkpoint has no card


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"load_best_model_at_end": True, "save_strategy": "epoch"}, {"early_stopping_patience": 1}], ids=str
)
def test_the_table_says_on_which_rows_the_weights_were_chosen(trainer_of, dataset, capsys, options, tmp_path):
    options |= {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"}
    sets = {"own": dataset, "other": dataset.select(range(8))}
    trainer = trainer_of(
        report=True,
        arguments={"eval_dataset": sets, "codebase": None},
        **{"metric_for_best_model": "own_mrr", **options},
    )
    trainer.train()
    assert capsys.readouterr().err.count("encoder after training (chosen on these rows) ") == 2
    assert "(chosen on these rows)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_early_stopping_is_an_option_of_the_shell(script, encoder_dir, data_dir, tmp_path):
    options = HERE | {"model": encoder_dir, "data_dir": data_dir, "num_train_epochs": 5, "learning_rate": 0.0}
    options |= {"eval_strategy": "epoch", "early_stopping_patience": 2, "output_dir": tmp_path / "shell"}
    assert script(**options)[0] == 0
    state = json.loads((tmp_path / "shell" / "trainer_state.json").read_text())
    assert state["epoch"] == 3  # the first epoch sets the best, and two more do not improve it
    code, said = script(**options | {"eval_strategy": "no", "output_dir": tmp_path / "other"})
    assert code == 2 and "early_stopping_patience, EarlyStoppingCallback: set eval_strategy" in said[-1]


def test_a_loss_without_weights_fits_no_estimator_in_the_shell(script, encoder_dir, data_dir, tmp_path):
    (tmp_path / "plain").mkdir()
    for file in encoder_dir.iterdir():
        if file.is_file() and file.name != "modules.json":
            shutil.copy(file, tmp_path / "plain")
    options = HERE | {"data_dir": data_dir, "max_steps": 1, "save_strategy": "no", "loss": "info_nce"}
    code, said = script(model=tmp_path / "plain", output_dir=tmp_path / "shell", **options)
    assert code == 0 and not any("BM25Estimator fitted" in line for line in said), said
