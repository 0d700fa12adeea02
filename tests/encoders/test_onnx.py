"""Encoders that are exported to ONNX give the same embeddings as in torch."""

import copy

import pytest
import torch
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders import onnx
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.onnx_export import export_onnx
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.options.model import ModelArguments

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

LENGTHS = {"query_length": 10, "code_length": 24}
EXPORTED = {
    "unixcoder": PROFILES["unixcoder"].replace(**LENGTHS),
    "codebert": PROFILES["codebert"].replace(**LENGTHS),
    "mean, cosine": EncoderProfile(query_prefix="query: ", score_function="cosine", score_scale=20.0, **LENGTHS),
    "cls after the prompt": EncoderProfile(pooling="cls", query_prefix="query: ", include_prompt=False, **LENGTHS),
    "mean after the prompt": EncoderProfile(query_prefix="query: ", include_prompt=False, **LENGTHS),
    "last token": EncoderProfile(pooling="last_token", **LENGTHS),
    "truncated": EncoderProfile(normalize=True, truncate_dim=16, score_function="dot", **LENGTHS),
    "lower case": EncoderProfile(lower_case=True, **LENGTHS),
}
TEXTS = ["  two spaces first", "def f(x):\n    return x", "much too long " * 30, "a </s> inside", "x"]


def export(encoder, folder):
    return export_encoder(encoder.model, encoder.tokenizer, encoder.profile, folder)


def assert_equal(folder, tolerance=1e-4, **options):
    """Checks that the ONNX encoder in a folder gives the same embeddings as the encoder in torch."""
    ours, theirs = load_encoder(folder, device="cpu", **options), load_encoder(folder, backend="onnx", **options)
    for name in ("encode_queries", "encode_codes"):
        found, expected = getattr(theirs, name)(TEXTS), getattr(ours, name)(TEXTS)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    queries, codes = theirs.encode_queries(TEXTS), theirs.encode_codes(TEXTS)
    torch.testing.assert_close(theirs.score(queries, codes), ours.score(queries, codes))


@pytest.mark.parametrize("profile", EXPORTED.values(), ids=EXPORTED.keys())
def test_an_exported_encoder_has_the_same_embeddings(profile, encoder_of, tmp_path):
    folder = export(encoder_of(profile), tmp_path)
    (file,) = export_onnx(folder)
    assert file == folder / "onnx" / "model.onnx"
    assert_equal(folder)
    assert_equal(folder, truncate_dim=8)


def test_a_merged_adapter_is_exported_and_new_weights_remove_the_old_export(encoder_of, tmp_path):
    pytest.importorskip("peft")
    encoder = encoder_of(EXPORTED["mean, cosine"])
    add_lora(encoder.model, ModelArguments(lora_r=2), None)
    with torch.no_grad():
        for name, parameter in encoder.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    folder = export_encoder(copy.deepcopy(encoder.model), encoder.tokenizer, encoder.profile, tmp_path, merge=True)
    run_command(["export", str(folder)])
    assert_equal(folder)
    export(encoder_of(EXPORTED["mean, cosine"]), tmp_path)
    assert not list(tmp_path.glob("onnx/*.onnx"))
    with refused("no such export in onnx/; `soft-trainer export"):
        load_encoder(folder, backend="onnx")


def test_weights_of_8_bits_are_near(encoder_of, tmp_path):
    folder = export(encoder_of(EXPORTED["mean, cosine"]), tmp_path)
    export_onnx(folder, int8=True)
    assert_equal(folder)  # unless asked for, the 8-bit weights are not used
    exact = load_encoder(folder, device="cpu").encode_codes(TEXTS)
    near = load_encoder(folder, backend="int8").encode_codes(TEXTS)
    assert not torch.equal(exact, near) and torch.cosine_similarity(exact, near).min() > 0.9


def test_weights_of_8_bits_that_a_processor_computes_wrongly_are_refused(encoder_of, tmp_path, monkeypatch):
    folder = export(encoder_of(EXPORTED["mean, cosine"]), tmp_path)
    export_onnx(folder, int8=True)
    monkeypatch.setattr(onnx, "LEAST_COSINE", 1.1)
    assert load_encoder(folder, backend="int8")  # this processor has passed
    monkeypatch.setattr(onnx, "_processor", lambda: "another")
    with refused("on this processor, the mean cosine with embeddings of float32 weights is only", "use float32"):
        load_encoder(folder, backend="int8")
    with refused("float32 weights is only", "use float32"):
        export_onnx(folder, int8=True)
    (file,) = export_onnx(folder)
    assert file.name == "model.onnx" and [*folder.glob("onnx/*.onnx")] == [file]


def test_an_export_removes_the_older_one_of_8_bits(encoder_of, tmp_path):
    folder = export(encoder_of(EXPORTED["last token"]), tmp_path)
    assert len(export_onnx(folder, int8=True)) == 2
    assert export_onnx(folder) == [*folder.glob("onnx/*.onnx")]
    assert_equal(folder)
    with refused("no such export in onnx/", "--int8` writes it"):
        load_encoder(folder, backend="int8")


def test_an_export_of_other_weights_is_refused(encoder_of, tmp_path):
    folder = export(encoder_of(EXPORTED["last token"]), tmp_path)
    export_onnx(folder)
    other = encoder_of(EXPORTED["last token"], seed=1)
    other.model.save_pretrained(folder)  # which knows nothing of an export
    with refused("model.safetensors has changed since the export; `soft-trainer export"):
        load_encoder(folder, backend="onnx")


def test_an_export_to_the_folder_of_another_encoder_is_refused(encoder_of, tmp_path):
    folder = export(encoder_of(EXPORTED["last token"]), tmp_path / "one")
    other = export(encoder_of(EXPORTED["mean, cosine"]), tmp_path / "other")
    with refused("other: the folder has an encoder other than"):
        export_onnx(folder, other)
    assert not (other / "onnx").exists()
    assert export_onnx(folder, tmp_path / "new")


def test_what_cannot_be_exported_says_why(encoder_of, tmp_path, monkeypatch):
    graph = export(encoder_of(PROFILES["graphcodebert"].replace(**LENGTHS, data_flow_length=8)), tmp_path / "graph")
    with refused("the encoder reads data flow, which requires torch"):
        export_onnx(graph)
    with refused("to export an encoder from the Hub, set output_dir"):
        export_onnx("USER/NAME")
    for backend in ("onnx", "int8"):
        with refused(f"backend='{backend}': base is a static encoder, which needs no export; drop backend"):
            load_encoder("base", backend=backend)
    with refused("backend='tf': use torch, onnx or int8"):
        load_encoder(graph, backend="tf")
    plain = export(encoder_of(EXPORTED["last token"]), tmp_path / "plain")
    monkeypatch.setattr("soft_trainer.encoders.onnx_export.has_onnxruntime", lambda: False)
    with refused("ONNX needs the extra"):
        export_onnx(plain)
