import re
from dataclasses import replace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from server import WRITE_TOKEN
from transformers import T5Config, T5EncoderModel

from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.run.model_card import license_of, write_model_card
from soft_trainer.system.fingerprints import environment

METRICS = {"mrr": 0.71234567, "recall@1": 0.6, "recall@5": 0.8, "recall@10": 0.9, "pool_size": 4360, "queries": 1261}
SIDE = {"mean": 20.0, "p95": 40.0, "cut": 0.125, "duplicates": 3}
PROFILES_IN_CARDS = {
    "unixcoder": PROFILES["unixcoder"].replace(query_length=12, code_length=20),
    "codebert": PROFILES["codebert"].replace(query_length=20, code_length=20),
    "cls": EncoderProfile(pooling="cls", query_prefix='say "it": ', query_length=20, score_function="cosine"),
    "normalised": EncoderProfile(normalize=True, query_length=20, code_length=30, score_scale=20.0),
    "last token": EncoderProfile(pooling="last_token", query_length=20, code_length=20),
    "prompt not pooled": EncoderProfile(query_prefix="say: ", include_prompt=False, query_length=20, code_length=20),
}
PROFILES_IN_CARDS["first after the prompt"] = PROFILES_IN_CARDS["prompt not pooled"].replace(pooling="cls")
CODEBERT = PROFILES_IN_CARDS["codebert"]


@pytest.fixture
def record():
    return {
        "model_id": None, "revision": None, "base_model": "microsoft/unixcoder-base",
        "dataset": "code-search-net/code_search_net", "languages": ["ruby", "go"],
        "loss": {"loss": "soft_info_nce", "estimator": "bm25", "alpha": 1.5, "beta": 0.5, "cancel": None},
        "training": {"batch per process": 32, "codes a query meets (N)": 64, "learning rate": 2e-5, "seed": 1234},
        "results": {
            "test": {"untrained": METRICS | {"mrr": 0.2}, "lexical": METRICS | {"mrr": 0.3}, "trained": METRICS}
        },
        "statistics": {"train": {"rows": 24_927, "query": SIDE, "code": SIDE}},
        "environment": environment(),
    }  # fmt: skip


@pytest.fixture
def card_of(encoder_of, record, tmp_path):
    """Returns a function that writes the card of an exported encoder, and returns the card's header and text."""

    def write(profile, **changes):
        folder = exported(encoder_of(profile), tmp_path / "encoder")
        return header_and_body(write_model_card(folder, record | changes))

    return write


def exported(encoder, folder):
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, folder)


def header_and_body(path):
    _, header, body = path.read_text().split("---\n", 2)
    return yaml.safe_load(header), body


@pytest.mark.parametrize("name", [*PROFILES_IN_CARDS, "T5"])
def test_snippets_run_as_printed_and_agree(name, encoder_of, record, tmp_path, capsys):
    profile = PROFILES_IN_CARDS.get(name, EncoderProfile(query_length=20, code_length=20))
    encoder = encoder_of(profile)
    if name == "T5":  # `AutoModel` loads its decoder, too
        config = T5Config(vocab_size=len(encoder.tokenizer), d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
        encoder = replace(encoder, model=T5EncoderModel(config).eval())
    text = write_model_card(exported(encoder, tmp_path / "encoder"), record).read_text()
    assert "{%" not in text and "{{" not in text and "\n\n\n\n" not in text
    assert "```\n\n<!-- Written by soft_trainer." in text[-110:]
    assert (".encoder" in text) == (name == "T5")
    snippets, embeddings = re.findall(r"```python\n(.*?)```", text, re.S), []
    assert len(snippets) == 3
    for snippet in snippets:
        names: dict = {}
        exec(snippet, names)
        assert "tensor(" in capsys.readouterr().out
        embeddings.append([torch.as_tensor(names[side]) for side in ("queries", "codes")])
    for others in embeddings[1:]:
        for ours, theirs in zip(embeddings[0], others, strict=True):
            if profile.score_function == "cosine":
                ours, theirs = (torch.nn.functional.normalize(side, dim=-1) for side in (ours, theirs))
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=1e-5, rtol=0)


