"""The README's Python code runs, its GPU figures equal the measured figures, and it is short."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from soft_trainer.encoders.export import export_encoder
from soft_trainer.evaluation.significance import compare_crossed, difference_text

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_page_is_short():
    beside_code = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len(beside_code.split()) <= 660


@pytest.fixture
def gpu_page(monkeypatch):
    """The module that writes the figures of `gpu.md`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_page

    return gpu_page


def row_of(text: str) -> str:
    """Returns the row of README's table that contains a text."""
    (row,) = [line for line in README.splitlines() if line.startswith("|") and text in line]
    return row


def reciprocal(run: dict) -> np.ndarray:
    """Returns the reciprocal ranks of a run's queries, set by set. Some files store ranks as text."""
    sets = [ranks.split() if isinstance(ranks, str) else ranks for _, ranks in sorted(run["ranks"].items())]
    return np.concatenate([1 / np.array(ranks, dtype=float) for ranks in sets])


def test_the_figures_of_the_gpu_are_the_measured_ones_and_the_baseline_is_the_fastest(gpu_page):
    parts = gpu_page.measured()
    ms = {}
    for row in gpu_page.steps(parts)[1:]:
        if row["precision"] == "bfloat16":
            ms[row["batch"], row["way"]] = float(row["ms a step"].split()[0].replace(",", ""))
    theirs = [way for _, way in ms if way.startswith(gpu_page.PEER)]
    best = [min(ms[batch, way] for way in theirs) for batch in (64, 256)]
    steps = row_of("a step on an H100")
    for values in (best, [ms[64, "ours"], ms[256, "ours"]], [ms[64, "ours padded"], ms[256, "ours padded"]]):
        assert ", ".join(f"{value:.0f}" for value in values) in steps
    memory = parts["memory"]["values"]["GiB"]
    for way in (gpu_page.PEER, "ours", "ours padded"):
        assert f"{memory[f'{way} 64']:.1f}, {memory[f'{way} 256']:.1f}" in row_of("peak memory of these steps")


def test_the_baseline_of_the_recipe_is_the_best_rate_and_the_difference_is_at_the_same_rate():
    runs = json.loads(gzip.decompress((ROOT / "benchmarks/recipe_study.json.gz").read_bytes()))
    seeds = ("1234", "12345", "123456")
    ranks = {}
    for method in ("ours", "mnrl", "mnrl-6e-5"):
        ranks[method] = [
            np.stack([reciprocal(runs[f"{language}/{seed}/{method}"]) for seed in seeds])
            for language in ("ruby", "python", "go")
        ]
    means = {method: np.concatenate(strata, axis=1).mean() for method, strata in ranks.items()}
    assert max(means["mnrl"], means["mnrl-6e-5"]) == means["mnrl-6e-5"]
    result = compare_crossed([a - b for a, b in zip(ranks["ours"], ranks["mnrl-6e-5"], strict=True)])
    row = row_of("MRR of MiniLM after one epoch")
    assert f"{means['mnrl-6e-5']:.3f}" in row and f"{means['ours']:.3f}" in row
    assert difference_text(result.delta, result.interval) in row
    page = (ROOT / "benchmarks/recipe_study.md").read_text()
    _, _, queries, difference, p = re.search(
        r"^\| (same rate 6e-5) \| (.*) \| (.*) \| (.*) \| (.*) \|$", page, re.M
    ).groups()
    assert f"{queries} held-out queries" in row and f"{difference}, Holm-corrected p {p};" in row


def test_the_baseline_of_the_teacher_is_the_best_method_of_the_study():
    held_out = ("php", "javascript", "go", "csn-ruby", "cosqa")
    values: dict[str, dict[int, np.ndarray]] = {}
    for line in gzip.decompress((ROOT / "benchmarks/teacher_study.jsonl.gz").read_bytes()).splitlines():
        run = json.loads(line)
        if "ranks" in run:
            run["ranks"] = {name: run["ranks"][name] for name in held_out}
            values.setdefault(run["method"], {})[run["seed"]] = reciprocal(run)
    means = {method: np.mean([*seeds.values()]) for method, seeds in values.items()}
    ours = values["InfoNCE + KL"]
    name = max((each for each in means if not each.startswith("InfoNCE + KL")), key=means.get)
    result = compare_crossed([np.stack([ours[seed] - values[name][seed] for seed in sorted(ours)])])
    row = row_of("a static encoder with MiniLM as the teacher")
    assert f"{means[name]:.3f} (`{name}`)" in row and f"{means['InfoNCE + KL']:.3f}" in row
    assert difference_text(result.delta, result.interval, 3) in row


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
