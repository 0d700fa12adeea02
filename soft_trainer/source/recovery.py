"""Blanks what a grammar cannot parse, so that the functions in the rest of the file are found.

Most grammars skip a syntax error. Kotlin's often loses the rest of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_PARSES = 200
# A line that belongs to the line above it although it is not indented further.
_GOES_ON = re.compile(rb"\s*(?:[{})\]]|(?:catch|elif|else|elsif|end|ensure|except|finally|rescue|when|while)\b)")
_ATTRIBUTE = re.compile(rb"\s*(?:@|#?\[)")

# A class's name, the bracket at the end of a line, and any other byte.
_NOT_NAME = re.compile(rb"(\b(?:class|enum|impl|interface|namespace|object|record|struct|trait)\s+\w+|\{\s*$)|.")

Block = list[int]  # the numbers of lines


def hides_functions(root: Node, functions: Collection[str]) -> bool:
    """Returns True if a syntax error outside functions has several lines, or if the end of a definition is missing."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.is_error and node.end_point.row > node.start_point.row:
            return True
        if node.is_missing and node.type in ("}", "end"):
            return True
        if not node.has_error:
            continue
        if node.type not in functions:
            stack += node.children
        else:  # a function without an end holds the rest of the file
            last = node.children[-1]
            stack += [end for end in (last, *last.children[-1:]) if end.is_missing]
    return False


def without_errors(source: bytes, parse: Callable[[bytes], Node | None], functions: Collection[str]) -> bytes:
    """Blanks the smallest blocks with a syntax error, where a function is the smallest. All positions stay.

    A block is a line and the lines below it that are indented further.

    Args:
        parse: returns the root of a text's tree, or None if parsing takes too long.
        functions: the types of the nodes of functions.
    """
    lines = source.split(b"\n")
    blanks = [b" " * len(line) for line in lines]
    kept = blanks.copy()
    parses = 0

    def put(block: Block, texts: list[bytes]) -> None:
        for number in block:
            kept[number] = texts[number]

    def keep(block: Block, texts: list[bytes] = lines) -> Node | None:
        """Keeps a block's lines if the text then has no error. Returns the tree, or None."""
        nonlocal parses
        parses += 1
        put(block, texts)
        root = parse(b"\n".join(kept)) if parses <= MAX_PARSES else None
        if root and not root.has_error:
            return root
        put(block, blanks)
        return None

    def add(blocks: list[Block]) -> None:
        """Keeps the blocks that can be parsed and, of the others, the lines and blocks that can."""
        together = list(chain.from_iterable(blocks))
        if keep(together):
            return
        if len(blocks) > 1:
            middle = len(blocks) // 2
            add(blocks[:middle])
            add(blocks[middle:])
            return
        head = next((number for number in together if lines[number].rstrip().endswith(b"{")), together[0])
        least = _indentation(lines[together[0]])
        inner = [number for number in together if number > head and _indentation(lines[number]) > least]
        outer = sorted({*together} - {*inner})
        if not inner:
            return
        # If the head cannot be parsed, a class is still known by its name.
        names = [_NOT_NAME.sub(lambda found: found[1] or b" " * len(found[0]), line) for line in lines[: head + 1]]
        root = keep(outer) or keep(outer, names + lines[head + 1 :])
        if root is None:
            return
        node = root.descendant_for_point_range((outer[0], least), (outer[-1], len(lines[outer[-1]].rstrip())))
        if any(f"({kind}" in str(node) for kind in functions):
            put(outer, blanks)
        else:
            add(_blocks(lines, inner))

    add(_blocks(lines, range(len(lines))))
    return b"\n".join(kept)


def _blocks(lines: list[bytes], numbers: Iterable[int]) -> list[Block]:
    """Divides lines into blocks."""
    numbers = list(numbers)
    least = min(_indentation(lines[number]) for number in numbers)
    blocks = []
    for number in numbers:
        line = lines[number]
        inside = _indentation(line) > least or _GOES_ON.match(line)
        if blocks and (inside or _ATTRIBUTE.match(lines[blocks[-1][-1]])):
            blocks[-1].append(number)
        else:
            blocks.append([number])
    return blocks


def _indentation(line: bytes) -> float:
    """Returns the number of blanks before a line's text. A blank line is indented further than any other line."""
    text = line.lstrip()
    return len(line) - len(text) if text else math.inf
