"""All that a run depends on, against its readers: a change is refused by name, or it may change for a reason."""

import pytest
from git_repositories import Repository

from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.identity import changes, run_identity
from soft_trainer.studies.study import PlannedRun, Study, settings_of

KINDS = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
# Options that change results: refused by name, by a study and by the check of an output folder.
OPTIONS = {
    "loss": "bce",
    "alpha": 2.0,
    "temperature": 0.5,
    "floor": 0.2,
    "weighting": "positive_aware",
    "cancel": "top_k",
    "distill_weight": 0.5,
    "estimator": "initial_model",
    "train_sampling_strategy": "no_duplicates",
    "duplicates": "ignore",
    "negatives_per_query": 2,
    "gather_negatives": False,
    "matryoshka_dims": "32,16",
    "max_train_rows": 5,
    "filters": "graphcodebert",
    "drop_unusable": True,
    "language": "go",
    "pooling": "cls",
    "query_length": 8,
    "lora_r": 4,
    "seed": 7,
    "learning_rate": 1e-3,
    "num_train_epochs": 2.0,
    "max_steps": 9,
    "per_device_train_batch_size": 7,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "merge_ratio": 0.5,
}
# Options that change no result. A study says that they changed, because it makes what it was asked to make.
HARMLESS = {"examples": 1, "lexical": False, "model_card": False, "per_device_eval_batch_size": 3, "logging_steps": 9}
# Files whose content changes although no option does, and the name that is refused.
CONTENT = {
    "rows/train.jsonl": "the content of data_dir",
    "judged/test.jsonl": "the content of eval_data_dir",
    "tree/a.py": "the content of source_dir",
    "extra/b.py": "the content of extra_source_dir",
    "urls/train.txt": "the content of split_urls",
    "encoder/model.safetensors": "the content of model_name_or_path",
    "encoder/tokenizer.json": "the content of model_name_or_path",
    "encoder/1_Pooling/config.json": "the content of model_name_or_path",
    "teacher/config.json": "the content of estimator_model",
    "table_loss.py": "the content of loss",
    "table_helper.py": "the content of loss",
    "table_package/inner.py": "the content of estimator",
}
# Files on which no result depends.
UNREAD = (
    "encoder/README.md",
    "encoder/log.txt",
    "tree/notes.txt",
    "tree/.hidden/c.py",
    "tree/out/mine.py",
    "other.py",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with all that options can refer to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (*CONTENT, *UNREAD, "table_package/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import table_helper\n" if name == "table_loss.py" else "first = 1\n")
    Repository(tmp_path / "history").commit("add a", {"a.py": "def a():\n    return 1\n"})
    return tmp_path


REFERRING = {
    "data_dir": "rows",
    "eval_data_dir": "judged",
    "source_dir": "tree",
    "extra_source_dir": "extra",
    "split_urls": "urls",
    "history": "history",
    "model_name_or_path": "encoder",
    "estimator_model": "teacher",
    "loss": "table_loss:plain",
    "estimator": "table_package.inner:Own",
}


def of_folder(options: dict) -> dict:
    """Returns the identity with which a run checks its output folder."""
    given = {"language": "python", "output_dir": "tree/out", "use_cpu": True, "report_to": "none", **options}
    parts = []
    for kind in KINDS:
        parts.append(kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__}))
    return run_identity(*parts)


def of_study(options: dict, place, launcher: str = "accelerate launch") -> dict:
    """Returns the identity of a study's cell."""
    return settings_of(Study(place / "tree" / "out", launcher, ()), PlannedRun("a/1", options))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_changes_results_is_named(name, place):
    plain = {"loss": "soft_info_nce", "language": "python"}
    changed = plain | {name: OPTIONS[name]}
    assert any(line.startswith(f"{name} was ") for line in changes(of_folder(plain), of_folder(changed)))
    found = changes(of_study(plain, place), of_study(changed, place))
    assert [line.split(" ")[0] for line in found] == [name]


@pytest.mark.parametrize("name", HARMLESS)
def test_an_option_that_changes_none_may_change_for_a_folder(name, place):
    assert changes(of_folder({}), of_folder({name: HARMLESS[name]})) == []
    assert changes(of_study({}, place), of_study({name: HARMLESS[name]}, place)) == [f"{name} is new or gone"]


@pytest.mark.parametrize("file", CONTENT)
def test_changed_content_is_named(file, place):
    before = of_folder(REFERRING), of_study(REFERRING, place)
    (place / file).write_text("import table_helper\nsecond = 2\n")
    after = of_folder(REFERRING), of_study(REFERRING, place)
    for then, now in zip(before, after, strict=True):
        assert changes(then, now) == [f"{CONTENT[file]} changed"]


def test_an_amended_commit_is_named(place):
    before = of_folder(REFERRING), of_study(REFERRING, place)
    Repository(place / "history").commit("amended", {"a.py": "def a():\n    return 2\n"})
    after = of_folder(REFERRING), of_study(REFERRING, place)
    for then, now in zip(before, after, strict=True):
        assert changes(then, now) == ["the content of history changed"]


def test_processes_are_named(place):
    before = of_folder({})
    assert changes(before, before | {"processes": 2}) == ["processes was 1, is 2"]
    (line,) = changes(of_study({}, place), of_study({}, place, "accelerate launch --num_processes 2"))
    assert line.startswith("launcher was accelerate launch, is accelerate launch --num_processes 2")


@pytest.mark.parametrize("file", UNREAD)
def test_files_that_nothing_reads_may_change(file, place):
    before = of_folder(REFERRING), of_study(REFERRING, place)
    (place / file).write_text("second = 2\n")
    assert before == (of_folder(REFERRING), of_study(REFERRING, place))


def test_content_that_moved_is_the_same(place):
    """A name is no content. The option itself has changed, and says so."""
    before = of_folder(REFERRING)
    (place / "rows").rename(place / "moved")
    assert changes(before, of_folder(REFERRING | {"data_dir": "moved"})) == ["data_dir was rows, is moved"]
