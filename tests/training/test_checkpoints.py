"""A checkpoint continues the training that wrote it, and no other."""

import copy
import importlib
import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from trainings import identity_of
from transformers import TrainerCallback

from soft_trainer import BM25Estimator
from soft_trainer.data.judgments import Split
from soft_trainer.errors import UserError
from soft_trainer.training.checkpoints import MARKER, identify, mark_complete, newest_complete, saving_checkpoint


@pytest.fixture
def checkpoint(trainer_of, tmp_path):
    """A checkpoint of a training that took no step."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    trainer = described(trainer_of())
    mark_complete(folder, trainer.identity)
    return str(folder)


def described(trainer, checkpoint=None):
    """Returns the trainer after it was compared with a checkpoint."""
    trainer._checkpoint = checkpoint
    trainer._keep_weights()
    trainer.identity = identify(lambda: identity_of(trainer), checkpoint)
    return trainer


OTHER = {
    "loss": ({"loss": "kl_regularization"}, "loss was soft_info_nce, is kl_regularization"),
    "temperature": ({"temperature": 3.0}, "temperature was 1.0, is 3.0"),
    "seed": ({"seed": 7}, "seed was 42, is 7"),
    "learning rate": ({"learning_rate": 1e-4}, "learning_rate was 2e-05, is 0.0001"),
    "schedule": ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type was linear, is cosine"),
    "batch size": ({"per_device_train_batch_size": 12}, "per_device_train_batch_size was 8, is 12"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1, is 2"),
    "sampling": ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy was random, is sequential"),
    "dimensions": ({"matryoshka_dims": "32,16"}, "matryoshka_dims was None, is 32,16"),
    "estimator": ({"estimator": BM25Estimator(k1=2.0)}, "the estimator's k1 was 1.2, is 2.0"),
}


@pytest.mark.parametrize(("options", "message"), OTHER.values(), ids=OTHER)
def test_another_setting_is_named(trainer_of, checkpoint, options, message):
    with pytest.raises(UserError, match=message):
        described(trainer_of(**options), checkpoint)


OWN_MODULE = """
from {helper} import SIZE
from soft_trainer.estimators.base import Estimator

WEIGHT = 1.0


def plain(scores, positives, negatives):
    return scores.mean() * WEIGHT * SIZE


class Same(Estimator):
    def fit(self, split):
        pass

    def similarity(self, query_rows, code_rows):
        return (query_rows[:, None] == code_rows[None]).float()
