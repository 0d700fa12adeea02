"""Shared fixtures that need no network: 24 real pairs, a tokenizer trained on them, a RoBERTa with 32 dimensions."""

import copy
import gc
import gzip
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest's workers and the processes that tests start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test starts several threads all the same, those that wait would otherwise keep a core busy.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Keep caches out of the home folder.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="soft_trainer-tests-")
os.environ["HF_DATASETS_CACHE"] = os.environ["HF_HOME"] + "/datasets"

import forked
import pytest

gc.disable()  # until the tests are collected: imports make a million objects that live as long as the process

# A shell starts background jobs with SIGINT ignored, and the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"

PAIRS = [
    ("sort a list with quick sort", "def quick_sort(xs): return [] if not xs else quick_sort(lower(xs)) + xs[:1]"),
    ("sort a list with bubble sort", "def bubble_sort(xs): [swap(xs, i) for i in range(len(xs))]"),
    ("write text to a file", "def write_text(path, text): open(path, 'w').write(text)"),
    ("read all lines of a file", "def read_lines(path): return open(path).readlines()"),
    ("remove a file if it exists", "def remove(path): os.path.exists(path) and os.remove(path)"),
    ("reverse a string", "def reverse(text): return text[::-1]"),
    ("count the words of a text", "def count_words(text): return Counter(text.split())"),
    ("parse an ISO date", "def parse_date(text): return datetime.fromisoformat(text)"),
    ("open a connection to a server", "def connect(host, port): return socket.create_connection((host, port))"),
    ("close the connection", "def close(self): self.connection.close()"),
    ("compute the mean of numbers", "def mean(numbers): return sum(numbers) / len(numbers)"),
    ("compute the variance of numbers", "def variance(xs): return sum((x - mean(xs)) ** 2 for x in xs) / len(xs)"),
    ("encode an object as JSON", "def to_json(value): return json.dumps(value)"),
    ("decode a JSON document", "def from_json(text): return json.loads(text)"),
    ("join paths and normalise them", "def join(*parts): return os.path.normpath(os.path.join(*parts))"),
    ("list the files of a folder", "def files(folder): return [p for p in os.listdir(folder)]"),
    ("send an email message", "def send(message): smtp.send_message(message)"),
    ("hash a password with salt", "def hash_password(word, salt): return sha256(salt + word).hexdigest()"),
    ("draw a random number", "def draw(low, high): return random.uniform(low, high)"),
    ("split a text at commas", "def split(text): return text.split(',')"),
    ("find the largest element", "def largest(xs): return max(xs)"),
    ("flatten a nested list", "def flatten(xs): return [y for x in xs for y in x]"),
    ("merge two dictionaries", "def merge(a, b): return {**a, **b}"),
    ("sleep for some seconds", "def pause(seconds): time.sleep(seconds)"),
]


def pytest_xdist_auto_num_workers(config) -> int:
    """Distributes the whole suite over the cores. Files and tests selected by name run in this process."""
    whole = config.args_source is config.ArgsSource.TESTPATHS
    return min(os.cpu_count() or 1, 4) if whole else 0


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def make_row(query: str, code: str, number: int) -> dict:
    """Makes one row with CodeSearchNet's columns."""
    return {
        "repo": "someone/something",
        "path": f"module_{number}.py",
        "func_name": code.split("(")[0].removeprefix("def "),
        "original_string": code,
        "language": "python",
        "code": code,
        "code_tokens": code.split(),
        "docstring": query,
        "docstring_tokens": query.split(),
        "url": f"https://example.org/module_{number}.py#L1",
        "partition": "train",
    }


@pytest.fixture(scope="session", autouse=True)
def in_float32():
    """Runs all tests in float32, except tests of precision, which say what the processor can do."""
    importlib.import_module("without_bf16")


@pytest.fixture(scope="session")
def rows() -> list[dict]:
    return [make_row(query, code, number) for number, (query, code) in enumerate(PAIRS)]


