"""The README's Python code runs on tiny rows, and the README is short."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from soft_trainer import SoftInfoNCETrainer
from soft_trainer.encoders.export import export_encoder

TEACHER = "sentence-transformers/all-MiniLM-L6-v2"
README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_page_is_short():
    assert len(README.split()) <= 800


@pytest.mark.slow
def test_the_python_block_runs(_model, tokenizer, profile, tmp_path, monkeypatch):
    block, two_lines = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    export_encoder(_model, tokenizer, profile, tmp_path / "encoder")
    rows = {
        "question": [f"adds {n} to x" for n in range(60)],
        "answer": [f"def f(x): return x + {n}" for n in range(60)],
    }
    Dataset.from_dict(rows).to_csv(str(tmp_path / "pairs.csv"))
    pushed = []
    monkeypatch.setattr(SoftInfoNCETrainer, "push_to_hub", lambda trainer: pushed.append(trainer.args.hub_model_id))
    monkeypatch.chdir(tmp_path)
    block = block.replace(TEACHER, str(tmp_path / "encoder"))
    scope = {}
    exec(block.replace('"outputs/mine"', '"outputs/mine", use_cpu=True, save_strategy="no"'), scope)
    assert pushed == ["USER/NAME"] and scope["trainer"].state.global_step > 0
    columns = {"anchor": rows["question"], "positive": rows["answer"]}
    scope = {"model": SentenceTransformer(str(tmp_path / "encoder")), "train_dataset": Dataset.from_dict(columns)}
    exec("from soft_trainer.sentence_transformers import SoftInfoNCELoss, with_rows", scope)
    exec(two_lines.replace("TEACHER", str(tmp_path / "encoder")), scope)
    args = SentenceTransformerTrainingArguments(
        str(tmp_path / "theirs"), max_steps=2, use_cpu=True, save_strategy="no"
    )
    trainer = SentenceTransformerTrainer(scope["model"], args, scope["train_dataset"], loss=scope["loss"])
    assert trainer.train().global_step == 2
