import json

import pytest

from soft_trainer.data.folders import list_files
from soft_trainer.data.layouts import COSQA
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data

CODES = {f"def f{number}(x):\n    return x + {number}": number + 10 for number in range(5)}


def entry(number: int, **values) -> dict:
    return {"doc": f"add {number} to x", "retrieval_idx": number + 10, **values}


@pytest.fixture
def cosqa(tmp_path):
    folder = tmp_path / "cosqa"
    folder.mkdir()
    files = {
        "code_idx_map.txt": CODES,
        "cosqa-retrieval-train-4.json": [entry(3, label=1), entry(0, label=0), entry(1, label=1), entry(3, label=1)],
        "cosqa-retrieval-dev-1.json": [entry(2)],
        "cosqa-retrieval-test-2.json": [entry(4), entry(4)],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_cosqa_is_the_rows_of_a_run(cosqa):
    assert COSQA.finds(list_files(cosqa)) and not COSQA.finds(list_files(cosqa.parent))
    data = load_data(DataArguments(data_dir=str(cosqa)), EncoderProfile())
    train = data["train"]
    assert train.queries["docstring"][:] == ["add 3 to x", "add 1 to x", "add 3 to x"]
    # Train's corpus has only judged codes, and a code may be relevant to several queries.
    assert train.corpus["url"][:] == ["11", "13"]
    assert train.judgments.pairs().tolist() == [[0, 1], [1, 0], [2, 1]]
    assert train.to_pairs()["code"][0].endswith("+ 3")
    test = data["test"]
    assert len(test.queries) == 2 and len(test.corpus) == 5
    assert test.judgments.relevant.nonzero()[1].tolist() == [4, 4]
    assert data["valid"].judgments.relevant.nonzero()[1].tolist() == [2]


def test_a_folder_may_be_named_by_its_language(cosqa):
    named = cosqa.rename(cosqa.parent / "python")
    arguments = DataArguments(data_dir=str(named.parent / "{language}"), language="python")
    assert len(load_data(arguments, EncoderProfile())["test"].queries) == 2
