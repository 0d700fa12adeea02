"""Messages name options as their caller writes them: `--name` in the shell, `name=` in Python."""

import ast
import re
from pathlib import Path

import pytest

import soft_trainer
from soft_trainer.cli.__main__ import run_command
from soft_trainer.errors import UserError, for_caller, messages_for_shell, name_option

PACKAGE = Path(soft_trainer.__file__).parent
# Rooms that speak to Python too, without the commands, and without the parser, which reads what a shell wrote.
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "cli" and path != PACKAGE / "options" / "parse.py"
]
OF_SHELL = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OF_PYTHON = re.compile(r"callbacks=\[|trainer\.train\(")
KNOWN = ("for_caller", "command", "append")
OF_OTHERS = ("--filter", "--no-filter", "--unshallow", "--refetch", "--files-with-matches")  # of git and rg


def texts(tree: ast.AST, above: str = ""):
    """Yields each text of a module with the function that it is passed to, except docstrings and helps of options."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.AnnAssign) and isinstance(tree, ast.ClassDef):
            continue  # the declaration of an option, whose help the documentation rewrites for Python
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield above, node.value
        elif isinstance(node, ast.List | ast.Tuple):
            yield from texts(node, "words of a command")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in KNOWN:
            yield from texts(node, getattr(node.func, "id", getattr(node.func, "attr", "")))
        else:
            yield from texts(node, above)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_message_below_the_commands_speaks_to_the_shell_alone(path):
    for place, text in texts(ast.parse(path.read_text())):
        named = [word for word in OF_SHELL.findall(text) if word not in OF_OTHERS]
        if place == "for_caller" or (place and named == [text]):
            continue
        assert not named, f"{path}: {text!r}"
        assert not OF_PYTHON.search(text), f"{path}: {text!r}"


def test_an_option_is_named_for_its_caller():
    assert name_option("bf16", True) == "bf16=True"
    assert name_option("loss", "info_nce") == 'loss="info_nce"'
    assert name_option("lora_r") == "lora_r"
    with messages_for_shell():
        assert name_option("bf16", True) == "--bf16 true"
        assert name_option("loss", "info_nce") == "--loss info_nce"
        assert name_option("lora_r") == "--lora_r"
        assert for_caller("shell", "Python") == "shell"
    assert for_caller("shell", "Python") == "Python"


def test_a_command_speaks_to_the_shell_and_the_constructor_to_python():
    with pytest.raises(UserError, match="lora_alpha: has no effect without --lora_r"):
        run_command(["train", "--lora_alpha", "8", "--use_cpu", "true"])
    with pytest.raises(UserError, match="lora_alpha: has no effect without lora_r"):
        soft_trainer.ModelArguments(lora_alpha=8)


def test_a_trainer_without_an_estimator_names_callbacks_and_a_command_an_option():
    from soft_trainer.options.resolve import resolve_loss  # imports torch

    options = soft_trainer.options.fields.SoftInfoNCEOptions(loss="soft_info_nce")
    with pytest.raises(UserError, match=r"callbacks=\[BM25Estimator\(\)\], or loss=\"info_nce\""):
        resolve_loss(options)
    with messages_for_shell(), pytest.raises(UserError, match="--estimator bm25, or --loss info_nce"):
        resolve_loss(options)
