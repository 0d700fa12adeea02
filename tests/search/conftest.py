"""Small trees to index, a stub for an encoder, and the commands without the package's own front end."""

import argparse
import importlib
import textwrap

import numpy as np
import pytest

from soft_trainer.search import vectors
from soft_trainer.terminal import exit_on_user_error

FILES = {
    "src/shop/cart.py": '''
        """A shopping cart."""

        CURRENCY = "EUR"

        class ShoppingCart:
            """Holds what a customer wants to buy."""

            def __init__(self):
                self.items = []

            def add_item(self, item, count=1):
                """Put an item into the cart."""
                self.items.append((item, count))

            def total_price(self):
                """Sum up the prices of all items."""
                return sum(item.price * count for item, count in self.items)
        ''',
    "src/shop/dates.py": '''
        import datetime

        def parse_date(text):
            """Parse an ISO date."""
            return datetime.date.fromisoformat(text)

        def format_date(date):
            return date.isoformat()
        ''',
    "src/server.go": """
        package main

        // Server answers requests.
        type Server struct {
            Port int
        }

        // ListenAndServe opens the port and waits for requests.
        func (s *Server) ListenAndServe() error {
            return listen(s.Port)
        }
        """,
    "tests/test_cart.py": """
        from shop.cart import ShoppingCart

        def test_total_price():
            assert ShoppingCart().total_price() == 0
        """,
    "README.md": """
        # Shop

        Sells things. The checkout needs a payment provider.
        """,
    ".gitignore": "build/\n*.log\n",
    "build/out.py": "def parse_date_generated(): pass\n",
    "debug.log": "parse_date failed\n",
    ".env": "PASSWORD=secret_parse_date\n",
}


def write_tree(folder, files):
    """Writes files, texts without their common indentation."""
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            target.write_bytes(text)
        else:
            target.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "tree", FILES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache directory, a new one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "soft_trainer" / "search"


class StubEncoder(vectors.LazyEncoder):
    """Embeds a text as counts of letters, so that like texts have like embeddings; counts what it encodes."""

    encoded: list = []
    weights = 1.0

    @property
    def loaded(self):
        raise AssertionError("the stub loads nothing")

    def queries(self, texts):
        return self._embed(texts)

    def codes(self, texts, languages):
        self.encoded.extend(texts)
        return self._embed(texts)

    def _embed(self, texts):
        counts = np.array([[text.lower().count(letter) + 0.1 for letter in "abcdefghijklmnop"] for text in texts])
        counts[:, 0] *= self.weights
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def stub(monkeypatch):
    """Puts the stub in place of the encoder; gives its class."""
    monkeypatch.setattr(vectors, "LazyEncoder", StubEncoder)
    StubEncoder.encoded, StubEncoder.weights = [], 1.0
    return StubEncoder


@pytest.fixture
def command(capsys):
    """Runs `soft-trainer NAME ...` in this process; gives exit code, standard output and standard error."""

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
