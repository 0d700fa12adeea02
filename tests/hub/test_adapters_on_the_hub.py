"""Runs that push an adapter, or an encoder with its adapter merged, to the loopback Hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from server import WRITE_TOKEN
from transformers import AutoModel

from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.push import push_folder

pytestmark = pytest.mark.slow

REPO, BASE = "ann/adapted", "ann/base"
PUSH = {"push_to_hub": True, "hub_model_id": REPO, "hub_strategy": "every_save", "hub_always_push": True}
LORA = {"from_scratch": None, "vocabulary_size": None, "lora_r": 4, "learning_rate": 0.01, "model_name_or_path": BASE}
TEXTS = ["read a file line by line", "def f(x): return x"]


@pytest.fixture
def base(here, train, encoder_of, tmp_path):
    """A base on the Hub; the folder that was pushed."""
    encoder = encoder_of(EncoderProfile(query_length=16, code_length=32, score_function="cosine", score_scale=20.0))
    folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "base")
    push_folder(folder, BASE)
    return folder


def on_the_hub() -> set[str]:
    files = HfApi(token=WRITE_TOKEN).list_repo_files(REPO)
    return {name for name in files if name.endswith(("config.json", "model.safetensors")) and "Pooling" not in name}


def check_loaded_by_name(folder: Path) -> None:
    """Checks that every library loads the repository with the embeddings of the folder."""
    from sentence_transformers import SentenceTransformer

    expected = load_encoder(folder, device="cpu").encode_queries(TEXTS)
    there = load_encoder(REPO, device="cpu")
    torch.testing.assert_close(there.encode_queries(TEXTS), expected, atol=1e-5, rtol=0)
    theirs = torch.tensor(SentenceTransformer(REPO, device="cpu").encode_query(TEXTS))
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=0)
    inputs = there.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, plain = (
            model.eval()(**inputs).last_hidden_state
            for model in (there.model, AutoModel.from_pretrained(REPO, add_pooling_layer=False))
        )
    torch.testing.assert_close(plain, ours, atol=1e-5, rtol=0)


def test_an_adapter_then_the_merged_encoder_are_pushed_and_load_by_name(train, base):
    assert train(**PUSH, **LORA) == (0, "")
    weights = {"adapter_config.json", "adapter_model.safetensors"}
    others = {"tokenizer_config.json", "sentence_bert_config.json"}
    assert on_the_hub() - others == weights
    config = json.loads(Path(hf_hub_download(REPO, "adapter_config.json")).read_text())
    assert config["base_model_name_or_path"] == BASE
    check_loaded_by_name(train.folder)
    card = ModelCard.load(train.folder / "README.md")
    assert (card.data.base_model, card.data.to_dict()["base_model_relation"]) == (BASE, "adapter")
    assert {"peft", "lora"} <= set(card.data.tags) and "pip install peft" in card.text
    assert "adapter: LORA, r 4, alpha 8, dropout 0.05, query, value" in card.text

    assert train(**PUSH, **LORA, merge_lora=True, overwrite=True) == (0, "")
    merged = {"config.json", "model.safetensors"} | {f"adapter/{name}" for name in weights}
    assert on_the_hub() - others == merged
    check_loaded_by_name(train.folder)
    card = ModelCard.load(train.folder / "README.md")
    assert card.data.to_dict()["base_model_relation"] == "finetune"
    assert "peft" not in card.data.tags and "with a merged LoRA adapter" in card.text


def test_an_adapter_of_a_folder_is_not_pushed(train, base):
    code, error = train(**PUSH, **(LORA | {"model_name_or_path": base}))
    assert code == 2 and "which nobody else has: set --merge_lora true" in error
