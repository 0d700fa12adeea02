"""If the Hub does not respond, one line reports this at once, and files are read from the cache."""

import logging
import socket

import pytest
from huggingface_hub import constants
from refusals import refused

from soft_trainer.data.layouts.codesearchnet import load_hub
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.hub.files import repository_file


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Makes clients use a Hub that does not respond, with an empty cache. Returns the folder of the cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "load, name",
    [(load_encoder, "ann/encoder"), (lambda name: load_hub(name, "ruby"), "ann/rows")],
    ids=["encoder", "rows"],
)
def test_an_unreachable_hub_is_asked_once_and_one_line_advises(load, name, nobody, caplog):
    caplog.set_level(logging.WARNING)
    with refused(name, "cannot be reached", "model=", "data_dir=", "HF_HUB_OFFLINE=1"):
        load(name)
    assert not caplog.records  # neither "Retrying in 8s" nor a guess about files
    assert not constants.HF_HUB_OFFLINE  # a later call asks again


def test_a_cached_encoder_is_read_without_the_hub(nobody, caplog):
    snapshot = nobody / "models--ann--encoder" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = nobody / "models--ann--encoder" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert repository_file("ann/encoder", "config.json") == snapshot / "config.json"
    assert repository_file("ann/encoder", "modules.json") is None
    assert "cannot be reached" in caplog.text and "assuming that ann/encoder has no modules.json" in caplog.text
