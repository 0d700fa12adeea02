"""What a trainer starts from, and what an earlier run left in its folder."""

import copy
import os

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from trainings import check_weights

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.run.fingerprint import changes
from soft_trainer.run.folder import lock_file


def scaled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def one_weight(model):
    with torch.no_grad():
        next(model.parameters()).view(-1)[-1] += 1.0


def frozen(model):
    one_weight(model)
    model.requires_grad_(False)
    model.embeddings.requires_grad_(True)


def half(model):
    model.half()


def in_memory(trainer_of, change, model, encoder_dir):
    changed = copy.deepcopy(model)
    change(changed)
    return [trainer_of(report=True, arguments={"model": each}) for each in (model, changed)]


def in_a_folder(trainer_of, change, model, encoder_dir):
    path = encoder_dir / "model.safetensors"
    trainers = [trainer_of(report=True, arguments={"model": str(encoder_dir)})]
    before = path.read_bytes()
    weights = load_file(path)
    name = max(weights, key=lambda each: weights[each].numel())
    try:
        save_file(weights | {name: change(weights[name])}, path, {"format": "pt"})
        trainers.append(trainer_of(report=True, arguments={"model": str(encoder_dir)}))
    finally:
        path.write_bytes(before)
    return trainers


@pytest.mark.parametrize(
    "make, change",
    [(in_memory, each) for each in (scaled, one_weight, frozen, half)] + [(in_a_folder, lambda weight: weight * 1.01)],
)
def test_two_encoders_are_told_apart_by_all_their_weights(trainer_of, make, change, model, encoder_dir):
    first, second = (trainer.fingerprint() for trainer in make(trainer_of, change, model, encoder_dir))
    assert changes(first, first) == []
    assert changes(first, second) != []


def of_shell(trainer_of, model, **options):
    """Makes a trainer as the command line does, which refuses another run's folder."""
    args = trainer_of(report=True, lexical=False, examples=0, **options).args
    args.from_command_line = True
    return trainer_of(arguments={"args": args, "model": copy.deepcopy(model)})


@pytest.mark.slow
def test_a_finished_run_gives_its_trained_encoder_and_python_trains_again(trainer_of, model, tmp_path):
    first, second = of_shell(trainer_of, model), of_shell(trainer_of, model)  # neither locks the folder yet
    first.train()
    second.train()
    assert second.state.global_step == 0
    check_weights(second.model.state_dict(), first.model.state_dict())
    assert second.predict(second.eval_dataset).metrics["test_mrr"] == first.report.results["eval"]["trained"]["mrr"]
    held = os.open(tmp_path / "out", os.O_RDONLY)
    assert lock_file(held)
    with refused("in use by another run"):
        of_shell(trainer_of, model).train()
    os.close(held)
    with refused("seed was 42, is now 7"):
        of_shell(trainer_of, model, seed=7).train()
    again = trainer_of(report=True, seed=7, arguments={"model": copy.deepcopy(model)})
    again.train()
    assert again.state.global_step == 3 and again.report.step == 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"alpha": -1.0}, "alpha=-1"),
        ({"matryoshka_dims": "999"}, "999"),
        ({"per_device_train_batch_size": 2, "loss": "soft_info_nce"}, "per_device_train_batch_size"),
        ({"merge_lora": True}, "merge_lora: the encoder has no adapter"),
        ({"metric_for_best_model": "mr", "eval_strategy": "epoch"}, "this metric is not measured"),
        ({"resume_from_checkpoint": "gone"}, "resume_from_checkpoint=gone: not a complete checkpoint"),
    ],
    ids=str,
)
def test_python_checks_before_weights_are_loaded_and_leaves_no_folder(
    trainer_of, encoder_dir, options, words, tmp_path, monkeypatch
):
    monkeypatch.setattr("soft_trainer.run.starting.load_model", lambda *_, **__: pytest.fail("weights loaded"))
    with refused(words):
        trainer_of(arguments={"model": str(encoder_dir), "processing_class": None, "encoder": None}, **options)
    assert not (tmp_path / "out").exists()


def test_a_measured_encoder_leaves_no_empty_folder_and_its_results_are_not_replaced(trainer_of, tmp_path):
    def measured(**options) -> SoftInfoNCETrainer:
        return trainer_of(arguments={"train_dataset": None}, lexical=False, **options)

    measured()
    trainer = measured()
    trainer.measure(finish=lambda report: None)
    trainer.measure()
    assert (tmp_path / "out" / "run.json").is_file()
    measured().measure()  # the same evaluation
    with refused("which would be overwritten"):
        measured(matryoshka_dims="8").measure()


@pytest.mark.slow
def test_measuring_replaces_no_results_of_a_training_run(trainer_of, dataset):
    trainer = trainer_of(report=True, max_steps=2, arguments={"eval_dataset": dataset})
    trainer.train()
    before = (trainer.folder.path / "run.json").read_bytes()
    with refused("measure() would replace the results of a training run"):
        trainer.measure()
    assert (trainer.folder.path / "run.json").read_bytes() == before
