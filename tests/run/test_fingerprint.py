"""Changes to a run, and how the three readers of fingerprints report them: a folder, a study and a resumed run.

To test another change, add a row to a table. The row has the message of each reader, or None if the reader allows the
change. `test_readers.py` has a similar table for the caches of rows and embeddings.
"""

import copy
import dataclasses
import importlib
import itertools
import json
import shutil
import sys

import pytest
from trainings import fingerprint_of

from soft_trainer import BM25Estimator, TrainedModelEstimator
from soft_trainer.data.split import Split
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.options.fields import DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.spec import option_specs
from soft_trainer.options.training import AFFECT_NOTHING, SoftInfoNCETrainingArguments
from soft_trainer.run.fingerprint import affects_results, changes, run_fingerprint, splits_hash
from soft_trainer.system.fingerprints import encoder_files_fingerprint

BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
BEST |= {"eval_steps": 2}

CHANGED = {"seed": 7, "learning_rate": 1e-4, "per_device_train_batch_size": 7, "optim": "sgd", "temperature": 3.0}
CHANGED |= {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
CHANGED |= {"matryoshka_dims": "32,16"}
LINES = [
    "seed was 42, is now 7",
    "per_device_train_batch_size was 8",
    "optim was adamw_torch",
    "lr_scheduler_type was",
]
LINES += ["gradient_accumulation_steps was 1", "train_sampling_strategy was random", "matryoshka_dims was None"]
NO_EFFECT = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 9, "per_device_eval_batch_size": 3}
NO_EFFECT |= {"save_total_limit": 1, "report_to": "none", "metric_for_best_model": "recall@1", "max_steps": 9}

