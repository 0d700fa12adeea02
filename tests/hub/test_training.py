"""Training pushes to the loopback Hub, with every `hub_strategy` and every failure."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from server import WRITE_TOKEN
from transformers import AutoModel

from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.hub.push import Repository
from soft_trainer.system.files import is_edited

pytestmark = pytest.mark.slow

REPO = "ann/tiny"
PUSH = {"push_to_hub": True, "hub_model_id": REPO}
TEXTS = ["read a file line by line", "def f(x): return x"]
COMPLETE = {
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "modules.json",
    "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json", "soft_trainer.json",
}  # fmt: skip


def pushed(repo=REPO, **kwargs) -> set[str]:
    return set(HfApi(token=WRITE_TOKEN).list_repo_files(repo, **kwargs)) - {".gitattributes"}


def check_whole(folder: Path, revision: str | None = None) -> None:
    """Checks that the repository has the files of the folder, and that both load."""
    assert COMPLETE | {"README.md", "all_results.json", "run.json"} <= pushed(revision=revision)
    here, there = (load_encoder(name, at, "cpu") for name, at in ((folder, None), (REPO, revision)))
    assert torch.equal(here.encode_queries(TEXTS), there.encode_queries(TEXTS))
    for file in ("model.safetensors", "README.md", "all_results.json"):
        copy = HfApi(token=WRITE_TOKEN).hf_hub_download(REPO, file, revision=revision)
        assert Path(copy).read_bytes() == (folder / file).read_bytes()


def of_steps(files: set[str]) -> set[str]:
    return {name.split("/")[0] for name in files if "checkpoint" in name}


# ---- What a run pushes ----


@pytest.mark.parametrize(
    "strategy, checkpoints",
    [
        ("end", set()),
        ("every_save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"checkpoint-2", "checkpoint-4", "checkpoint-6"}),
    ],
)
def test_every_strategy_pushes_an_encoder_that_loads_by_name(train, strategy, checkpoints):
    assert train(**PUSH, hub_strategy=strategy, hub_always_push=True) == (0, "")
    check_whole(train.folder)
    assert of_steps(pushed()) == checkpoints
    titles = [commit.title for commit in HfApi().list_repo_commits(REPO)]
    assert titles[0] == "End of training" and ("Step 2" in titles) == (strategy != "end")
    for checkpoint in checkpoints:
        assert {f"{checkpoint}/{name}" for name in COMPLETE} <= pushed()
    assert not [name for name in pushed() if name.endswith((".bin", ".pt", ".pth", ".pkl")) or "ranks" in name]
    assert train.sources_of(WRITE_TOKEN) == []


def test_a_run_in_python_pushes_the_card_of_the_run(here, trainer_of, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    model.config.name_or_path = "ann/base"
    trainer = trainer_of(plain=True, hub_model_id=REPO, max_steps=4, num_train_epochs=10)
    logged = [trainer.evaluate()["eval_mrr"]]
    trainer.train()
    logged.append(trainer.evaluate()["eval_mrr"])
    trainer.push_to_hub()
    card = ModelCard.load(hf_hub_download(REPO, "README.md"))
    (result,) = [each for each in card.data.eval_results if each.metric_type == "mrr"]
    assert result.metric_value == round(logged[1], 4) and f"| {logged[0]:.3f} " in card.text
    assert card.data.base_model == "ann/base" and "python" in card.data.tags
    for words in (
        "| loss | soft_info_nce |", "| estimator | BM25Estimator |", "| epochs | 1.33 |", "| steps | 4 |", "| train ",
        "with the loss `soft_info_nce`", 'SentenceTransformer("ann/tiny")', "transformers 5",
    ):  # fmt: skip
        assert words in " ".join(card.text.split()), words
    assert not is_edited(Path(trainer.args.output_dir, "README.md").read_text())  # a push is no edit


def test_a_finished_run_pushes_what_is_asked_later(train):
    assert train() == (0, "")
    weights = (train.folder / "model.safetensors").read_bytes()
    assert train(**PUSH) == (0, "")
    assert "already done" in train.said
    check_whole(train.folder)
    assert (train.folder / "model.safetensors").read_bytes() == weights


def test_private_on_a_branch_and_without_a_card(train):
    assert train(**PUSH, hub_private_repo=True, hub_revision="dev", hub_token=WRITE_TOKEN) == (0, "")
    check_whole(train.folder, "dev")
    assert pushed() == set()
    with pytest.raises(OSError, match="401"):
        HfApi(token=False).model_info(REPO)
    assert ModelCard.load(train.folder / "README.md").text.count('("ann/tiny", revision="dev"') == 4
    assert train.sources_of(WRITE_TOKEN) == []
    (train.folder / "README.md").unlink()
    assert train(**PUSH, model_card=False, max_steps=1, overwrite=True) == (0, "")
    assert COMPLETE <= pushed() and "README.md" not in pushed()


def test_an_estimator_by_name_and_revision(train, encoder_of, tmp_path):
    first, second = (encoder_of(PROFILES["unixcoder"], seed) for seed in (1, 2))
    for encoder, revision in ((first, "v1"), (second, None)):
        folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "teacher")
        Repository("ann/teacher", private=True, revision=revision).push(folder)
    options = {"estimator": "trained_model", "max_steps": 1, "estimator_cache_dir": tmp_path / "rows"}
    assert train(**options, estimator_model="ann/teacher@v1") == (0, "")
    used = json.loads((train.folder / "run.json").read_text())["depends on"]["the estimator's model_name_or_path"]
    assert used == "ann/teacher@v1"
    code, error = train(**options, estimator_model="ann/teacher@v3", overwrite=True)
    assert code == 2 and "ann/teacher: no revision 'v3'" in error


# ---- Refused at the start ----


@pytest.mark.parametrize(
    "token, options, says",
    [
        (None, PUSH, "no token"),
        (WRITE_TOKEN, PUSH | {"hub_model_id": "tiny"}, "expected USER/NAME"),
        (WRITE_TOKEN, PUSH | {"hub_model_id": "bob/tiny"}, "not allowed to write"),
    ],
)
def test_refused_before_rows_are_read_or_mined(train, monkeypatch, tmp_path, token, options, says):
    (tmp_path / "rows").mkdir()
    rows = str(tmp_path / "rows")  # without rows and without source code
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    code, error = train(**options | {"data_dir": rows})
    assert code == 2 and says in error  # and not that there are no rows
    assert not list(train.folder.rglob("*.safetensors"))
    assert train.sources_of(token or WRITE_TOKEN) == []


# ---- Faults ----


def test_a_repository_that_is_gone_during_training_is_made_again(train):
    train.hub.fault(gone=1, upload=1)
    assert train(**PUSH, hub_strategy="every_save") == (0, "")
    assert not any(train.hub.fault().values())
    check_whole(train.folder)
    assert train.sources_of(WRITE_TOKEN) == []


def test_a_push_that_failed_during_training_is_logged_with_the_command_for_later(train, caplog):
    train.hub.fault(commit=2)  # of the first checkpoint, to the root and to its folder
    options = {"hub_strategy": "all_checkpoints", "hub_always_push": True, "save_total_limit": 3}
    assert train(**PUSH, **options) == (0, "")
    check_whole(train.folder)
    assert of_steps(pushed()) == {"checkpoint-4", "checkpoint-6"}
    stored = json.loads((train.folder / "checkpoint-4" / "training_args.json").read_text())
    assert stored["push_to_hub"] is True and stored["save_total_limit"] == 3
    root, folder = [entry.getMessage() for entry in caplog.records if "during training failed" in entry.getMessage()]
    assert "checkpoint-2" in root and "500" in root and "later" not in root
    (command,) = re.findall("To push later, run: soft-trainer (.*)", folder)
    assert run_command(command.split()) == 0
    assert of_steps(pushed()) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


def test_a_push_that_fails_for_good_leaves_the_folder_and_says_how_to_push_later(train):
    train.hub.fault(commit=-1)
    code, error = train(**PUSH)
    assert REPO not in (train.folder / "README.md").read_text().split("---", 2)[2]
    command = f"soft-trainer push {train.folder} {REPO}"
    assert code == 2 and error.endswith(f"Nothing is lost. To push later, run: {command}")
    assert json.loads((train.folder / "run.json").read_text())["results"]["test"]["trained"]
    load_encoder(train.folder, device="cpu")
    assert train.sources_of(WRITE_TOKEN) == []
    train.hub.fault(commit=0)
    assert run_command(command.split()[1:]) == 0
    check_whole(train.folder)


# ---- Adapters ----

BASE = "ann/base"
LORA = {"from_scratch": None, "vocabulary_size": None, "lora_r": 4, "learning_rate": 0.01, "model_name_or_path": BASE}


@pytest.fixture
def base(here, train, encoder_of, tmp_path):
    """Pushes an encoder as the base of an adapter. Returns the folder that was pushed."""
    encoder = encoder_of(EncoderProfile(query_length=16, code_length=32, score_function="cosine", score_scale=20.0))
    folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "base")
    Repository(BASE).push(folder)
    return folder


def check_loaded_by_name(folder: Path) -> None:
    """Checks that every library loads the repository and computes the same embeddings as for the folder."""
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
    def models(files: set[str]) -> set[str]:
        return {
            name for name in files if name.endswith(("config.json", "model.safetensors")) and "Pooling" not in name
        }

    options = PUSH | LORA | {"hub_strategy": "every_save", "hub_always_push": True}
    assert train(**options) == (0, "")
    weights = {"adapter_config.json", "adapter_model.safetensors"}
    others = {"tokenizer_config.json", "sentence_bert_config.json"}
    assert models(pushed()) - others == weights
    config = json.loads(Path(hf_hub_download(REPO, "adapter_config.json")).read_text())
    assert config["base_model_name_or_path"] == BASE
    check_loaded_by_name(train.folder)
    card = ModelCard.load(train.folder / "README.md")
    assert (card.data.base_model, card.data.to_dict()["base_model_relation"]) == (BASE, "adapter")
    assert {"peft", "lora"} <= set(card.data.tags) and "pip install peft" in card.text
    assert "| adapter | LORA, r 4, alpha 8, dropout 0.05 |" in " ".join(card.text.split())

    assert train(**options, merge_lora=True, overwrite=True) == (0, "")
    merged = {"config.json", "model.safetensors"} | {f"adapter/{name}" for name in weights}
    assert models(pushed()) - others == merged
    check_loaded_by_name(train.folder)
    card = ModelCard.load(train.folder / "README.md")
    assert card.data.to_dict()["base_model_relation"] == "finetune"
    assert "peft" not in card.data.tags and "with a merged LoRA adapter" in card.text


@pytest.mark.parametrize("relative", [False, True])
def test_no_path_of_this_machine_is_pushed(train, base, data_dir, tmp_path, monkeypatch, relative):
    private = tmp_path / "kanarien"
    if relative:
        monkeypatch.chdir(tmp_path)
        private = Path("kanarien")
    options = {"model_name_or_path": private / "base", "data_dir": private / "rows", "eval_data_dir": private / "rows"}
    shutil.copytree(base, options["model_name_or_path"])
    shutil.copytree(data_dir, options["data_dir"])
    assert train(**(PUSH | LORA | options), merge_lora=True, hub_strategy="all_checkpoints", max_steps=2) == (0, "")
    assert {"config.json", "tokenizer_config.json", "run.json", "adapter/adapter_config.json"} <= pushed()
    assert train.hub.holding("kanarien") == []
    assert "kanarien" not in (train.folder / "run.json").read_text()


def test_an_adapter_of_a_folder_is_not_pushed(train, base):
    code, error = train(**(PUSH | LORA | {"model_name_or_path": base}))
    assert code == 2 and "which exists only on this machine; set merge_lora=True" in error
