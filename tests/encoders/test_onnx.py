"""Encoders that are exported to ONNX give the same embeddings as in torch."""

import copy

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import EXPORTED, LENGTHS, export

from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.onnx import OnnxEncoder
from soft_trainer.encoders.onnx_export import write_onnx
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile
from soft_trainer.options.model import ModelArguments

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

EXPORTED = EXPORTED | {
    "mean, cosine": EncoderProfile(query_prefix="query: ", score_function="cosine", score_scale=20.0, **LENGTHS),
    "last token": EncoderProfile(pooling="last_token", **LENGTHS),
    "truncated": EncoderProfile(normalize=True, truncate_dim=16, score_function="dot", **LENGTHS),
    "lower case": EncoderProfile(lower_case=True, **LENGTHS),
}
TEXTS = ["  two spaces first", "def f(x):\n    return x", "much too long " * 30, "a </s> inside", "x"]


def assert_equal(folder, tolerance=1e-4, **options):
    """Checks that the ONNX encoder in a folder gives the same embeddings as the encoder in torch."""
    ours, theirs = load_encoder(folder, device="cpu", **options), OnnxEncoder(folder / "onnx", **options)
    for side in ("query", "code"):
        expected = ours.encode(TEXTS, side)
        np.testing.assert_allclose(theirs.encode(TEXTS, side), expected, atol=tolerance, rtol=tolerance)


def export_onnx(folder):
    """Exports the encoder in a folder to its subfolder `onnx`."""
    write_onnx(load_encoder(folder, device="cpu"), folder / "onnx")


@pytest.mark.parametrize("profile", EXPORTED.values(), ids=EXPORTED.keys())
def test_an_exported_encoder_has_the_same_embeddings(profile, encoder_of, tmp_path):
    folder = export(encoder_of(profile), tmp_path)
    export_onnx(folder)
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
    export_onnx(folder)
    assert_equal(folder)
    export(encoder_of(EXPORTED["mean, cosine"]), tmp_path)
    assert not list(tmp_path.glob("onnx/*.onnx"))


def test_data_flow_cannot_be_exported(encoder_of, tmp_path):
    graph = export(encoder_of(PROFILES["graphcodebert"].replace(**LENGTHS, data_flow_length=8)), tmp_path / "graph")
    with refused("the encoder reads data flow, which requires torch"):
        export_onnx(graph)
