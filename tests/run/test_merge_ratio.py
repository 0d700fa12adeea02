"""`--merge_ratio`: the unmerged encoder, the merged encoder, and error messages."""

import json

import pytest
import torch
from safetensors.torch import load_file
from trainings import check_weights

from soft_trainer import UserError
from soft_trainer.encoders.adapters import adapter_state, add_lora
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.merging import interpolate

FAST = {"learning_rate": 1e-2}


def weights_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_the_end_is_merged_and_the_unmerged_weights_are_kept(train, model, tokenizer, profile, tmp_path):
    base = export_encoder(model, tokenizer, profile, tmp_path / "base")
    trainer = train(merge_ratio=0.25, **FAST)
    trainer.save_model()
    out = tmp_path / "out"
    before, after = weights_of(base), weights_of(out / "unmerged")
    assert not torch.allclose(after["embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"])
    check_weights(weights_of(out), interpolate(before, after, 0.25), atol=1e-6)
    assert trainer.merging["ratio"] == 0.25


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
    options = FAST | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "merge_ratio": 0.5}
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


@pytest.mark.slow
def test_an_adapter_is_scaled(train, model, tokenizer, profile, tmp_path):
    base = export_encoder(model, tokenizer, profile, tmp_path / "base")
    adapted = load_model(base, profile)
    add_lora(adapted, ModelArguments(lora_r=4))
    trainer = train(merge_ratio=0.5, arguments={"model": adapted}, **FAST)
    after = load_file(tmp_path / "out" / "unmerged" / "adapter_model.safetensors")
    for name, tensor in adapter_state(trainer.model).items():
        expected = after[f"base_model.model.{name}"] * (0.5 if "lora_B" in name else 1)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-7)
    assert any(tensor.any() for name, tensor in after.items() if "lora_B" in name)
    with pytest.raises(UserError, match="the adapter was trained before this run"):
        trainer.train()


@pytest.mark.slow
def test_a_run_of_the_command_line_records_the_merging(script, data_dir, tmp_path):
    out = tmp_path / "out"
    options = {"from_scratch": "32x2", "max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    options |= {"data_dir": data_dir, "language": "python", "output_dir": out, "use_cpu": "true", "report_to": "none"}
    code, lines = script(merge_ratio=0.5, save_strategy="no", **options)
    assert code == 0, lines
    record = json.loads((out / "run.json").read_text())
    assert record["merging"]["models"] == ["unmerged"] and record["merging"]["ratio"] == 0.5
    assert "Every weight is 0.5 x its value in the trained encoder" in (out / "README.md").read_text()
    assert (out / "unmerged" / "model.safetensors").exists()
