"""Everything that a run depends on, against everything that compares runs, as one table.

The caches of rows and embeddings have a table of their own in `test_readers.py`: what changed is made again there.
"""

import copy
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_file_location

import pytest
import torch
from git_repositories import Repository
from refusals import refused
from trainings import bm25, identity_of, initial

from soft_trainer.data.judgments import Split
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking
from soft_trainer.evaluation.results import save_ranks
from soft_trainer.files import IDENTITY, write_json
from soft_trainer.fingerprints import encoder_files_fingerprint
from soft_trainer.hub.push import _contents
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.run.folder import RunFolder
from soft_trainer.run.record import check_output_dir
from soft_trainer.studies import study as studies
from soft_trainer.studies.compare import ranks_of
from soft_trainer.studies.report import ReportedRun, compare_with
from soft_trainer.studies.study import PlannedRun, Study, plan, state_of
from soft_trainer.training import identity
from soft_trainer.training.checkpoints import identify, mark_complete
from soft_trainer.training.identity import launched_with, option_values, run_identity, started

KINDS = (ModelArguments, DataArguments, SoftInfoNCETrainingArguments)
FILES = {
    "table_loss.py": "import table_helper\ndef plain(scores, positives, negatives):\n    return scores.mean()\n",
    "table_package/__init__.py": "",
    "table_package/inner.py": "class Own:\n    alpha = beta = temperature = 1.0\n",
}
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


@dataclass(frozen=True)
class Change:
    """A change, and how each reader names it. None: the change is free.

    Args:
        early: the line of the check of an output folder and of a study, which both ask before anything is loaded.
        resume: the beginning of the line of a training that resumes from a checkpoint.
        options: the options that change.
        file: the file whose content changes.
        trainer: returns the trainer's arguments that change, from those that it has.
        study: a study's line, where it differs. By default, an option that was not given is new.
    """

    early: str | None
    resume: str | None
    options: Mapping = field(default_factory=dict)
    file: str = ""
    trainer: Callable[[dict], dict] | None = None
    study: str | None = ""


def option(name: str, value, resume: str | None = "", **more) -> Change:
    """Returns the change of an option that affects results."""
    return Change(f"{name} was ", f"{name} was " if resume == "" else resume, {name: value}, **more)


def harmless(name: str, value) -> Change:
    """Returns the change of an option that affects no result."""
    return Change(None, None, {name: value}, study=None)


def content(file: str, name: str, resume: str | None = "", trainer=None) -> Change:
    """Returns the change of a file that an option refers to."""
    line = f"the content of {name} changed"
    return Change(line, line if resume == "" else resume, file=file, trainer=trainer, study=line)


def other_rows(parts: dict) -> dict:
    return {"train_dataset": parts["train_dataset"].select(range(20))}


def other_profile(**changes):
    return lambda parts: {"encoder": parts["encoder"].replace(**changes)}


def other_tokenizer(parts: dict) -> dict:
    tokenizer = copy.deepcopy(parts["processing_class"])
    tokenizer.add_tokens(["another"])
    return {"processing_class": tokenizer}


def other_weights(parts: dict) -> dict:
    model = copy.deepcopy(parts["model"])
    model.embeddings.word_embeddings.weight.data[0, 0] += 1
    return {"model": model}


def other_dropout(parts: dict) -> dict:
    model = copy.deepcopy(parts["model"])
    model.config.hidden_dropout_prob = 0.5
    return {"model": model}


def frozen(parts: dict) -> dict:
    model = copy.deepcopy(parts["model"])
    model.embeddings.requires_grad_(False)
    return {"model": model}


def adapter(parts: dict) -> dict:
    model = copy.deepcopy(parts["model"])
    model.config._name_or_path = "encoder"
    add_lora(model, ModelArguments(lora_r=4))
    return {"model": model}


def other_estimator(parts: dict) -> dict:
    return {"estimator": initial()}


def encoded_by_another(parts: dict) -> dict:
    parts["estimator"].encoder_identity = "of another encoder"
    return {}


