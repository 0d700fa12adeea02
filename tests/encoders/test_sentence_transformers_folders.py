"""Folders that sentence-transformers makes, saves and reads have the same embeddings here, or are refused.

To add a field, add a case to `CASES`: the modules after the transformer, arguments of `Transformer` and
`SentenceTransformer`, changes of files (which no current release writes, but earlier releases did), and the message of
the refusal, if there is one.
"""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from refusals import refused
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from transformers import AutoTokenizer, RobertaConfig, RobertaModel

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import given_encoder
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.starting import starting_encoder
from soft_trainer.shell.building import build_encoder

TEXTS = [
    "Sort a List with QuickSort",
    "def Reverse(text): return text[::-1]",
    "café, naïve façade: Größe ÜBER alles",
    "读取文件的每一行",
    " ".join(f"Value_{number}" for number in range(60)),
]
WIDTH = 32
MODES = ("max", "mean_sqrt_len_tokens", "weightedmean", ("cls", "mean"))
TRANSFORMER = "sentence_bert_config.json"
SETTINGS = "config_sentence_transformers.json"
OTHER = "sentence-transformers gives other embeddings"


@dataclass
class Case:
    pooling: object = "mean"
    include_prompt: bool = True
    modules: tuple = ()
    transformer: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    refused: str = ""


CASES = {
    "mean": Case(),
    "cls": Case("cls"),
    "lasttoken": Case("lasttoken"),
    **{str(mode): Case(mode, refused="a profile cannot express") for mode in MODES},
    "normalize": Case(modules=(st.Normalize(),)),
    "normalize another feature": Case(modules=(st.Normalize("token_embeddings"),), refused=OTHER),
    "dense": Case(modules=(st.Dense(WIDTH, 16),), refused="Transformer, Pooling, Dense"),
    "layer norm": Case(modules=(st.LayerNorm(WIDTH),), refused="Transformer, Pooling, LayerNorm"),
    "dropout": Case(modules=(st.Dropout(0.5),)),
    "dot": Case(options={"similarity_fn_name": "dot"}),
    "manhattan": Case(options={"similarity_fn_name": "manhattan"}, refused="manhattan"),
    "prompts": Case(options={"prompts": {"query": "Find: ", "document": "Code: "}}),
    "prompts of other names": Case(options={"prompts": {"query": "Find: ", "passage": "Code: "}}),
    "a default prompt": Case(options={"prompts": {"other": "Find: "}, "default_prompt_name": "other"}),
    "prompts outside the mean": Case(include_prompt=False, options={"prompts": {"query": "F: ", "document": "C: "}}),
    "prompts outside cls": Case("cls", include_prompt=False, options={"prompts": {"query": "Find: "}}),
    "truncate_dim": Case(options={"truncate_dim": 8}),
    "truncate_dim, normalised": Case(modules=(st.Normalize(),), options={"truncate_dim": 8}),
    "truncate_dim, dot": Case(modules=(st.Normalize(),), options={"truncate_dim": 8, "similarity_fn_name": "dot"}),
    "max_seq_length": Case(transformer={"max_seq_length": 12}),
    "max_seq_length of earlier releases": Case(files={TRANSFORMER: {"max_seq_length": 12}}),
    "two lengths": Case(transformer={"query_length": 8, "document_length": 20}),
    "model_max_length": Case(files={TRANSFORMER: {"tokenizer_args": {"model_max_length": 10}}}),
    "do_lower_case": Case(transformer={"do_lower_case": True}),
    "do_lower_case of earlier releases": Case(files={TRANSFORMER: {"do_lower_case": True}}),
    "query_expansion": Case(
        transformer={"query_expansion": {"strategy": "fixed", "attend": True, "length": 16}},
        refused=OTHER,
    ),
    "processing_kwargs": Case(
        transformer={"processing_kwargs": {"text": {"add_special_tokens": False}}},
        refused=OTHER,
    ),
    "tokenizer_args": Case(
        files={TRANSFORMER: {"tokenizer_args": {"truncation_side": "left"}}},
        refused=OTHER,
    ),
    "dtype": Case(files={TRANSFORMER: {"model_args": {"torch_dtype": "float32", "attn_implementation": "eager"}}}),
}  # fmt: skip


