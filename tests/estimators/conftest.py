import pytest


@pytest.fixture(scope="session")
def encoder_dir(_model, tokenizer, profile, tmp_path_factory):
    """The tiny encoder as a folder, with its profile."""
    from soft_trainer.hub.export import export_encoder

    return export_encoder(_model, tokenizer, profile, tmp_path_factory.mktemp("encoder"))
