"""Commits are read as git reads them."""

import subprocess

import pygit2
import pytest
from refusals import refused

from soft_trainer.mining.commits import query_of
from soft_trainer.source.git import message_of, open_repository

MESSAGES = {
    "UTF-8": (b"Gr\xc3\xbc\xc3\x9fe die ganze Welt\n", None),
    "Latin-1 with its header": (b"Gr\xfc\xdfe die ganze Welt\n", "ISO-8859-1"),
    "cp1251 with its header": ("Привет всему миру\n".encode("cp1251"), "windows-1251"),
    "EUC-JP with its header": ("日本語 の 説明\n".encode("euc-jp"), "EUC-JP"),
    "GB18030 with its header": ("解析 一个 日期\n".encode("gb18030"), "GB18030"),
    "two lines": (b"Parse dates that have\ntwo digits\n\nAnd more\n", None),
    "two lines, with spaces": (b"\n \nParse dates  \n that have\t\n  \t\nAnd more\n", None),
    "Windows' ends of lines": (b"Parse dates that have\r\ntwo digits\r\n\r\nAnd more\r\n", None),
    "one line": (b"Parse dates that have", None),
}


def git(folder, *words, **options):
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, **options).stdout


def test_a_repository_with_reftables_is_told_how_it_can_be_read(tmp_path):
    pygit2.init_repository(tmp_path)
    (tmp_path / ".git/config").write_text(
        "[core]\n\trepositoryformatversion = 1\n[extensions]\n\trefstorage = reftable\n"
    )
    with refused("`git clone --ref-format=files`"):
        open_repository(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESSAGES)
def test_a_subject_is_what_git_prints(tmp_path, name):
    message, encoding = MESSAGES[name]
    git(tmp_path, "init", "-q")
    tree = git(tmp_path, "write-tree").decode().strip()
    header = f"tree {tree}\nauthor A <a@b.c> 1700000000 +0000\ncommitter A <a@b.c> 1700000000 +0000\n"
    if encoding:
        header += f"encoding {encoding}\n"
    commit = git(tmp_path, "hash-object", "-t", "commit", "-w", "--stdin", input=header.encode() + b"\n" + message)
    git(tmp_path, "update-ref", "HEAD", commit.decode().strip())
    printed = git(tmp_path, "log", "-1", "--format=%s").decode()
    repository = open_repository(tmp_path)
    assert query_of(message_of(repository[repository.head.target])) == " ".join(printed.split())