# name: (options before, changed options, messages)
OPTIONS = {
    "what the weights depend on": (
        {},
        CHANGED,
        [*LINES, "learning_rate was 2e-05", "temperature was None, is now 3.0"],
    ),
    "loss": ({}, {"loss": "bce"}, ["loss was None, is now bce"]),
    "what the weights do not depend on": ({}, NO_EFFECT, []),
    "best checkpoint": ({"do_eval": True}, BEST, ["load_best_model_at_end was False"]),
    "more epochs, evaluations that choose nothing, a part that measures": (
        {"max_steps": -1, "do_eval": True},
        {"num_train_epochs": 20.0, "eval_strategy": "steps", "eval_steps": 1, "do_predict": True},
        ["do_predict was False, is now True"],
    ),
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
    return run_fingerprint(*parts_of(**options))


def check(lines: list[str], expected: list[str]) -> None:
    """Checks that there is one line for each expected beginning, in any order."""
    assert len(lines) == len(expected), lines
    for beginning in expected:
        assert any(line.startswith(beginning) for line in lines), (beginning, lines)


@pytest.mark.parametrize("change", OPTIONS)
def test_a_changed_option(change):
    before, changed, expected = OPTIONS[change]
    check(changes(command(**before), command(**before | changed)), expected)


def test_a_change_of_what_the_process_sees():
    now = command()
    elsewhere = {"bf16": True, "precision": "bf16", "processes": 2, "format": 99, "versions": {"torch": "1.0"}}
    expected = ["precision was bf16", "processes was 2, is now 1", "format was 99"]
    check(changes(now | elsewhere | {"of_a_later_version": 1}, now), expected)


# ---- Content ----

REFERRING = {
    "data_dir": "rows",
    "eval_data_dir": "judged",
    "split_urls": "urls",
    "source_dir": "tree",
    "model_name_or_path": "encoder",
    "estimator_model": "teacher",
    "loss": "own_module:loss",
    "deepspeed": "zero.json",
}
# files: the messages of a folder
CONTENT = {
    ("rows/train.jsonl", "judged/test.jsonl", "urls/train.txt", "encoder/model.safetensors", "zero.json"): [
        "data_dir changed",
        "eval_data_dir changed",
        "split_urls changed",
        "model_name_or_path changed",
        "deepspeed changed",
    ],
    ("encoder/1_Pooling/config.json", "teacher/config.json"): [
        "model_name_or_path changed",
        "estimator_model changed",
    ],
    # The rows of a tree are compared once they are loaded, the user's own code is compared by name, and a run does not
    # read the other files.
    ("tree/a.py", "own_module.py", "encoder/README.md", "encoder/log.txt"): [],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with everything that options can refer to."""
    monkeypatch.chdir(tmp_path)
    for name in itertools.chain(*CONTENT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first = 1\n")
    return tmp_path


def referring(**options) -> dict:
    """Returns the fingerprint of a command whose options refer to all of this content."""
    options = REFERRING | options
    parts = parts_of(**{name: value for name, value in options.items() if name != "deepspeed"})
    parts[-1].deepspeed = options["deepspeed"]  # the constructor would start it
    return run_fingerprint(*parts)


@pytest.mark.parametrize("files", CONTENT, ids=" ".join)
def test_changed_content(files, folder):
    then = referring()
    for file in files:
        (folder / file).write_text("second = 2\n")
    check(changes(then, referring()), CONTENT[files])


def test_content_that_moved_is_the_same_and_no_path_is_stored(folder):
    then = referring()
    (folder / "rows").rename(folder / "moved")
    assert changes(then, referring(data_dir=str(folder / "moved"))) == []
    stored = json.dumps(
        referring(**{name: str(folder / value) for name, value in REFERRING.items() if name != "loss"})
    )
    assert str(folder) not in stored


def test_the_base_of_an_adapter_counts(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "encoder"}')
    then = command(model_name_or_path="adapter")
    assert changes(then, command(model_name_or_path="adapter")) == []
    (folder / "encoder" / "model.safetensors").write_text("second = 2")
    assert changes(then, command(model_name_or_path="adapter")) == ["model_name_or_path changed"]


def test_changed_rows(dataset):
    def found(**sizes):
        splits = {}
        for name in ("train", "test", "more"):
            splits[name] = Split.from_pairs(dataset.select(range(sizes.get(name, 9))))
        return {"the training rows": splits.pop("train").fingerprint(), "the rows to measure": splits_hash(splits)}

    for changed in ({"test": 8}, {"more": 8}):
        check(changes(found(), found(**changed)), ["the rows to measure changed"])
    check(changes(found(), found(train=8)), ["the training rows changed"])


def other_tokenizer(parts):
    tokenizer = copy.deepcopy(parts["processing_class"])
    tokenizer.backend_tokenizer.normalizer = None
    return {"processing_class": tokenizer}


def rows(name, *numbers):
    return lambda parts: {name: parts["train_dataset"].select(range(*numbers))}


def each(*changes):
    return lambda parts: {name: value for change in changes for name, value in change(parts).items()}


def shorter(parts):
    return {"encoder": parts["encoder"].replace(query_length=8)}


# name: (the change in the trainer, the messages)
LOADED = {
    "all": (
        each(rows("train_dataset", 20), shorter, other_tokenizer),
        ["the training rows changed", "the encoder's query_length", "the tokenizer changed"],
    ),
    "order of rows": (rows("train_dataset", 23, -1, -1), ["the training rows changed"]),
    "evaluation rows": (rows("eval_dataset", 9), ["the rows to measure changed"]),
}


@pytest.mark.parametrize("change", LOADED)
def test_a_change_of_what_a_trainer_has(change, trainer_of):
    changed, expected = LOADED[change]
    trainer = trainer_of()
    parts = {name: getattr(trainer, name) for name in ("model", "processing_class", "encoder", "train_dataset")}
    other = trainer_of(arguments=changed(parts))
    check(changes(fingerprint_of(trainer), fingerprint_of(other)), expected)


# ---- Objects from the user's code ----

OWN = """
class Estimator:
    def __init__(self, words):
        self.words = words

    def fit(self, split):
        pass

    def similarity(self, query_rows, code_rows):
        return (query_rows[:, None] == code_rows[None]).float()


def collate(features):
    return features
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module with these objects."""
    (tmp_path / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_module")
    del sys.modules["own_module"]


def with_own(make, **arguments):
    return lambda own: {
        "estimator": make(own),
        "arguments": {name: getattr(own, arguments[name]) for name in arguments},
    }


# name: (options, the trainer's arguments before and after, the messages of a resumed run)
OBJECTS = {
    "a setting of an estimator": (
        {},
        with_own(lambda own: BM25Estimator()),
        with_own(lambda own: BM25Estimator(k1=2.0)),
        ["the estimator's k1 was 1.2, is now 2.0"],
    ),
    "the user's own estimator and collator": (
        {},
        with_own(lambda own: BM25Estimator()),
        with_own(lambda own: own.Estimator([]), data_collator="collate"),
        [
            "the estimator was soft_trainer.estimators.bm25:BM25Estimator, is now own_module:Estimator",
            "the collator was None, is now own_module:collate",
            "estimator was ",
            # what the estimator decides
            "the criterion's alpha was 1.5",
            "the criterion's beta was 0.5",
        ],
    ),
    "a setting of the user's estimator": (
        {},
        with_own(lambda own: own.Estimator(["/home/me/a"])),
        with_own(lambda own: own.Estimator(["/home/me/b"])),
        [],
    ),
}


@pytest.mark.parametrize("change", OBJECTS)
def test_a_change_of_the_user_s_own_objects(change, own, trainer_of):
    options, before, after, expected = OBJECTS[change]
    then, now = (fingerprint_of(trainer_of(**options, **each(own))) for each in (before, after))
    check(changes(then, now), expected)


# ---- Lists of options ----


def test_every_option_in_a_list_exists_and_any_other_counts():
    listed = [*AFFECT_NOTHING, *option_specs(TrainingOptions)]
    fields = {field.name for field in dataclasses.fields(SoftInfoNCETrainingArguments)}
    assert len(listed) == len({*listed}) and {*listed} <= fields
    assert affects_results("weight_decay") and affects_results("of_a_later_version")


def test_an_unknown_option_counts_only_where_it_differs_from_its_default():
    parts = parts_of()
    plain = parts[-1].to_dict
    parts[-1].to_dict = lambda: plain() | {"of_a_later_version": None}
    assert changes(command(), run_fingerprint(*parts)) == []
    parts[-1].to_dict = lambda: plain() | {"of_a_later_version": 3}
    assert run_fingerprint(*parts)["of_a_later_version"] == 3


def test_defaults_are_not_stored():
    assert command().keys() <= {
        *("format", "processes", "precision", "versions", "language", "do_train", "max_steps"),
        "per_device_train_batch_size",
    }


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


def test_a_teacher_in_a_local_folder_is_compared_by_its_content(trainer_of, encoder_of, tmp_path):
    found = []
    for seed in (1, 1, 2):
        encoder = encoder_of(PROFILES["unixcoder"], seed)
        folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "teacher")
        trainer = trainer_of(estimator=TrainedModelEstimator(folder))
        found.append(fingerprint_of(trainer)["the estimator's model_name_or_path"])
    assert found[0] == found[1] != found[2]
