"""`--merge_ratio`: what is kept, what is merged, how the ratio is chosen, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from trainings import check_weights

from soft_trainer import UserError, merge_encoders
from soft_trainer.encoders.adapters import adapter_state, add_lora
from soft_trainer.encoders.loading import load_model
from soft_trainer.hub.export import export_encoder
from soft_trainer.merging import RATIOS, RatioResult, choose_ratio, interpolate
from soft_trainer.options.model import LoraOptions

FAST = {"learning_rate": 1e-2}


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def guards_of(dataset):
    return {"human": (dataset.select(range(6)), dataset)}


@pytest.mark.slow
def test_the_end_is_merged_and_the_unmerged_weights_are_kept(train, model, tokenizer, profile, tmp_path):
    base = export_encoder(model, tokenizer, profile, tmp_path / "base")
    trainer = train(merge_ratio=0.25, **FAST)
    trainer.save_model()
    out = tmp_path / "out"
    before, after = weights_of(base), weights_of(out / "unmerged")
    assert not torch.allclose(after["embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"])
    check_weights(weights_of(out), interpolate(before, [after], 0.25), atol=1e-6)
    again = merge_encoders(base, [out / "unmerged"], 0.25, tmp_path / "again")  # no training needed
    check_weights(weights_of(again), weights_of(out), atol=1e-6)
    assert trainer.merging.record["ratio"] == 0.25


@pytest.mark.slow
def test_a_later_run_into_the_same_folder_leaves_no_unmerged_weights_of_an_earlier_one(train, tmp_path):
    train(merge_ratio=0.25, **FAST)
    assert (tmp_path / "out" / "unmerged").is_dir()
    train(**FAST)
    assert not (tmp_path / "out" / "unmerged").exists()


@pytest.mark.slow
def test_a_ratio_of_nothing_is_named(train, capsys):
    train(merge_ratio=0)
    assert "warning: this is the encoder before training" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("new_trainer", [True, False])
def test_checkpoints_are_unmerged_and_a_resumed_run_ends_with_the_same_weights(
    trainer_of, model, tmp_path, new_trainer
):
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = FAST | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "merge_ratio": "0.5"}
    trainer = trainer_of(**options)
    trainer.train()
    merged = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    out = tmp_path / "out"
    check_weights(weights_of(out / "checkpoint-4"), weights_of(out / "unmerged"), atol=1e-6)
    if new_trainer:
        model.load_state_dict(start)
        trainer = trainer_of(**options)
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    check_weights(trainer.model.state_dict(), merged, atol=1e-6)


def test_auto_takes_the_ratio_that_the_rule_takes(train, model, dataset, capsys):
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = train(merge_ratio="auto", guard_tolerance=0.02, arguments={"guards": guards_of(dataset)}, **FAST)
    record = trainer.merging.record
    results = [RatioResult(row["ratio"], row["valid"], {"human": row["human"]}) for row in record["ratios"]]
    assert [result.ratio for result in results] == list(RATIOS)
    assert record["ratio"] == choose_ratio(results, 0.02)
    assert len({result.valid for result in results}) > 2
    valid = {result.ratio: result.valid for result in results}
    assert trainer.evaluate()["eval_mrr"] == pytest.approx(valid[record["ratio"]])
    trainer.model.load_state_dict(start)
    assert trainer.evaluate()["eval_mrr"] == pytest.approx(valid[0.0])
    printed = capsys.readouterr().err
    assert "guard human, difference" in printed and "+0.0000 ± 0.0000" in printed
    assert f"{record['ratio']:g} has the best valid MRR" in printed


@pytest.mark.slow
def test_an_adapter_is_scaled(train, model, tokenizer, profile, tmp_path):
    base = export_encoder(model, tokenizer, profile, tmp_path / "base")
    adapted = load_model(base, profile)
    add_lora(adapted, LoraOptions(lora_r=4))
    trainer = train(merge_ratio=0.5, arguments={"model": adapted}, **FAST)
    after = load_file(tmp_path / "out" / "unmerged" / "adapter_model.safetensors")
    for name, tensor in adapter_state(trainer.model).items():
        expected = after[f"base_model.model.{name}"] * (0.5 if "lora_B" in name else 1)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-7)
    assert any(tensor.any() for name, tensor in after.items() if "lora_B" in name)
    with pytest.raises(UserError, match="the adapter is trained already"):
        trainer.train()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"merge_ratio": "auto"}, "queries that must not get worse: --guard DIR"),
        ({"merge_ratio": "auto", "guards": True, "eval_dataset": None}, "valid queries"),
        ({"merge_ratio": 1.5}, "merge_ratio=1.5: must be from 0"),
        ({"merge_ratio": "half"}, "merge_ratio=half: a number from 0 to 1, or auto"),
        ({"guard_tolerance": -0.1}, "guard_tolerance=-0.1"),
    ],
)
def test_what_cannot_work_is_refused_by_the_constructor(trainer_of, dataset, options, says):
    arguments = {name: options.pop(name) for name in ("eval_dataset",) if name in options}
    if options.pop("guards", False):
        arguments["guards"] = guards_of(dataset)
    with pytest.raises(UserError, match=says):
        trainer_of(arguments=arguments, **options)


def test_a_missing_corpus_is_named_before_a_training_that_would_choose_by_it(trainer_of, dataset):
    trainer = trainer_of(merge_ratio="auto", arguments={"guards": guards_of(dataset), "codebase": None})
    with pytest.raises(UserError, match="needs a corpus"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.slow
def test_a_run_of_the_command_line_measures_guards_and_records_the_merging(script, data_dir, rows, tmp_path):
    human = tmp_path / "human"
    human.mkdir()
    (human / "codebase.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [{"query": row["docstring"][:12], "url": row["url"], "relevance": 2} for row in rows[:5]]
    (human / "relevance.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    out = tmp_path / "out"
    options = {"from_scratch": "32x2", "max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    options |= {"data_dir": data_dir, "language": "python", "output_dir": out, "use_cpu": "true", "report_to": "none"}
    code, lines = script(guard=human, merge_ratio="auto", save_strategy="no", eval_strategy="epoch", **options)
    assert code == 0, lines
    numbers = json.loads((out / "all_results.json").read_text())
    assert {"human_untrained_mrr", "human_mrr", "test_mrr"} <= numbers.keys()
    record = json.loads((out / "run.json").read_text())
    assert record["merging"]["models"] == ["unmerged"] and len(record["merging"]["ratios"]) == 5
    ratio, card = record["merging"]["ratio"], (out / "README.md").read_text()
    assert (f"Every weight is {ratio:g} x that of the trained encoder" in card) == (ratio < 1)
    assert (out / "unmerged" / "model.safetensors").exists()
    assert any(line.startswith("| human") and "trained encoder" in line for line in lines)
    code, lines = script(guard=data_dir / "nowhere", **options | {"output_dir": tmp_path / "other"})
    assert code == 2 and "guard=" in lines[-1] and "no such folder" in lines[-1]