@pytest.fixture(scope="session")
def dataset(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.fixture(scope="session")
def profile():
    from soft_trainer.encoders.profiles import EncoderProfile

    return EncoderProfile(query_length=16, code_length=32, score_function="cosine", score_scale=20.0)


@pytest.fixture(scope="session")
def tokenizer(rows, profile):
    from soft_trainer.encoders.scratch import train_tokenizer

    return train_tokenizer((text for row in rows for text in (row["docstring"], row["code"])), profile, 500)


@pytest.fixture(scope="session")
def _model(tokenizer, profile):
    # Imported here, since the process that only hands out the tests need not wait for torch.
    import torch

    from soft_trainer.encoders.scratch import random_model

    torch.manual_seed(0)
    return random_model("32x2", tokenizer, profile)


@pytest.fixture
def model(_model):
    """A fresh copy of the tiny encoder."""
    return copy.deepcopy(_model)


@pytest.fixture(scope="session")
def encoder_dir(_model, tokenizer, profile, tmp_path_factory):
    """A folder with the tiny encoder, saved like a run's output."""
    from soft_trainer.encoders.export import export_encoder

    return export_encoder(copy.deepcopy(_model), tokenizer, profile, tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture(scope="session")
def data_dir(rows, tmp_path_factory):
    """A folder with the pairs in GraphCodeBERT's layout: 16 in train, 4 in valid, 4 in test, all in the codebase."""
    folder = tmp_path_factory.mktemp("data")
    splits = {"train": rows[:16], "valid": rows[16:20], "test": rows[20:], "codebase": rows}
    for split, chosen in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return folder


@pytest.fixture(scope="session")
def script_module():
    """The script `run_codesearch.py`, imported as a module."""
    spec = importlib.util.spec_from_file_location("run_codesearch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(script_module, monkeypatch, tmp_path, capsys):
    """Returns a function that runs the script in this process, in an empty folder.

    The function returns the exit code and the lines on standard error.
    """
    from soft_trainer.options.parse import as_argv

    monkeypatch.chdir(tmp_path)

    def run(**options) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *as_argv(options)])
        code = 0
        try:
            with script_module.exit_on_user_error():
                script_module.main()
        except SystemExit as exit:
            code = exit.code
        return code, capsys.readouterr().err.splitlines()

    return run


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Returns a function that runs a script as one process, or as several processes of one training run.

    After `timeout` seconds, it ends all processes, because a process that waits for another one would wait forever.
    """

    def run(argv: list, processes: int, timeout: float, each=lambda rank: {}, **environment) -> list[str]:
        logs = [tmp_path_factory.mktemp("launched") / "log" for _ in range(processes)]
        started = forked.start_training(argv, logs, each, **environment)
        end = time.monotonic() + timeout
        try:
            for process in started:
                process.join(max(end - time.monotonic(), 0.1))
        finally:
            for process in started:
                process.kill()
                process.join()
        said, codes = [log.read_text() for log in logs], [process.exitcode for process in started]
        assert codes == [0] * processes, f"exit codes {codes}:\n" + "\n----\n".join(text[-3000:] for text in said)
        return said

    return run


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Gives each test a separate `datasets` cache, outside the home folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write_folder(rows, tmp_path):
    """Returns a function that writes a folder in GraphCodeBERT's layout.

    By default, train has 8 rows, valid 2, test 2, and the codebase the last four rows. `changed` replaces the rows of
    a split; a string is written unchanged.
    """

    from soft_trainer.data.folders import SPLITS

    def write(compressed: bool = False, **changed):
        usual = {"train": rows[:8], "valid": rows[8:10], "test": rows[10:12], "codebase": rows[8:12]}
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        for split in SPLITS:
            content = changed.get(split, usual[split])
            if not isinstance(content, str):
                content = "".join(json.dumps(row) + "\n" for row in content)
            if compressed:
                (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
            else:
                (folder / f"{split}.jsonl").write_text(content)
        return folder

    return write


UNSET = object()


@pytest.fixture
def trainer_of(model, dataset, tokenizer, profile, tmp_path):
    """Returns a function that makes a trainer from training arguments (keywords) and the trainer's `arguments`.

    With `plain`, it uses `TrainingArguments`. Without `estimator`, the trainer has no estimator.
    """

    # Imported here, since the process that only hands out the tests need not wait for torch.
    from transformers import TrainingArguments

    from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments

    def make(plain=False, estimator=UNSET, arguments=None, kind=None, **options):
        settings = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 8,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        args = (TrainingArguments if plain else SoftInfoNCETrainingArguments)(**settings | options)
        if estimator is None and not plain:
            args.estimator = "none"
        estimator = BM25Estimator() if estimator is UNSET else estimator
        given = {
            "model": model,
            "args": args,
            "train_dataset": dataset,
            "eval_dataset": dataset,
            "codebase": dataset,
            "processing_class": tokenizer,
            "encoder": profile,
            "callbacks": [EstimatorCallback(estimator)] if estimator else [],
        }
        return (kind or SoftInfoNCETrainer)(**given | (arguments or {}))

    return make


@pytest.fixture
def train(trainer_of):
    """Returns a function that makes a trainer like `trainer_of`, trains, and returns the trainer."""

    def run(**options):
        trainer = trainer_of(**options)
        trainer.train()
        return trainer

    return run


def published_tokenizer(texts):
    """Makes a tokenizer like UniXcoder's: no text is tokenised to the vocabulary's entry `<encoder-only>`."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizer

    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=special, show_progress=False)
    parts = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in parts["merges"]]
    return RobertaTokenizer(vocab=parts["vocab"] | {"<encoder-only>": len(parts["vocab"])}, merges=merges)


@pytest.fixture
def encoder_of(rows):
    """Returns a function that makes a tiny encoder with random weights from a profile."""
    import torch

    from soft_trainer.encoders.encoding import Encoder
    from soft_trainer.encoders.loading import prepare_tokenizer
    from soft_trainer.encoders.scratch import random_model

    def make(profile, seed=0):
        tokenizer = published_tokenizer(text for row in rows for text in (row["docstring"], row["code"]))
        prepare_tokenizer(tokenizer, profile)
        torch.manual_seed(seed)
        return Encoder(random_model("32x2", tokenizer, profile).eval(), tokenizer, profile)

    return make
