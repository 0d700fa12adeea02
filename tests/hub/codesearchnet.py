"""CodeSearchNet in the forms in which the Hub serves it: Parquet with a card, or a script and a branch of Parquet."""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from server import WRITE_TOKEN

from soft_trainer.data.layouts.codesearchnet import HUB_COLUMNS

NAME = "code-search-net/code_search_net"
SCRIPT = {"code_search_net.py": b"raise SystemExit", "README.md": b"---\nlicense: other\n---\n"}
ON_MAIN = "{config}/{split}-00000-of-00001.parquet"
ON_BRANCH = "{config}/{split}/0000.parquet"
SPLITS = ("train", "validation", "test")


def card(*configs: str) -> dict[str, bytes]:
    """Returns a data set card that lists the files of each configuration and split, as `push_to_hub` writes it."""
    files = {config: [{"split": split, "path": f"{config}/{split}-*"} for split in SPLITS] for config in configs}
    header = {"configs": [{"config_name": config, "data_files": parts} for config, parts in files.items()]}
    return {"README.md": f"---\n{yaml.safe_dump(header)}---\n".encode()}


def parquet_files(parts: Sequence[list[dict]], layout: str, *configs: str) -> dict[str, bytes]:
    """Returns a Parquet file for each configuration and split, with the Hub's columns and all rows in Ruby."""
    theirs = {ours: column for column, ours in HUB_COLUMNS.items()}
    files = {}
    for split, part in zip(SPLITS, parts, strict=True):
        rows = [row | {"language": "ruby", "partition": split} for row in part]
        table = [{theirs.get(name, name): value for name, value in row.items()} for row in rows]
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(table), file)
        files |= {layout.format(config=config, split=split): file.getvalue() for config in configs}
    return files


def publish(url: str, files: dict[str, bytes], branch: str | None = None) -> None:
    """Commits files to the data set on the loopback Hub."""
    api = HfApi(url, token=WRITE_TOKEN)
    api.create_repo(NAME, repo_type="dataset", exist_ok=True)
    commit = [CommitOperationAdd(name, content) for name, content in files.items()]
    if branch:
        api.create_branch(NAME, branch=branch, repo_type="dataset")
        # The branch for Parquet files has no file in common with main.
        copied = {*api.list_repo_files(NAME, repo_type="dataset")} - files.keys() - {".gitattributes"}
        commit += [CommitOperationDelete(name) for name in copied]
    api.create_commit(NAME, commit, commit_message="Data", repo_type="dataset", revision=branch)
