"""The README's Python code runs, its figures of a GPU are the measured ones, and it is short."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from soft_trainer.encoders.export import export_encoder

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_page_is_short():
    beside_code = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len(beside_code.split()) <= 850


@pytest.fixture
def gpu_page(monkeypatch):
    """The module that writes the figures of `gpu.md`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_page

    return gpu_page


def test_the_figures_of_the_gpu_are_the_measured_ones(gpu_page):
    parts = gpu_page.measured()
    ms = {(row["batch"], row["way"]): row["ms a step"].split()[0] for row in gpu_page.steps(parts)[1:]}
    ms = {key: f"{float(value.replace(',', '')):.0f}" for key, value in ms.items()}
    memory = {name: f"{value:.1f}" for name, value in parts["memory"]["values"]["GiB"].items()}
    loops = {name: f"{value:,.0f}" for name, value in parts["loops"]["values"]["examples/s"].items()}
    peer = gpu_page.PEER
    expected = [
        (ms[64, peer], ms[256, peer], ms[64, "ours"], ms[256, "ours"]),
        (ms[64, gpu_page.WITHOUT_CUDNN], ms[256, gpu_page.WITHOUT_CUDNN], ms[64, "ours"], ms[256, "ours"]),
        (memory[f"{peer} 64"], memory[f"{peer} 256"], memory["ours 64"], memory["ours 256"]),
        (*(loops[f"{way}, {workers} workers"] for way in (peer, "InfoNCE") for workers in (4, 0)),),
    ]
    rows = [line for line in README.splitlines() if "H100, RoBERTa" in line or "same if" in line]
    rows += [line for line in README.splitlines() if "peak memory of these" in line or "whole loop" in line]
    found = [tuple(re.findall(r"[\d,.]*\d", row.split("|", 2)[2].split("[")[0].rsplit("|", 1)[0])) for row in rows]
    assert found == expected


@pytest.mark.slow
def test_the_page_of_the_gpu_is_up_to_date(gpu_page):
    assert gpu_page.page() in gpu_page.PAGE.read_text()


@pytest.mark.slow
def test_the_python_block_runs(_model, tokenizer, profile, tmp_path, monkeypatch):
    block, two_lines = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    export_encoder(_model, tokenizer, profile, tmp_path / "encoder")
    rows = []
    for n in range(300):
        rows.append({"url": f"#{n}", "docstring": f"adds {n} to x", "code": f"def f(x): return x + {n}"})
    (tmp_path / "rows").mkdir()
    for split, part in {"train": rows[:240], "valid": rows[240:270], "test": rows[270:], "codebase": rows}.items():
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(block, scope)
    assert scope["trainer"].state.global_step > 0
    assert (tmp_path / "outputs/mine/model.safetensors").exists()
    columns = {"anchor": [row["docstring"] for row in rows], "positive": [row["code"] for row in rows]}
    scope = {"model": SentenceTransformer(str(tmp_path / "encoder")), "train_dataset": Dataset.from_dict(columns)}
    exec("from soft_trainer.sentence_transformers import SoftInfoNCELoss, with_rows", scope)
    exec(two_lines.replace("TEACHER", str(tmp_path / "encoder")), scope)
    args = SentenceTransformerTrainingArguments(
        str(tmp_path / "theirs"), max_steps=2, use_cpu=True, save_strategy="no"
    )
    trainer = SentenceTransformerTrainer(scope["model"], args, scope["train_dataset"], loss=scope["loss"])
    assert trainer.train().global_step == 2
