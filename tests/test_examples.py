"""Every example runs on tiny rows from its command line."""

import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from soft_trainer import SimCSEEstimator, load_encoder, load_rows

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs an example with arguments, and returns its output."""

    def start(name: str, *words) -> str:
        path = next(path for path in EXAMPLES if path.stem == name)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.fixture
def csv(rows, tmp_path):
    """A CSV file with more rows than two batches, and with other column names."""
    pairs = [(f"{row['docstring']} {number}", f"{row['code']} # {number}") for row in rows for number in range(6)]
    path = tmp_path / "pairs.csv"
    pd.DataFrame(pairs, columns=["question", "answer"]).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_first_lines_say_what_it_needs(path):
    header = re.search(r"^# /// script\n((?:# .*\n)+)# ///\n", path.read_text()).group(1)
    needs = tomllib.loads(header.replace("# ", ""))
    assert needs["requires-python"] == ">=3.11" and needs["dependencies"]


@pytest.mark.slow
def test_from_a_csv(run, csv, encoder_dir, tmp_path):
    said = run("train_csv", csv, tmp_path / "out", "--model", encoder_dir)
    assert re.search(r"MRR 0\.\d+ before training, 0\.\d+ after", said)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["encoder_dir", "base"])
def test_from_python(run, csv, tmp_path, request, model):
    if model != "base":
        model = request.getfixturevalue(model)
    said = run("train_python", csv, tmp_path / "out", "--model", model, "--epochs", 2)
    assert re.search(r"test: MRR [01]\.\d+, \d+% in the first 5", said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_estimator", "own_loss"])
@pytest.mark.parametrize("model", ["encoder_dir", "base"])
def test_own_parts(run, csv, tmp_path, request, name, model):
    """DistilBERT, ModernBERT and static encoders such as `base` have no pooling layer to remove."""
    if model != "base":
        model = request.getfixturevalue(model)
    run(name, csv, tmp_path / "out", "--model", model)
    assert load_encoder(tmp_path / "out").encode_queries(["sort a list"]).isfinite().all()


@pytest.mark.slow
def test_hard_negatives_and_their_scores(run, csv, encoder_dir, tmp_path):
    run("hard_negatives", csv, tmp_path / "out", "--scorer", encoder_dir, "--epochs", 1)
    assert len(load_rows(tmp_path / "out" / "mined.jsonl")["train"].judgments.scores().data) > 300
    assert load_encoder(tmp_path / "out").encode_queries(["sort a list"]).isfinite().all()


@pytest.mark.slow
def test_simcse(run, data_dir, encoder_dir, tmp_path):
    words = ("--model", encoder_dir, "--batch_size", 4, "--max_steps", 2)
    run("simcse", data_dir, "--output_dir", tmp_path / "out", *words)
    assert (tmp_path / "out" / "modules.json").is_file()


def test_simcse_is_trained_on_the_texts_that_its_estimator_reads(data_dir, encoder_dir, monkeypatch):
    """The docstring and the docstring tokens of a row are different texts."""
    monkeypatch.syspath_prepend(EXAMPLES[0].parent)
    import simcse

    split = load_rows(data_dir)["train"]
    assert {"docstring", "docstring_tokens"} <= {*split.queries.column_names}
    texts = simcse.query_texts([data_dir, data_dir])
    estimator = SimCSEEstimator(encoder_dir, cache_dir=None)
    estimator.fit(split)
    embeddings = torch.nn.functional.normalize(load_encoder(encoder_dir).encode_queries(texts), dim=-1)
    rows = range(len(texts))
    torch.testing.assert_close(estimator.similarity(rows, rows), embeddings @ embeddings.T, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_both_vector_stores_find_the_same(run, csv, encoder_dir, tmp_path):
    pytest.importorskip("qdrant_client")
    said = run("vector_stores", encoder_dir, csv, tmp_path / "out", "sort a list")
    found = [re.findall(rf"{store} (\d+):", said) for store in ("FAISS", "Qdrant")]
    assert len(set(found[0])) == 3 and set(found[0]) == set(found[1])


@pytest.mark.slow
def test_langchain_and_llamaindex(run, encoder_dir):
    pytest.importorskip("langchain_huggingface")
    pytest.importorskip("llama_index.embeddings.huggingface")
    code = "def f(xs): return sorted(xs)"
    said = run("langchain_llamaindex", encoder_dir, "sort a list", code, "def g(): exit()")
    assert said.count(": def ") == 2


@pytest.mark.slow
def test_the_notebook_runs_and_draws_both_pictures(encoder_dir, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MODEL", str(encoder_dir))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES[0].parent / "from_rows_to_search.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    said = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"MRR before training 0\.\d+, after 0\.\d+", said) and ".py:" in said.splitlines()[-1]


@pytest.mark.slow
def test_weights_of_the_case_study(run, csv, encoder_dir, tmp_path):
    """The appendix: BM25 gives its second negative, which also reads bytes, the smallest weight."""
    case_study = EXAMPLES[0].parents[1] / "recipes" / "paper" / "case_study.jsonl"
    estimators = ("bm25", f"simcse={encoder_dir}", f"trained_model={encoder_dir}")
    said = run("weights_of_a_batch", csv, tmp_path / "out", "--shown", case_study, "--estimators", *estimators)
    rows = [line.split("|") for line in said.splitlines() if line.startswith("|")][2:]
    weights = [float(row[3]) for row in rows]
    assert len(weights) == 8 and weights.index(min(weights)) == 2
    assert {"weights.png", "alpha.png"} == {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_ray_encodes_shards_and_the_page_mines_negatives(run, rows, encoder_dir, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    table = pd.DataFrame(rows)[["url", "docstring", "code"]]
    for name in ("shards", "queries"):
        (tmp_path / name).mkdir()
    for number, part in enumerate((table[:10], table[10:])):
        part.to_parquet(tmp_path / f"shards/{number}.parquet")
    table.to_parquet(tmp_path / "queries/0.parquet")
    monkeypatch.chdir(tmp_path)
    run("encode_with_ray", encoder_dir, tmp_path / "shards", tmp_path / "vectors/codes", "--batch_size", 8)
    words = ("--column", "docstring", "--side", "query")
    run("encode_with_ray", encoder_dir, tmp_path / "queries", tmp_path / "vectors/queries", *words)
    encoded = pd.read_parquet(tmp_path / "vectors/codes").set_index("url")
    expected = load_encoder(encoder_dir).encode_codes(table["code"].tolist())
    found = torch.tensor(np.stack(encoded.loc[table["url"], "vector"]))
    torch.testing.assert_close(found, expected.cpu(), atol=1e-5, rtol=0)
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "beyond_one_machine.md").read_text(), re.M | re.S)
    exec(block, {})
    assert load_rows(tmp_path / "mined.parquet")["train"].judgments.negatives.nnz > 0