BEST = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
TABLE = {
    # Options that change results
    "loss": option("loss", "bce", "the objective's loss was soft_info_nce, is bce"),
    "alpha": option("alpha", 2.0, "the objective's alpha was"),
    "temperature": option("temperature", 0.5, "the objective's temperature was"),
    "floor": option("floor", 0.2, "the objective's floor was"),
    "weighting": option("weighting", "positive_aware", "the objective's weighting was"),
    "cancellation": option("cancel", "top_k", "the objective's cancel was"),
    "teacher in the loss": option("distill_weight", 0.5, "the objective's distill_weight was"),
    "estimator": option("estimator", "initial_model", "the estimator was", trainer=other_estimator),
    "sampling": option("train_sampling_strategy", "no_duplicates"),
    "duplicates": option("duplicates", "ignore"),
    "own negatives": option("negatives_per_query", 2),
    "gathering": option("gather_negatives", False),
    "dimensions": option("matryoshka_dims", "32,16"),
    "number of rows": option("max_train_rows", 5, "the training rows changed", trainer=other_rows),
    "filters": option("filters", "graphcodebert", "the training rows changed", trainer=other_rows),
    "dropped rows": option("drop_unusable", True, "the training rows changed", trainer=other_rows),
    "language": option("language", "go", "the training rows changed", trainer=other_rows),
    "pooling": option("pooling", "cls", "the encoder's pooling was", trainer=other_profile(pooling="cls")),
    "length": option("query_length", 8, "the encoder's query_length was", trainer=other_profile(query_length=8)),
    "adapter": option("lora_r", 4, "the adapter's r was None, is 4", trainer=adapter),
    "seed": option("seed", 7),
    "learning rate": option("learning_rate", 1e-3),
    "batch": option("per_device_train_batch_size", 7),
    "accumulation": option("gradient_accumulation_steps", 2),
    "optimizer": option("optim", "sgd"),
    "merging": option("merge_ratio", 0.5),
    "precision": option("bf16", True),
    "batch that fits": option("auto_find_batch_size", True),
    # A longer training
    "steps": option("max_steps", 9, None),
    "epochs": option("num_train_epochs", 2.0, None),
    "best checkpoint of evaluations that begin": Change("load_best_model_at_end was ", "the evaluation rows", BEST),
    # Options that change none
    "examples": harmless("examples", 1),
    "lexical BM25": harmless("lexical", False),
    "model card": harmless("model_card", False),
    "evaluation batch": harmless("per_device_eval_batch_size", 3),
    "logging": harmless("logging_steps", 9),
    "saving": harmless("save_total_limit", 1),
    "progress bars": harmless("disable_tqdm", True),
    # Content that options refer to
    "rows": content("rows/train.jsonl", "data_dir", "the training rows changed", other_rows),
    "evaluation rows": content("judged/test.jsonl", "eval_data_dir", None),
    "mined tree": content("tree/a.py", "source_dir", "the training rows changed", other_rows),
    "another tree": content("extra/b.py", "extra_source_dir", "the training rows changed", other_rows),
    "lists of urls": content("urls/train.txt", "split_urls", "the training rows changed", other_rows),
    "weights": content("encoder/model.safetensors", "model_name_or_path", None, other_weights),
    "frozen weights": content(
        "encoder/config.json", "model_name_or_path", "the encoder's configuration or frozen weights changed", frozen
    ),
    "dropout": content(
        "encoder/config.json", "model_name_or_path", "the encoder's configuration or frozen weights", other_dropout
    ),
    "tokenizer": content("encoder/tokenizer.json", "model_name_or_path", "the tokenizer changed", other_tokenizer),
    "saved pooling": content(
        "encoder/1_Pooling/config.json",
        "model_name_or_path",
        "the encoder's pooling was",
        other_profile(pooling="cls"),
    ),
    "estimator's encoder": content(
        "teacher/config.json", "estimator_model", "the estimator's encoder was", encoded_by_another
    ),
    "own loss": content("table_loss.py", "loss"),
    "a helper of it": content("table_helper.py", "loss"),
    "own estimator": content("table_package/inner.py", "estimator"),
    "history": content("history", "history", "the training rows changed", other_rows),
    # Files that nothing reads
    "card of the encoder": Change(None, None, file="encoder/README.md", study=None),
    "log beside the encoder": Change(None, None, file="encoder/log.txt", study=None),
    "another kind of file": Change(None, None, file="tree/notes.txt", study=None),
    "hidden file": Change(None, None, file="tree/.hidden/c.py", study=None),
    "what runs write": Change(None, None, file="tree/out/mine.py", study=None),
    "another module": Change(None, None, file="other.py", study=None),
}
# What is stored of one group, and the line that then says what it is now. None: the change is free.
ELSEWHERE = {
    "processes": ("start", {"processes": 2}, "processes was 2, is 1"),
    "precision of the launcher": ("start", {"mixed_precision": "bf16"}, "mixed_precision"),
    "format": ("start", {"format": 99}, f"format was 99, is {identity.FORMAT}"),
    "library": ("versions", {"torch": "1.0"}, None),
    "python": ("versions", {"python": "3.99"}, None),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with all that options can refer to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in {*FILES, "table_helper.py", *(change.file for change in TABLE.values())} - {"", "history"}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES.get(name, "first = 1\n"))
    Repository(tmp_path / "history").commit("add a", {"a.py": "def a():\n    return 1\n"})
    return tmp_path