def test_header_is_what_the_hub_reads(card_of):
    header, _ = card_of(CODEBERT, model_id="ann/ruby-go")
    assert header["base_model"] == "microsoft/unixcoder-base"
    assert header["datasets"] == ["code-search-net/code_search_net"]
    assert header["language"] == ["code"] and {"ruby", "go", "code-search"} <= set(header["tags"])
    assert (header["library_name"], header["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert "license" not in header
    (model,) = header["model-index"]
    (result,) = model["results"]
    assert model["name"] == "ruby-go"
    assert result["dataset"]["split"] == "test" and result["dataset"]["config"] == "ruby,go"
    assert {metric["name"]: metric["value"] for metric in result["metrics"]} == {
        "MRR over 4,360 functions": 0.7123,
        "Recall@1 over 4,360 functions": 0.6,
        "Recall@5 over 4,360 functions": 0.8,
        "Recall@10 over 4,360 functions": 0.9,
    }


def test_local_names_stay_out_of_the_header_and_the_license_comes_from_the_base(card_of, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    header, _ = card_of(CODEBERT, base_model=str(base), license=license_of(str(base)), dataset="our rows")
    assert "base_model" not in header and "datasets" not in header
    assert header["license"] == "apache-2.0"
    assert header["model-index"][0]["results"][0]["dataset"]["type"] == "code-search"


def test_a_base_from_the_cache_of_the_hub_has_its_published_name(card_of, tmp_path):
    base = tmp_path / "models--microsoft--unixcoder-base" / "snapshots" / "5604af"
    base.mkdir(parents=True)
    header, body = card_of(CODEBERT, base_model=f"{base}/")
    assert header["base_model"] == "microsoft/unixcoder-base"
    assert "`microsoft/unixcoder-base`" in body and str(tmp_path) not in body.replace(str(tmp_path / "encoder"), "")


def test_the_picture_is_shown_where_there_is_one(card_of, tmp_path):
    header, body = card_of(CODEBERT)
    assert "training.png" not in body
    (tmp_path / "encoder" / "training.png").write_bytes(b"")
    _, body = card_of(CODEBERT)
    assert "![loss and MRR by step](training.png)" in body


def test_the_body_of_a_card_agrees_with_the_record(card_of):
    _, body = card_of(PROFILES_IN_CARDS["unixcoder"])
    figures = ["0.712", "0.200", "0.300", "24,927", "12.5%", "4,360", "soft_info_nce", "2e-05"]
    assert not [said for said in (*figures, "torch") if said not in body]
    assert "cancel" not in body
    assert "truncated to 12 tokens and functions to 20" in body


def test_card_before_training_has_no_results_and_data_flow_is_said_to_be_ours_alone(card_of):
    header, body = card_of(CODEBERT, results={}, base_model=None)
    assert "model-index" not in header and "## Results" not in body
    assert "It was trained from scratch on" in body
    _, body = card_of(PROFILES["graphcodebert"].replace(query_length=12, code_length=20))
    assert "data flow" in body and 'language="python"' in body


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [None, ("test",), ("valid",), ("dev-1",), ("test", "valid"), ("eval", "web queries")]
)
def test_sets_of_any_name_are_in_the_cards_of_a_trainer(names, here, trainer_of, dataset, tmp_path, monkeypatch):
    """Every way to write a card in Python writes one that the client reads, with the results of all sets."""
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    rows = dataset if names is None else dict.fromkeys(names, dataset)
    arguments = {"eval_dataset": rows, "codebase": rows}
    expected = {*(names or ("eval",))}

    def sets_of(folder):
        return {result.dataset_split for result in ModelCard.load(folder / "README.md").data.eval_results or []}

    for report in (False, True):
        folder = tmp_path / f"report-{report}"
        options = {"max_steps": 1, "report": report, "eval_strategy": "steps", "eval_steps": 1, "lexical": False}
        trainer = trainer_of(output_dir=str(folder), arguments=arguments, hub_model_id="ann/sets", **options)
        trainer.train()
        trainer.save_model()
        assert expected <= sets_of(folder)
    trainer.push_to_hub()
    pushed = ModelCard.load("ann/sets")
    assert expected <= {result.dataset_split for result in pushed.data.eval_results}
    trainer = trainer_of(output_dir=str(tmp_path / "evaluated"), arguments=arguments, max_steps=1)
    trainer.train()
    trainer.evaluate(metric_key_prefix="test")
    trainer.save_model()
    assert sets_of(tmp_path / "evaluated")
    trainer = trainer_of(output_dir=str(tmp_path / "measured"), arguments=arguments, lexical=False)
    trainer.measure()
    trainer.save_model()
    ModelCard.load(tmp_path / "measured/README.md")