@pytest.fixture
def plain(encoder_of, profile, tmp_path):
    """Saves a tiny encoder whose tokenizer distinguishes upper case, without any file of sentence-transformers."""
    encoder = encoder_of(profile.replace(code_length=64))
    with torch.no_grad():
        for weight in encoder.model.parameters():  # otherwise, the embeddings of all texts would be nearly equal
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    encoder.model.save_pretrained(tmp_path / "plain")
    encoder.tokenizer.model_max_length = 64
    encoder.tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def saved(plain, tmp_path):
    """Returns a function that makes and saves a case's encoder with sentence-transformers, and returns the folder."""

    def make(case: Case):
        transformer = st.Transformer(str(plain), **case.transformer)
        pooling = st.Pooling(WIDTH, case.pooling, include_prompt=case.include_prompt)
        model = SentenceTransformer(modules=[transformer, pooling, *case.modules], device="cpu", **case.options)
        folder = tmp_path / "made"
        model.save(str(folder), create_model_card=False)
        for file, changes in case.files.items():
            content = json.loads((folder / file).read_text())
            (folder / file).write_text(json.dumps(content | changes))
        return folder

    return make


def assert_equal(folder, encoder) -> None:
    """Compares an encoder with what sentence-transformers reads from a folder."""
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert np.abs(theirs.encode_query(TEXTS) - encoder.encode_queries(TEXTS).numpy()).max() < 1e-5
    assert np.abs(theirs.encode_document(TEXTS) - encoder.encode_codes(TEXTS).numpy()).max() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_equal_or_refused(saved, name):
    case = CASES[name]
    folder = saved(case)
    if case.refused:
        with refused(case.refused, folder, "set profile to one of"):
            load_encoder(folder, device="cpu")
        return
    assert_equal(folder, load_encoder(folder, device="cpu", compare=False))
    load_encoder(folder, device="cpu")


# One case for each thing that a run must save.
TRAINED = ("prompts of other names", "prompts outside cls", "truncate_dim, normalised")
TRAINED += ("two lengths", "do_lower_case", "dtype")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_embeddings_are_equal_after_training(saved, rows, tmp_path, name):
    folder = saved(CASES[name])
    options = {"max_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0, "per_device_train_batch_size": 8}
    arguments = SoftInfoNCETrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **options)
    trainer = SoftInfoNCETrainer(folder, arguments, rows)
    trainer.train()
    trainer.save_model()
    encoder = load_encoder(arguments.output_dir, device="cpu")
    assert_equal(arguments.output_dir, encoder)
    before = load_encoder(folder, device="cpu")
    assert encoder.dimensions == before.dimensions and encoder.profile == before.profile
    assert (encoder.encode_queries(TEXTS) - before.encode_queries(TEXTS)).abs().max() > 1e-4
    assert torch.allclose(trainer.text_encoder.encode_queries(TEXTS), encoder.encode_queries(TEXTS), atol=1e-5)


def test_a_pooler_is_equal_and_a_router_is_refused(plain, tmp_path):
    text = {"method": "forward", "method_output_name": "pooler_output"}
    config = json.loads((plain / "config.json").read_text())
    torch.manual_seed(0)
    RobertaModel(RobertaConfig(**config)).save_pretrained(plain)
    pooler = st.Transformer(str(plain), modality_config={"text": text}, module_output_name="sentence_embedding")
    SentenceTransformer(modules=[pooler], device="cpu").save(str(tmp_path / "pooler"), create_model_card=False)
    assert_equal(tmp_path / "pooler", load_encoder(tmp_path / "pooler", device="cpu"))
    both = [st.Transformer(str(plain)), st.Pooling(WIDTH)]
    router = st.Router.for_query_document(both, both)
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "router"), create_model_card=False)
    with refused("a profile cannot express these sentence-transformers modules (Router"):
        load_encoder(tmp_path / "router", device="cpu")


# ---- The comparison ----