def change_content(place, file: str) -> None:
    if file == "history":
        Repository(place / file).commit("amended", {"a.py": "def a():\n    return 2\n"})
    elif file:
        with (place / file).open("a") as written:
            written.write("second = 2\n")


# ---- The readers ----


def parts_of(options: Mapping) -> list:
    """Returns the options of a run as its classes."""
    given = {"language": "python", "output_dir": "tree/out", "use_cpu": True, "report_to": "none", **options}
    parts = []
    for kind in KINDS:
        parts.append(kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__}))
    return parts


class OutputFolder:
    """The check of an output folder that has the results of a run."""

    def __init__(self, place, trainer_of):
        self.stored = place / "tree" / "out" / "run.json"
        self.stored.parent.mkdir(parents=True, exist_ok=True)

    def store(self, options: Mapping, change: Callable) -> None:
        parts = parts_of(options)
        write_json(self.stored, {IDENTITY: run_identity(option_values(*parts), started(parts[-1]), "tree/out")})

    def lines(self, options: Mapping, change: Callable) -> str:
        try:
            check_output_dir(*parts_of(options))
        except UserError as error:
            return str(error).split("contains another run (")[1]
        return ""


class Cell:
    """A study with a finished run."""

    def __init__(self, place, trainer_of):
        self.root = place / "tree" / "out"
        self.stored = self.root / "a" / "1" / "study.json"

    def _run(self, options: Mapping) -> tuple[Study, PlannedRun]:
        run = PlannedRun("a/1", options)
        return Study(self.root, "accelerate launch", (run,)), run

    def store(self, options: Mapping, change: Callable) -> None:
        study, run = self._run(options)
        study.folder(run).mkdir(parents=True)
        write_json(study.folder(run) / "study.json", studies.identity_of(study, run))
        write_json(study.folder(run) / "run.json", {"training": {}})
        assert state_of(study, run) == ("done", [])

    def lines(self, options: Mapping, change: Callable) -> str:
        study, run = self._run(options)
        state, lines = state_of(study, run)
        assert state == ("changed" if lines else "done")
        return "; ".join(lines)