"""


@pytest.mark.parametrize("part", ["constant", "helper", "estimator"])
def test_another_source_is_named(trainer_of, tmp_path, monkeypatch, part):
    """The source of a loss is that of its module and of the modules beside it that it imports."""
    name = f"own_{part}"
    own = tmp_path / f"{name}.py"
    helper = tmp_path / f"{name}_helper.py"
    own.write_text(OWN_MODULE.replace("{helper}", f"{name}_helper"))
    helper.write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"loss": f"{name}:plain", "estimator": None}
    if part == "estimator":
        options = {"estimator": importlib.import_module(name).Same()}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    mark_complete(folder, described(trainer_of(**options)).identity)
    described(trainer_of(**options), str(folder))
    if part == "helper":
        helper.write_text("SIZE = 2\n")
    else:
        own.write_text(own.read_text().replace("1.0", "-1.0"))
    option = "estimator" if part == "estimator" else "loss"
    with pytest.raises(UserError, match=f"the content of {option} changed"):
        described(trainer_of(**options), str(folder))


def test_the_number_of_processes_is_named(trainer_of, checkpoint):
    trainer = described(trainer_of())
    settings = identity_of(trainer)
    settings["start"]["processes"] = 2
    with pytest.raises(UserError, match="processes was 1, is 2"):
        identify(lambda: settings, checkpoint)


def test_other_rows_weights_and_tokenizers_are_named(trainer_of, checkpoint, dataset, model, tokenizer, profile):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["another"])
    dropout = copy.deepcopy(model)
    dropout.config.hidden_dropout_prob = 0.5
    changes = {
        "the training rows changed": {"train_dataset": dataset.select(range(23, -1, -1))},
        "the tokenizer changed": {"processing_class": other},
        "the encoder's configuration": {"model": dropout},
        "query_length was 16": {"encoder": profile.replace(query_length=8)},
    }
    for message, arguments in changes.items():
        with pytest.raises(UserError, match=message):
            described(trainer_of(arguments=arguments), checkpoint)
    frozen = trainer_of()
    frozen.model.embeddings.requires_grad_(False)
    with pytest.raises(UserError, match="frozen weights changed"):
        described(frozen, checkpoint)


def test_length_logging_and_saving_may_change(trainer_of, checkpoint):
    options = {"max_steps": 9, "num_train_epochs": 7, "logging_steps": 3, "save_strategy": "steps", "save_steps": 5}
    described(trainer_of(**options, save_total_limit=1, output_dir="elsewhere"), checkpoint)


@pytest.mark.parametrize("kind", ["dataset", "split", "several"])
def test_evaluation_rows_count_where_they_choose_the_weights(trainer_of, tmp_path, dataset, kind):
    def arguments(number):
        few = dataset.select(range(number))
        kinds = {"dataset": few, "split": Split.from_pairs(few), "several": {"a": few, "b": few}}
        corpora = {"a": dataset, "b": dataset} if kind == "several" else dataset
        return {"eval_dataset": kinds[kind], "codebase": None if kind == "split" else corpora}

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1}
    mark_complete(tmp_path, described(trainer_of(**best, save_steps=1, arguments=arguments(9))).identity)
    described(trainer_of(**best, save_steps=1, arguments=arguments(9)), str(tmp_path))
    described(trainer_of(**best | {"load_best_model_at_end": False}, arguments=arguments(8)), str(tmp_path))
    with pytest.raises(UserError, match="the evaluation rows changed"):
        described(trainer_of(**best, save_steps=1, arguments=arguments(8)), str(tmp_path))


def test_the_encoder_of_an_estimator_is_compared(trainer_of, checkpoint):
    estimator = BM25Estimator()
    estimator.encoder_identity = "of another encoder"
    with pytest.raises(UserError, match="the estimator's encoder was None, is of another encoder"):
        described(trainer_of(estimator=estimator), checkpoint)


@pytest.mark.slow
def test_a_checkpoint_named_by_its_path_must_be_whole(trainer_of, tmp_path):
    trainer_of(save_strategy="steps", save_steps=2).train()
    for name in ("optimizer.pt", "scheduler.pt", MARKER):
        folder = tmp_path / "out" / "checkpoint-2"
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(UserError, match="incomplete"):
            trainer_of().train(resume_from_checkpoint=str(folder))
        (folder / name).write_bytes(kept)
    trainer_of().train(resume_from_checkpoint=str(folder))


class TerminatedInTheLastEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_loses_no_training(trainer_of):
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3}
    trainer = trainer_of(**options)
    trainer.add_callback(TerminatedInTheLastEvaluation())
    with pytest.raises(SystemExit):
        trainer.train()
    assert newest_complete(trainer.args.output_dir).endswith("checkpoint-3")
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    again = trainer_of(**options)
    again.train(resume_from_checkpoint="last")
    assert again.state.global_step == 3
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.model.state_dict().items())


def test_other_weights_to_merge_with_are_named(trainer_of, model, tmp_path):
    trainer = described(trainer_of(merge_ratio=0.5))
    mark_complete(tmp_path, trainer.identity)
    other = copy.deepcopy(model)
    other.embeddings.word_embeddings.weight.data[0, 0] += 1
    described(trainer_of(merge_ratio=0.5), str(tmp_path))
    with pytest.raises(UserError, match="the weights to merge with changed"):
        described(trainer_of(merge_ratio=0.5, arguments={"model": other}), str(tmp_path))


@pytest.mark.parametrize("error", [ValueError("a library's"), KeyboardInterrupt()])
def test_no_error_leaves_half_a_checkpoint(tmp_path, error):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    with pytest.raises(type(error)), saving_checkpoint(folder):
        raise error
    assert not folder.exists()


def test_a_full_disk_is_one_line_whatever_torch_says(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="0 MiB are free there"), saving_checkpoint(tmp_path / "checkpoint-5"):
        raise RuntimeError("basic_ios::clear: iostream error")


class FilesEnd(TrainerCallback):
    """Lets no file grow beyond some bytes after the third step, as a full disk does."""

    def __init__(self, most: int):
        self.most = most

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.parametrize("most", [100, 20_000, 200_000], ids=["the first file", "the weights", "the optimizer"])
def test_a_disk_that_fills_up_leaves_the_last_complete_checkpoint(trainer_of, tmp_path, most):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    trainer = trainer_of(**options)
    trainer.add_callback(FilesEnd(most))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(UserError, match="cannot save to .*checkpoint-4: .*Everything saved before is as it was"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    again = trainer_of(**options)
    again.train(resume_from_checkpoint="last")
    assert again.state.global_step == 5
