"""Changes to a run, and how the three readers of fingerprints report them: a folder, a study and a resumed run.

To test another change, add a row to a table. The row has the message of each reader, or None if the reader allows the
change. `test_readers.py` has a similar table for the caches of rows and embeddings.
"""

import copy
import dataclasses
import functools
import importlib
import json
import shutil
import sys
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location

import numpy as np
import pytest
from git_repositories import Repository
from refusals import refused
from trainings import fingerprint_of
from transformers import DataCollatorWithPadding, EarlyStoppingCallback

from soft_trainer import BM25Estimator
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.fingerprints import encoder_files_fingerprint, own_code
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.option_spec import option_specs
from soft_trainer.options.training import (
    AFFECT_CHOICES,
    AFFECT_NOTHING,
    AFFECT_RESULTS,
    SoftInfoNCETrainingArguments,
)
from soft_trainer.training.checkpoints import compared, mark_complete, warn_of_changes
from soft_trainer.training.run_fingerprint import (
    MAY_DIFFER_IN_FOLDER,
    MAY_DIFFER_IN_STUDY,
    MAY_DIFFER_ON_RESUME,
    NO_SOURCE,
    changes,
    run_fingerprint,
)

BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
BEST |= {"eval_steps": 2}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max"}}
PLATEAU |= {"eval_strategy": "steps", "eval_steps": 2}

# name: (options before, changed options, message of a folder and of a study, message of a resumed run)
OPTIONS = {
    "seed": ({}, {"seed": 7}, "seed was 42, is now 7", "seed was 42, is now 7"),
    "learning rate": ({}, {"learning_rate": 1e-4}, "learning_rate was 2e-05", "learning_rate was 0.001"),
    "batch": ({}, {"per_device_train_batch_size": 7}, "per_device_train_batch_size was 8", "per_device_train_batch"),
    "optimizer": ({}, {"optim": "sgd"}, "optim was adamw_torch", "optim was adamw_torch"),
    "schedule": ({}, {"lr_scheduler_type": "cosine"}, "lr_scheduler_type was linear", "lr_scheduler_type was linear"),
    "accumulation": ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "gradient_accumulation"),
    "sampling": ({}, {"train_sampling_strategy": "sequential"}, "train_sampling_strategy", "train_sampling_strategy"),
    "dimensions": ({}, {"matryoshka_dims": "32,16"}, "matryoshka_dims was None", "matryoshka_dims was None"),
    "temperature": (
        {},
        {"temperature": 3.0},
        "temperature was None, is now 3.0",
        "the criterion's temperature was 1.0",
    ),
    "loss": ({}, {"loss": "bce"}, "loss was None, is now bce", "the criterion's loss was soft_info_nce, is now bce"),
    "more epochs": ({}, {"num_train_epochs": 20.0}, "num_train_epochs was 10.0, is now 20.0", None),
    "more steps": ({}, {"max_steps": 9}, "max_steps was 3, is now 9", None),
    "best checkpoint": ({}, BEST, "load_best_model_at_end was False", "load_best_model_at_end was False"),
    "metric that chooses": (
        BEST,
        {"metric_for_best_model": "recall@1"},
        "metric_for_best_model was mrr, is now recall@1",
        "metric_for_best_model was mrr, is now recall@1",
    ),
    "direction that chooses": (BEST, {"greater_is_better": False}, "greater_is_better was", "greater_is_better was"),
    "evaluations that choose": (BEST, {"eval_steps": 1}, "eval_steps was 2, is now 1", "eval_steps was 2, is now 1"),
    "checkpoints that are chosen from": (
        BEST,
        {"save_steps": 4},
        "save_steps was 2, is now 4",
        "save_steps was 2, is now 4",
    ),
    "delay of what chooses": (BEST, {"eval_delay": 1}, "eval_delay was 0, is now 1", "eval_delay was 0, is now 1"),
    "evaluations that lower the rate": (PLATEAU, {"eval_steps": 1}, "eval_steps was 2, is now 1", "eval_steps was 2"),
    "evaluations that choose nothing": ({"do_eval": True}, {"eval_strategy": "steps", "eval_steps": 1}, None, None),
    "a part that measures": ({}, {"do_predict": True}, "do_predict was False, is now True", None),
    "a metric that chooses nothing": ({}, {"metric_for_best_model": "recall@1"}, None, None),
    "saving": ({}, {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, None, None),
    "logging": ({}, {"logging_steps": 9, "report_to": "none"}, None, None),
    "evaluation batch": ({}, {"per_device_eval_batch_size": 3}, None, None),
}