class Resume:
    """A training that resumes from a checkpoint."""

    def __init__(self, place, trainer_of):
        self.checkpoint = place / "checkpoint-1"
        self.stored = self.checkpoint / "complete.json"
        self.trainer_of = trainer_of

    def _trainer(self, options: Mapping, change: Callable | None):
        names = SoftInfoNCETrainingArguments.__dataclass_fields__
        given = {name: value for name, value in options.items() if name in names}
        estimator = bm25()
        if options.get("estimator") == REFERRING["estimator"]:
            estimator = importlib.import_module("table_package.inner").Own()
        plain = self.trainer_of(estimator=estimator, **given)
        if change is None:
            return plain
        parts = {"model": plain.model, "processing_class": plain.processing_class, "encoder": plain.encoder}
        changed = change(parts | {"train_dataset": plain.train_dataset, "estimator": estimator})
        estimator = changed.pop("estimator", estimator)
        return self.trainer_of(estimator=estimator, arguments=changed, **given)

    def store(self, options: Mapping, change: Callable | None) -> None:
        self.checkpoint.mkdir()
        mark_complete(self.checkpoint, identity_of(self._trainer(options, None)))

    def lines(self, options: Mapping, change: Callable | None) -> str:
        trainer = self._trainer(options, change)
        trainer._checkpoint = None
        trainer._keep_weights()
        try:
            identify(trainer.describe_identity, str(self.checkpoint))
            identify(lambda: identity.fitted(trainer.estimator), str(self.checkpoint))
        except UserError as error:
            return str(error).partition(": ")[2].partition(". A training continues")[0]
        return ""


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("reader", [OutputFolder, Cell, Resume])
def test_a_reader_names_what_changed(reader, name, place, trainer_of):
    change = TABLE[name]
    plain = REFERRING if change.file else {"language": "python"}
    asked = reader(place, trainer_of)
    asked.store(plain, None)
    change_content(place, change.file)
    lines = asked.lines({**plain, **change.options}, change.trainer)
    expected = {OutputFolder: change.early, Cell: change.study, Resume: change.resume}[reader]
    if expected == "":
        known = next(iter(change.options)) in plain
        expected = change.early if known else f"{next(iter(change.options))} is new or gone"
    if expected is None:
        assert lines == ""
    else:
        assert expected in lines


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("reader", [OutputFolder, Cell, Resume])
def test_a_reader_names_what_differed_elsewhere(reader, name, place, trainer_of, capsys):
    group, changed, expected = ELSEWHERE[name]
    asked = reader(place, trainer_of)
    asked.store({}, None)
    path = asked.stored
    stored = json.loads(path.read_text())
    stored.get(IDENTITY, stored)[group].update(changed)
    path.write_text(json.dumps(stored))
    if expected is not None:
        assert expected in asked.lines({}, None)
    elif reader is Cell:
        assert state_of(*asked._run({}))[0] == "done"
        assert f"{next(iter(changed))} was " in plan(asked._run({})[0])
    else:
        assert asked.lines({}, None) == ""
        named = f"{next(iter(changed))} was " in capsys.readouterr().err
        assert named == (reader is Resume)


def test_every_free_name_has_its_reason():
    for reader in (identity.OUTPUT_FOLDER, identity.STUDY, identity.RESUME):
        assert all(len(reason.split()) > 3 for reason in reader.values())
        assert reader.keys() <= identity.result_options() | {"versions"}