def test_a_module_with_other_code_is_found_by_comparing(saved, tmp_path, monkeypatch):
    """A module called Normalize that does something else."""
    folder = saved(CASES["normalize"])
    (tmp_path / "doubling.py").write_text(
        "from sentence_transformers.sentence_transformer.modules import Normalize as Other\n\n"
        "class Normalize(Other):\n"
        "    def forward(self, features):\n"
        "        features['sentence_embedding'] = 2 * features['sentence_embedding']\n"
        "        return features\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "doubling.Normalize"
    (folder / "modules.json").write_text(json.dumps(modules))
    with refused(f"{folder}: {OTHER}", "Likely cause: a field or the code of a module"):
        load_encoder(folder, device="cpu", trust_remote_code=True)


def test_other_tokens_are_found(saved, monkeypatch):
    folder = saved(CASES["do_lower_case of earlier releases"])
    monkeypatch.setattr("soft_trainer.encoders.loading.convert_to_lower_case", lambda tokenizer: None)
    with refused(OTHER):
        load_encoder(folder, device="cpu")


def test_padding_on_the_left_is_named_if_positions_include_it(plain, tmp_path):
    config = json.loads((plain / "config.json").read_text())
    for kind, folder in (("Bert", tmp_path / "bert"), ("Roberta", tmp_path / "roberta")):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config))
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        model.save_pretrained(plain)
        AutoTokenizer.from_pretrained(plain, padding_side="left").save_pretrained(plain)
        modules = [st.Transformer(str(plain)), st.Pooling(WIDTH)]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    with refused("such as padding_side=left"):
        load_encoder(tmp_path / "bert", device="cpu")
    assert_equal(tmp_path / "roberta", load_encoder(tmp_path / "roberta", device="cpu"))


def test_a_sentence_transformer_is_compared_as_it_is(saved):
    model = SentenceTransformer(str(saved(CASES["mean"])), device="cpu")
    assert given_encoder(model)[2].truncate_dim == 0
    model.truncate_dim = 8
    assert given_encoder(model)[2].truncate_dim == 8
    model[1].forward = lambda features: features | {"sentence_embedding": features["token_embeddings"][:, 1]}
    with refused("model: sentence-transformers gives other embeddings"):
        given_encoder(model)


def test_an_encoder_with_the_profile_of_the_user_is_not_compared(saved):
    folder = saved(CASES["dense"])
    arguments = ModelArguments(model_name_or_path=str(folder), profile="auto", query_length=16, code_length=32)
    starting = build_encoder(arguments)
    profile = starting.profile
    assert starting.load()[0].config.hidden_size == WIDTH
    assert starting_encoder(folder, profile=profile).profile == profile


def test_options_of_the_user_are_not_compared(saved):
    folder = saved(CASES["cls"])
    arguments = SoftInfoNCETrainingArguments(output_dir=str(folder.parent / "out"), use_cpu=True)
    profile = starting_encoder(folder).profile
    trainer = SoftInfoNCETrainer(folder, arguments, encoder=profile.replace(pooling="mean"))
    assert trainer.encoder.pooling == "mean"


def test_a_truncated_encoder_is_evaluated_truncated(saved, rows, tmp_path):
    folder = saved(CASES["truncate_dim"])
    arguments = SoftInfoNCETrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    trainer = SoftInfoNCETrainer(folder, arguments, eval_dataset=rows)
    assert trainer.text_encoder.dimensions == 8
    found = trainer.evaluate()["eval_mrr"]
    theirs = SentenceTransformer(str(folder), device="cpu")
    queries = theirs.encode_query([row["docstring"] for row in rows], normalize_embeddings=True)
    codes = theirs.encode_document([row["code"] for row in rows], normalize_embeddings=True)
    scores = queries @ codes.T
    ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1
    assert found == pytest.approx((1 / ranks).mean(), abs=1e-6)


def test_the_saved_tokenizer_has_the_longer_length(saved, tmp_path):
    encoder = load_encoder(saved(CASES["two lengths"]), device="cpu")
    export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 20
    assert encoder.tokenizer.model_max_length != 20
