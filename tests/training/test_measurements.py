"""Training in Python ends with the same table of results as on the command line."""

import pytest
from refusals import refused


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
    assert trainer.report.table() in shown and "| BM25 " in shown
    margin = found["trained"]["mrr_change_margin"]
    found["trained"]["mrr_change"] = margin / 2
    assert trainer.report.table().endswith(
        f"\neval: {len(dataset)} queries are too few to show a change below {margin:.3f}"
    )
    found["trained"]["mrr_change"] = margin * 2
    assert "too few" not in trainer.report.table()


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