def test_the_content_of_a_configuration_of_transformers_counts(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text("{}")
    before = identity.content({"deepspeed": str(path)})
    path.write_text('{"fp16": true}')
    assert identity.content({"deepspeed": str(path)}) != before


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


def test_a_repository_without_a_commit_has_no_content(tmp_path):
    Repository(tmp_path / "empty")
    assert identity.content({"history": str(tmp_path / "empty")}) == {}


class OfAnEditableInstallation(MetaPathFinder):
    def __init__(self, path):
        self.path = path

    def find_spec(self, fullname, path=None, target=None):
        return spec_from_file_location(fullname, self.path) if fullname == "table_editable" else None


def test_own_code_counts_that_only_a_finder_finds(tmp_path, monkeypatch):
    module = tmp_path / "elsewhere.py"
    module.write_text("def plain(scores):\n    return scores.mean()\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, OfAnEditableInstallation(module)])
    before = identity.content({"loss": "table_editable:plain"})
    module.write_text("def plain(scores):\n    return 2 * scores.mean()\n")
    assert before and identity.content({"loss": "table_editable:plain"}) != before


def test_content_that_moved_is_the_same(place):
    """A name is no content. The option itself has changed, and says so."""
    before = identity.content(REFERRING)
    (place / "rows").rename(place / "moved")
    assert identity.content(REFERRING | {"data_dir": "moved"}) == before


SAME_LAUNCHERS = [
    "accelerate launch --num_processes 2 --mixed_precision bf16",
    "accelerate launch --mixed-precision=bf16 --num-processes=2",
    "accelerate  launch  --num_processes 2 --mixed_precision bf16 --main_process_port 29501",
]


@pytest.mark.parametrize("launcher", SAME_LAUNCHERS)
def test_the_spelling_of_a_launcher_does_not_count(launcher):
    assert launched_with(launcher) == launched_with(SAME_LAUNCHERS[0])


def test_the_number_of_processes_of_a_launcher_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "default_config_file", str(tmp_path / "default.yaml"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert launched_with("accelerate launch") == launched_with("accelerate launch --num_processes 1")
    assert launched_with("torchrun --nproc-per-node 4")["processes"] == "4"
    assert launched_with("mpirun -np 3 python")["processes"] == "3"
    assert launched_with("torchrun --nproc_per_node gpu")["processes"] == "gpu"
    assert launched_with("env A=1 accelerate launch --num_processes=2")["processes"] == "2"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert launched_with("accelerate launch")["processes"] == "8"
    assert launched_with("python -m accelerate.commands.launch")["processes"] == "8"
    (tmp_path / "default.yaml").write_text("num_processes: 5\n")
    before = launched_with("accelerate launch")
    assert before["processes"] == "5"
    (tmp_path / "default.yaml").write_text("num_processes: 5\nmixed_precision: bf16\n")
    assert launched_with("accelerate launch") != before


# ---- Ranks, and the encoder that made them ----

# What changes in the folder of a run, and whether its ranks are then those of another encoder.
BESIDE_RANKS = {
    "model.safetensors": True,
    "config.json": True,
    "tokenizer.json": True,
    "1_Pooling/config.json": True,
    "soft_trainer.json": True,
    "README.md": False,
    "log.txt": False,
    "trainer_state.json": False,
}


@pytest.fixture
def ranked(encoder_dir, dataset, tmp_path):
    """The folder of a run, with its encoder and the ranks that it made."""
    folder = tmp_path / "ranked"
    shutil.copytree(encoder_dir, folder)
    files = RunFolder(tmp_path / "ranked")
    files._before = {}
    (folder / "README.md").write_text("# Card\n")
    (folder / "trainer_state.json").write_text("{}")
    split = Split.from_pairs(dataset)
    ranking = Ranking(torch.ones(24, dtype=torch.long), torch.zeros(24, 3, dtype=torch.long), torch.ones(24, 3))
    for system in ("trained", "lexical"):
        encoder = folder if system == "trained" else None
        path = folder / f"ranks-test-{system}.parquet"
        save_ranks(path, split, ranking, ("docstring",), ("code",), encoder=encoder)
    write_json(folder / "run.json", files.record({}))
    return folder


@pytest.mark.parametrize("file", BESIDE_RANKS)
def test_ranks_of_another_encoder_are_refused_and_a_push_names_it(file, ranked, caplog):
    ranks_of(ranked, "test")
    with (ranked / file).open("a") as written:
        written.write(" ")
    ranks_of(ranked, "test", "lexical")
    _contents(ranked, "ann/encoder", None, "model")
    assert ("changed since the run" in caplog.text and file in caplog.text) == BESIDE_RANKS[file]
    if BESIDE_RANKS[file]:
        with refused(f"the encoder in {ranked} has changed since these ranks were made: evaluate again"):
            ranks_of(ranked, "test")
        with refused("has changed since these ranks were made"):
            ranks_of(ranked / "ranks-test-trained.parquet", "test")
    else:
        ranks_of(ranked, "test")


def test_a_report_names_ranks_of_another_encoder(ranked, tmp_path):
    shutil.copytree(ranked, tmp_path / "baseline")
    methods = {}
    for folder in (tmp_path / "baseline", ranked):
        methods[folder.name] = [ReportedRun(folder, folder.name, 1, {"results": {"test": {}}}, [])]
    (differences, problems) = compare_with("baseline", methods, "test")
    assert len(differences) == 1 and not problems
    (ranked / "model.safetensors").write_text("of another training")
    (differences, problems) = compare_with("baseline", methods, "test")
    assert not differences and "has changed since these ranks were made" in problems[0]


def test_ranks_outlive_their_encoder_and_name_one_elsewhere(ranked, dataset, tmp_path, capsys):
    measured = tmp_path / "measured"
    measured.mkdir()
    ranking = Ranking(torch.ones(24, dtype=torch.long), torch.zeros(24, 3, dtype=torch.long), torch.ones(24, 3))
    path = measured / "ranks-test-untrained.parquet"
    save_ranks(path, Split.from_pairs(dataset), ranking, ("docstring",), ("code",), encoder=ranked)
    ranks_of(measured, "test", "untrained")
    assert capsys.readouterr().err == ""
    (ranked / "model.safetensors").write_text("of another training")
    ranks_of(measured, "test", "untrained")
    assert f"the encoder in {ranked} has changed since" in capsys.readouterr().err
    for path in ranked.rglob("*"):
        if path.is_file() and path.suffix != ".parquet" and path.name != "run.json":
            path.unlink()
    ranks_of(ranked, "test")
