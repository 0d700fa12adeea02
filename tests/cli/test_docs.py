"""The programs accept every command in the documentation, and commands without requirements are run."""

import re
import shlex
from itertools import chain
from pathlib import Path

import pytest

from soft_trainer.cli.__main__ import parse_command, run_command
from soft_trainer.options.recipes import recipe_path
from soft_trainer.studies.study import read_study

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")]
PAGES += ROOT.glob("skills/*/SKILL.md")
BLOCK = re.compile(r"^```(?:bash|sh|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Programs of others, whose options are not checked.
OTHERS = {".", "cd", "eval", "export", "git", "hf", "mteb", "pip", "pytest", "ruff"}


def commands_of(text: str) -> list[list[str]]:
    """Returns the commands in all shell blocks of a page, split into words, without comments and variables."""
    found = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
            lexer.whitespace_split, words = True, []
            for word in [*lexer, "&&"]:
                if set(word) <= set("&|;"):
                    found += [words] if words else []
                    words = []
                elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                    words.append(word)
    return found


def ours(words: list[str]) -> list[str] | None:
    """Returns the words that a command passes to `soft-trainer`, or None if it runs another program.

    Raises:
        AssertionError: the program, module or script is not listed here.
    """
    program, *rest = words
    if program == "soft-trainer":
        return rest
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        launched = launch_command_parser().parse_args(rest[1:])
        if launched.config_file:
            assert (ROOT / launched.config_file).is_file(), launched.config_file
        if launched.module:
            assert launched.training_script == "soft_trainer.cli", f"{launched.training_script} is not launched"
            return launched.training_script_args
        return ours(["python", launched.training_script, *launched.training_script_args])
    if program in ("python", "python3"):
        if rest[0] == "run_codesearch.py":
            return ["train", *rest[1:]]
        assert rest[:2] == ["-m", "venv"] or (ROOT / rest[0]).is_file(), f"{' '.join(words)}: no such script"
        return None
    assert program in OTHERS, f"{' '.join(words)}: an unknown program"
    return None


def check(words: list[str]) -> None:
    """Parses a `soft-trainer` command as it would be parsed when run, but without a GPU."""
    words = [*words, "--use_cpu", "true"] if words[0] in ("train", "simcse") else words
    if words[-1] in ("--help", "--version"):
        return
    _, (first, *_) = parse_command(words)
    if words[0] == "study":
        changes = dict(word.split("=", 1) for word in first.set)
        assert read_study(recipe_path(first.config), changes).runs


FOR_CONTRIBUTORS = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = ("soft_trainer", "tests", "benchmarks", "docs")


def mentioned_files() -> list[str]:
    """Returns the paths of the files that CONTRIBUTING.md mentions."""
    names = re.findall(r"`((?:soft_trainer|tests|recipes)/[\w./]+|[\w/]+\.py)`", FOR_CONTRIBUTORS)
    return [name for name in names if "NAME" not in name]


def paths_of(name: str) -> list[Path]:
    """Returns the paths that end with a name, such as `options/fields.py`."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob(name)]
    return found + [path for path in [ROOT / name] if path.exists()]


COMMANDS = {str(page.relative_to(ROOT)): commands_of(page.read_text()) for page in PAGES}


def test_there_are_commands_and_files_to_check_and_contributors_find_the_files():
    assert sum(map(len, COMMANDS.values())) > 100 and len(mentioned_files()) > 10
    assert not [name for name in mentioned_files() if not paths_of(name)]


def test_contributors_find_names_in_the_files_that_the_page_gives():
    named = re.findall(r"`(\w+)` in\s+`([\w./]+\.py)`", FOR_CONTRIBUTORS)
    assert len(named) > 50
    missing = []
    for name, file in named:
        texts = [path.read_text() for path in paths_of(file)]
        if not any(re.search(rf"\b{name}\b", text) for text in texts):
            missing.append(f"{name} in {file}")
    assert not missing


def test_an_answer_ends_within_six_files():
    table = FOR_CONTRIBUTORS.split("| question | where |")[1].split("\n\n")[0]
    for row in table.splitlines()[3:]:  # the first row refers to the sections below
        files = set(re.findall(r"`([\w./]+\.py)`", row))
        assert 1 <= len(files) <= 6, row
        assert all((ROOT / name).exists() or (ROOT / "soft_trainer" / name).exists() for name in files), row


@pytest.mark.parametrize("page", [page for page, commands in COMMANDS.items() if commands])
def test_the_commands_of_a_page_are_taken(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"soft_trainer.cli.{command}.check", lambda *options: None)  # the rows need not exist
    refused = {}
    for words in COMMANDS[page]:
        try:
            if (command := ours(words)) is not None:
                check(command)
        except (Exception, SystemExit) as error:
            refused[" ".join(words)] = repr(error)
    assert not refused


@pytest.mark.slow
def test_commands_that_need_nothing_run(monkeypatch, tmp_path, capsys):
    ran = 0
    for words in chain.from_iterable(COMMANDS.values()):
        command = ours(words) if {"--help", "--version", "--dry_run"} & {*words} else None
        if command is None:
            continue
        monkeypatch.chdir(tmp_path)
        try:
            code = run_command(command)
        except SystemExit as stopped:  # --help
            code = stopped.code
        assert not code and len(capsys.readouterr().out.splitlines()) > 1, words
        monkeypatch.undo()
        ran += 1
    assert ran