def parts_of(**options) -> tuple:
    """Returns a command's options as instances of the three classes."""
    given = {"language": "python", "output_dir": "tree/out", "use_cpu": True, "do_train": True, "max_steps": 3}
    given |= {"per_device_train_batch_size": 8, "save_strategy": "no"} | options
    parts = []
    for kind in (ModelArguments, DataArguments, SoftInfoNCETrainingArguments):
        parts.append(kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__}))
    return tuple(parts)


def command(**options) -> dict:
    """Returns the fingerprint of a command."""
    return run_fingerprint(*parts_of(**options), apart="tree/out")


def check(lines: list[str], expected: str | None) -> None:
    if expected is None:
        assert lines == []
    else:
        assert any(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize("change", OPTIONS)
def test_a_changed_option(change, trainer_of):
    before, changed, early, resumed = OPTIONS[change]
    for reader in (MAY_DIFFER_IN_FOLDER, MAY_DIFFER_IN_STUDY):
        check(changes(command(**before), command(**before | changed), reader), early)
    then, now = (fingerprint_of(trainer_of(**options)) for options in (before, before | changed))
    check(changes(then, now, MAY_DIFFER_ON_RESUME), resumed)
    assert changes(then, copy.deepcopy(then), MAY_DIFFER_ON_RESUME) == []


# name: (changes on another machine or version, message of a folder, of a study, of a resumed run)
ELSEWHERE = {
    "processes": ({"processes": 2}, "processes was 2, is now 1", None, "processes was 2, is now 1"),
    "precision": ({"precision": "bf16"}, "precision was bf16, is now no", None, "precision was bf16, is now no"),
    "format": ({"format": 99}, "format was 99", "format was 99", "format was 99"),
    "versions": ({"versions": {"torch": "1.0"}}, None, None, None),
    "an option of a later transformers": ({"unheard_of": 1}, None, None, None),
}


@pytest.mark.parametrize("change", ELSEWHERE)
def test_a_change_of_what_the_process_sees(change):
    changed, folder, study, resumed = ELSEWHERE[change]
    now = command()
    readers = (MAY_DIFFER_IN_FOLDER, MAY_DIFFER_IN_STUDY, MAY_DIFFER_ON_RESUME)
    for reader, expected in zip(readers, (folder, study, resumed), strict=True):
        check(changes(now | changed, now, reader), expected)


# ---- Content ----

FILES = {
    "fingerprint_loss.py": "def plain(scores, positives, negatives):\n    return scores.mean()\n",
    "fingerprint_package/__init__.py": "",
    "fingerprint_package/inner.py": "class Own:\n    alpha = beta = temperature = 1.0\n",
}
REFERRING = {
    "data_dir": "rows",
    "eval_data_dir": "judged",
    "source_dir": "tree",
    "split_urls": "urls",
    "history": "history",
    "model_name_or_path": "encoder",
    "estimator_model": "teacher",
    "loss": "fingerprint_loss:plain",
    "estimator": "fingerprint_package.inner:Own",
}
# file: the message of a folder and of a study
CONTENT = {
    "rows/train.jsonl": "data_dir changed",
    "judged/test.jsonl": "eval_data_dir changed",
    "tree/a.py": "source_dir changed",
    "urls/train.txt": "split_urls changed",
    "history": "history changed",
    "encoder/model.safetensors": "model_name_or_path changed",
    "encoder/1_Pooling/config.json": "model_name_or_path changed",
    "teacher/config.json": "estimator_model changed",
    "fingerprint_loss.py": "code of loss changed",
    "fingerprint_package/inner.py": "code of estimator changed",
    "fingerprint_package/__init__.py": "code of estimator changed",
    # Files that a run does not read
    "encoder/README.md": None,
    "encoder/log.txt": None,
    "tree/notes.txt": None,
    "tree/.hidden/c.py": None,
    "tree/out/mine.py": None,
    "other.py": None,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with everything that options can refer to."""
    monkeypatch.chdir(tmp_path)
    for name in {*FILES, *CONTENT} - {"history"}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES.get(name, "first = 1\n"))
    Repository(tmp_path / "history").commit("add a", {"a.py": "def a():\n    return 1\n"})
    return tmp_path


@pytest.mark.parametrize("file", CONTENT)
def test_changed_content(file, place):
    then = command(**REFERRING)
    if file == "history":
        Repository(place / file).commit("amended", {"a.py": "def a():\n    return 2\n"})
    else:
        (place / file).write_text("second = 2\n")
    for reader in (MAY_DIFFER_IN_FOLDER, MAY_DIFFER_IN_STUDY):
        check(changes(then, command(**REFERRING), reader), CONTENT[file])


def test_content_that_moved_is_the_same_and_no_path_is_stored(place):
    then = command(**REFERRING)
    (place / "rows").rename(place / "moved")
    assert changes(then, command(**REFERRING | {"data_dir": str(place / "moved")}), MAY_DIFFER_IN_FOLDER) == []
    stored = json.dumps(command(**{name: str(place / value) for name, value in REFERRING.items() if ":" not in value}))
    assert str(place) not in stored


def test_the_base_of_an_adapter_counts(place):
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "encoder"}')
    then = command(model_name_or_path="adapter")
    assert changes(then, command(model_name_or_path="adapter"), MAY_DIFFER_IN_FOLDER) == []
    (place / "encoder" / "model.safetensors").write_text("second = 2")
    assert changes(then, command(model_name_or_path="adapter"), MAY_DIFFER_IN_FOLDER) == ["model_name_or_path changed"]


def test_no_path_of_an_own_object_is_stored(own, trainer_of, tmp_path):
    found = fingerprint_of(trainer_of(estimator=own.Estimator([str(tmp_path)], other=str(tmp_path))))
    assert str(tmp_path) not in json.dumps(found)


def other_tokenizer(parts):
    tokenizer = copy.deepcopy(parts["processing_class"])
    tokenizer.add_tokens(["another"])
    return {"processing_class": tokenizer}


def other_model(change):
    def changed(parts):
        model = copy.deepcopy(parts["model"])
        change(model)
        return {"model": model}

    return changed


def weight(model):
    model.embeddings.word_embeddings.weight.data[0, 0] += 1


def dropout(model):
    model.config.hidden_dropout_prob = 0.5


def adapter(model):
    model.config._name_or_path = "encoder"
    add_lora(model, ModelArguments(lora_r=4))


def freeze(model):
    model.embeddings.requires_grad_(False)


ANOTHER_ENCODER = "the encoder's configuration or frozen weights changed"


def rows(name, *numbers):
    return lambda parts: {name: parts["train_dataset"].select(range(*numbers))}


# name: (options, the change in the trainer, the message of a resumed run)
LOADED = {
    "rows": ({}, rows("train_dataset", 20), "the training rows changed"),
    "order of rows": ({}, rows("train_dataset", 23, -1, -1), "the training rows changed"),
    "length": ({}, lambda parts: {"encoder": parts["encoder"].replace(query_length=8)}, "the encoder's query_length"),
    "tokenizer": ({}, other_tokenizer, "the tokenizer changed"),
    "dropout": ({}, other_model(dropout), ANOTHER_ENCODER),
    "frozen weights": ({}, other_model(freeze), ANOTHER_ENCODER),
    "adapter": ({}, other_model(adapter), "the adapter's r was None, is now 4"),
    "weights that the checkpoint has": ({}, other_model(weight), None),
    "weights to merge with": ({"merge_ratio": 0.5}, other_model(weight), "the weights to merge with changed"),
    "evaluation rows": ({}, rows("eval_dataset", 9), None),
    "evaluation rows that choose": (BEST, rows("eval_dataset", 9), "the evaluation rows changed"),
}


@pytest.mark.parametrize("change", LOADED)
def test_a_change_of_what_a_trainer_has(change, trainer_of):
    options, changed, expected = LOADED[change]
    trainer = trainer_of(**options)
    parts = {name: getattr(trainer, name) for name in ("model", "processing_class", "encoder", "train_dataset")}
    other = trainer_of(**options, arguments=changed(parts))
    check(changes(fingerprint_of(trainer), fingerprint_of(other), MAY_DIFFER_ON_RESUME), expected)


# ---- Objects from the user's code ----

OWN = """
class Estimator:
    def __init__(self, words, arrays=None, other=None):
        self.words = words
        self.arrays = arrays
        self.other = other

    def fit(self, split):
        pass

    def similarity(self, query_rows, code_rows):
        return (query_rows[:, None] == code_rows[None]).float()


class OfEncoder(Estimator):
    def __init__(self, model_name_or_path):
        super().__init__([])
        self.model_name_or_path = model_name_or_path


class Keywords(Estimator):
    def __init__(self, **settings):
        self.settings = settings


class Words(Estimator):
    def __init__(self, *words):
        super().__init__(words)


class Collator:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, features):
        return features


def collate(features, limit=0):
    return features


def rate(predictions):
    return {}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module with these objects."""
    (tmp_path / "fingerprint_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fingerprint_own")
    del sys.modules["fingerprint_own"]


# name: (options, the trainer's arguments before and after, the message of a resumed run)
OBJECTS = {
    "an estimator's encoder": (
        {},
        lambda own: {"estimator": own.OfEncoder("USER/ONE")},
        lambda own: {"estimator": own.OfEncoder("USER/OTHER")},
        "the estimator's model_name_or_path changed",
    ),
    "estimator's list": (
        {},
        lambda own: {"estimator": own.Estimator(["a"])},
        lambda own: {"estimator": own.Estimator(["b"])},
        "the estimator's words changed",
    ),
    "estimator's array": (
        {},
        lambda own: {"estimator": own.Estimator([], np.zeros(2))},
        lambda own: {"estimator": own.Estimator([], np.ones(2))},
        "the estimator's arrays changed",
    ),
    "estimator's array of words": (
        {},
        lambda own: {"estimator": own.Estimator([], np.array(["a"], dtype=object))},
        lambda own: {"estimator": own.Estimator([], np.array(["b"], dtype=object))},
        "the estimator's arrays changed",
    ),
    "estimator's dates": (
        {},
        lambda own: {"estimator": own.Estimator([], np.array(["2020-01-01"], dtype="datetime64[D]"))},
        lambda own: {"estimator": own.Estimator([], np.array(["2020-01-02"], dtype="datetime64[D]"))},
        "the estimator's arrays changed",
    ),
    "estimator's path": (
        {},
        lambda own: {"estimator": own.Estimator("/home/me/a")},
        lambda own: {"estimator": own.Estimator("/home/me/b")},
        "the estimator's words changed",
    ),
    "estimator's words": (
        {},
        lambda own: {"estimator": own.Words("a")},
        lambda own: {"estimator": own.Words("b")},
        "the estimator's words changed",
    ),
    "estimator's keywords": (
        {},
        lambda own: {"estimator": own.Keywords(size=1)},
        lambda own: {"estimator": own.Keywords(size=2)},
        "the estimator's settings changed",
    ),
    "estimator's number": (
        {},
        lambda own: {"estimator": BM25Estimator()},
        lambda own: {"estimator": BM25Estimator(k1=2.0)},
        "the estimator's k1 was 1.2, is now 2.0",
    ),
    "another estimator": (
        {},
        lambda own: {"estimator": BM25Estimator()},
        lambda own: {"estimator": own.Estimator([])},
        "the estimator was BM25Estimator, is now Estimator",
    ),
    "collator": (
        {},
        lambda own: {"arguments": {}},
        lambda own: {"arguments": {"data_collator": own.collate}},
        "the collator was None, is now collate",
    ),
    "collator's setting": (
        {},
        lambda own: {"arguments": {"data_collator": own.Collator(1)}},
        lambda own: {"arguments": {"data_collator": own.Collator(2)}},
        "the collator's limit was 1, is now 2",
    ),
    "collator's partial arguments": (
        {},
        lambda own: {"arguments": {"data_collator": functools.partial(own.collate, limit=1)}},
        lambda own: {"arguments": {"data_collator": functools.partial(own.collate, limit=2)}},
        "the collator's arguments changed",
    ),
    "collator's method": (
        {},
        lambda own: {"arguments": {"data_collator": own.Collator(1).__call__}},
        lambda own: {"arguments": {"data_collator": own.Collator(2).__call__}},
        "the collator's limit was 1, is now 2",
    ),
    "metrics that choose": (
        BEST,
        lambda own: {"arguments": {}},
        lambda own: {"arguments": {"compute_metrics": own.rate}},
        "the metrics was None, is now rate",
    ),
    "metrics that choose nothing": (
        {},
        lambda own: {"arguments": {}},
        lambda own: {"arguments": {"compute_metrics": own.rate}},
        None,
    ),
}


@pytest.mark.parametrize("change", OBJECTS)
def test_a_change_of_the_user_s_own_objects(change, own, trainer_of):
    options, before, after, expected = OBJECTS[change]
    then, now = (fingerprint_of(trainer_of(**options, **each(own))) for each in (before, after))
    check(changes(then, now, MAY_DIFFER_ON_RESUME), expected)


def test_the_code_of_an_own_object_counts(own, trainer_of, tmp_path):
    def now():
        return fingerprint_of(trainer_of(estimator=own.Estimator([]), arguments={"data_collator": own.collate}))

    then = now()
    (tmp_path / "fingerprint_own.py").write_text(OWN + "SIZE = 2\n")
    assert changes(then, now(), MAY_DIFFER_ON_RESUME) == ["code of estimator changed", "code of collator changed"]


def test_a_stop_that_reads_metrics_makes_evaluations_count(trainer_of):
    def now(patience, rows, **options):
        trainer = trainer_of(**options, arguments={"eval_dataset": rows})
        trainer.add_callback(EarlyStoppingCallback(patience))
        return fingerprint_of(trainer)

    rows = trainer_of().train_dataset
    then = now(1, rows)
    lines = changes(then, now(2, rows.select(range(9)), eval_delay=1), MAY_DIFFER_ON_RESUME)
    assert "eval_delay was 0, is now 1" in lines and "the evaluation rows changed" in lines
    assert "the early stop's early_stopping_patience was 1, is now 2" in lines


def test_evaluations_that_now_choose_are_not_called_changed(trainer_of):
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = evaluates | {"load_best_model_at_end": True}
    for then, now in (({"do_eval": True} | evaluates, best), (best, evaluates)):
        (line,) = changes(command(**then), command(**now), MAY_DIFFER_IN_FOLDER | {"do_eval"})
        assert line.startswith("load_best_model_at_end was")
    arguments = {"eval_dataset": trainer_of().train_dataset}
    then = fingerprint_of(trainer_of(**evaluates, arguments=arguments))
    trainer = trainer_of(**evaluates, arguments=arguments)
    trainer.add_callback(EarlyStoppingCallback(1))
    lines = ["the early stop was None, is now EarlyStoppingCallback"]
    assert changes(then, fingerprint_of(trainer), MAY_DIFFER_ON_RESUME) == lines


def test_what_cannot_be_compared_is_named(own, trainer_of, tmp_path, capsys):
    trainer = trainer_of(estimator=own.Estimator([], other=object()))
    found = fingerprint_of(trainer)
    mark_complete(tmp_path / "checkpoint-1", found)
    warn_of_changes(found | {"versions": {"torch": "1.0"}}, str(tmp_path / "checkpoint-1"))
    said = capsys.readouterr().err
    assert "cannot compare the estimator's other" in said and "torch was " in said and ", is now 1.0" in said
    unknown = found | {"code of estimator": NO_SOURCE}
    with refused("code of estimator is unknown, because its source cannot be read; define it in a module"):
        compared(lambda: unknown, str(tmp_path / "checkpoint-1"))


def test_a_collator_of_transformers_counts_by_its_class_and_settings(trainer_of, tokenizer):
    collator = DataCollatorWithPadding(tokenizer, max_length=8)
    found = fingerprint_of(trainer_of(arguments={"data_collator": collator}))
    assert found["the collator"] == "DataCollatorWithPadding" and found["the collator's max_length"] == 8
    assert "code of collator" not in found


def test_a_script_s_own_function_counts_by_its_own_source(tmp_path, monkeypatch):
    """Users edit a script to resume it, so the script's other lines do not count."""
    hashes = []
    for end in ("", "# more\n", "# other\n"):
        script = tmp_path / f"script{len(hashes)}.py"
        script.write_text(f"def mine(scores):\n    return scores.mean()\n\n\n{end}")
        spec = spec_from_file_location("__main__", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, "__main__", module)
        hashes.append(own_code(module.mine))
    assert hashes[0] and len(set(hashes)) == 1
    exec(compile("def entered(scores):\n    return 1\n", "<stdin>", "exec"), vars(module))
    assert own_code(module.entered) is None


class OfAnEditableInstallation(MetaPathFinder):
    def __init__(self, path):
        self.path = path

    def find_spec(self, fullname, path=None, target=None):
        return spec_from_file_location(fullname, self.path) if fullname == "fingerprint_editable" else None


def test_own_code_counts_that_only_a_finder_finds(tmp_path, monkeypatch):
    module = tmp_path / "elsewhere.py"
    module.write_text("def plain(scores):\n    return scores.mean()\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, OfAnEditableInstallation(module)])
    before = own_code("fingerprint_editable:plain")
    module.write_text("def plain(scores):\n    return 2 * scores.mean()\n")
    assert before and own_code("fingerprint_editable:plain") != before


# ---- Lists of options ----


def test_every_option_stands_in_exactly_one_list():
    declared = option_specs(TrainingOptions).keys()
    lists = (AFFECT_RESULTS, AFFECT_CHOICES, AFFECT_NOTHING, sorted(declared))
    listed = [name for names in lists for name in names]
    fields = {field.name for field in dataclasses.fields(SoftInfoNCETrainingArguments)}
    assert sorted(listed) == sorted(set(listed))
    assert fields - set(listed) == set()


def test_an_unknown_option_counts_only_where_it_differs_from_its_default():
    parts = parts_of()
    plain = parts[-1].to_dict
    parts[-1].to_dict = lambda: plain() | {"of_a_later_version": None}
    assert changes(command(), run_fingerprint(*parts, apart="tree/out"), MAY_DIFFER_IN_FOLDER) == []
    parts[-1].to_dict = lambda: plain() | {"of_a_later_version": 3}
    assert run_fingerprint(*parts)["of_a_later_version"] == 3


def test_defaults_are_not_stored():
    assert command().keys() <= {
        *("format", "processes", "precision", "versions", "language", "do_train", "max_steps"),
        "per_device_train_batch_size",
    }


def test_the_content_of_a_configuration_of_transformers_counts(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text("{}")
    model, data, args = parts_of()
    args.deepspeed = str(path)
    before = run_fingerprint(model, data, args)
    path.write_text('{"fp16": true}')
    assert changes(before, run_fingerprint(model, data, args), MAY_DIFFER_IN_FOLDER) == ["deepspeed changed"]


def test_code_beside_an_encoder_counts_if_the_encoder_names_it(encoder_dir, tmp_path):
    folder = tmp_path / "own"
    shutil.copytree(encoder_dir, folder)
    plain = encoder_files_fingerprint(folder)
    (folder / "layers.py").write_text("SIZE = 1")
    assert encoder_files_fingerprint(folder) == plain  # a script of the user's
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Own"}}))
    (folder / "modeling_own.py").write_text("from .layers import SIZE")
    before = encoder_files_fingerprint(folder)
    (folder / "layers.py").write_text("SIZE = 2")
    assert encoder_files_fingerprint(folder) != before


def test_a_repository_without_a_commit_is_named(tmp_path):
    Repository(tmp_path / "empty")
    assert command(history=str(tmp_path / "empty"))["history"] == "no commit"
