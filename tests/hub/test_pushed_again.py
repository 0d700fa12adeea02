"""After pushes of different encoders to one repository, it has the files of the last one, and its users' files."""

import random
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from server import WRITE_TOKEN

from soft_trainer.hub.push import Repository

REPO = "ann/encoder"
# Files of a kind: a folder has some of them or none.
KINDS = [
    ("config.json", "model.safetensors"),
    ("adapter_config.json", "adapter_model.safetensors"),
    ("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.txt", "spiece.model"),
    (
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "2_Normalize/config.json",
    ),
    ("onnx/model.onnx", "onnx/settings.json"),
    ("eval_results.json", "train_results.json", "training.png", "all_results.json"),
]


def files_of(repo: str) -> dict[str, str]:
    """Returns the hash of each file in a repository, except `.gitattributes`."""
    tree = HfApi(token=WRITE_TOKEN).list_repo_tree(repo, recursive=True)
    return {each.path: each.blob_id for each in tree if hasattr(each, "blob_id") and each.path != ".gitattributes"}


def make_folder(folder: Path, draw) -> Path:
    """Writes a random choice of an encoder's files, with random content, and a card."""
    names = {"README.md", *draw.choice((KINDS[0], KINDS[1], (*KINDS[0], *KINDS[2])))}
    for kind in KINDS[3:]:
        names.update(draw.sample(kind, draw.randint(0, len(kind))))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"a": {draw.random()}}}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_pushes(here, tmp_path, seed):
    draw = random.Random(seed)
    api = HfApi(token=WRITE_TOKEN)
    api.create_repo(REPO)
    for name in ("notes.md", "assets/logo.svg"):
        api.upload_file(path_or_fileobj=b"mine", path_in_repo=name, repo_id=REPO)
    of_users = files_of(REPO)
    for number in range(4):
        folder = make_folder(tmp_path / str(number), draw)
        Repository(REPO, WRITE_TOKEN).push(folder)
        fresh = f"ann/fresh-{number}"
        Repository(fresh, WRITE_TOKEN).push(folder)
        expected = files_of(fresh)
        found = files_of(REPO)
        assert found.keys() - expected.keys() == of_users.keys()
        assert expected.keys() <= found.keys()
