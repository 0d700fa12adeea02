"""Provides a tree to index, a stub for an encoder, and the commands as functions."""

import argparse
import importlib

import numpy as np
import pytest
from trees import FILES, write_tree

from soft_trainer.encoders import text_encoder
from soft_trainer.search import code_index
from soft_trainer.system.terminal import exit_on_user_error


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "tree", FILES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Provides a new cache directory of the user for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A new index has only words, unless a test sets its encoder; test_default_encoder.py tests the default.
    monkeypatch.setattr(code_index, "DEFAULT_ENCODER", None)
    return tmp_path / "cache" / "soft_trainer" / "search"


class StubEncoder:
    """An encoder whose embeddings are counts of letters, so similar texts are similar. It records what it encodes."""

    weights, code_side = 1.0, ""
    runtime = "torch"

    def __init__(self, name, truncate_dim=None):
        self.name, self.truncate_dim = name, truncate_dim

    @property
    def fingerprint(self):
        return f"{self.name} {self.weights} {self.code_side}"

    @property
    def dimensions(self):
        return self.truncate_dim or 16

    def encode(self, texts, side, languages=None):
        return self.queries(texts) if side == "query" else self.codes(texts, languages)

    def queries(self, texts):
        return self._embed(texts)

    def codes(self, texts, languages):
        self.encoded.extend(texts)
        return self._embed(texts)

    def _embed(self, texts):
        counts = np.array([[text.lower().count(letter) + 0.1 for letter in "abcdefghijklmnop"] for text in texts])
        counts[:, 0] *= self.weights
        counts = counts[:, : self.truncate_dim]
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def stub(monkeypatch):
    """Replaces the encoder of indexes by a stub. Returns the stub's class, which a test may change."""

    class Stub(StubEncoder):
        encoded = []

    monkeypatch.setattr(text_encoder, "open_encoder", lambda name, dim=None, **way: Stub(name, dim))
    return Stub


@pytest.fixture
def command(capsys):
    """Runs `soft-trainer NAME ...` in this process. Returns the exit code, standard output and standard error."""

    def run(name, *words):
        module = importlib.import_module(f"soft_trainer.cli.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        code = 0
        try:
            with exit_on_user_error():
                code = module.run(parser.parse_args([str(word) for word in words])) or 0
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return run
