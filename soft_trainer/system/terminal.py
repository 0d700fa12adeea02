"""Prints messages, tables, progress and errors for people to read, from the main process only."""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from soft_trainer.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LINE_SECONDS = 10  # between two progress lines, if no progress bar is shown


def shows_bars() -> bool:
    """Returns True if standard error is a terminal or a notebook cell, where a progress bar is readable."""
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Returns True in a notebook's kernel, which can display HTML."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and hasattr(get_shell(), "kernel")


def quiet_libraries() -> None:
    """Silences a needless warning from `transformers` and, if there is no terminal, the libraries' progress bars.

    Call this function before importing those libraries. Only `huggingface_hub` may be imported earlier.
    """
    if not shows_bars():
        for name in ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
        if hub := sys.modules.get("huggingface_hub.utils"):  # it has read the variable already
            hub.disable_progress_bars()
    # It warns that checkpoints with equal modification times are ordered by step, which is what we want.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)


def print_on_main(text: str) -> None:
    """Writes `text` to standard error, on the main process only. The text overwrites an unfinished progress bar.

    A notebook shows standard error in red, so the text goes to the cell's output instead.
    """
    if _is_main() and in_notebook():
        sys.stdout.write(f"{text}\n")
    elif _is_main():
        sys.stderr.write(f"\r{text}\n" if shows_bars() else f"{text}\n")
        sys.stderr.flush()


def progress_bar(label: str | None, total: int, unit: str):
    """Returns a `tqdm` bar, which only the main process shows. Without a terminal, it is a line every ten seconds.

    Args:
        label: the text before the bar, or None to show nothing.
        total: the number of items.
        unit: the singular noun for an item.
    """
    from tqdm.auto import tqdm  # slow to import

    hidden = label is None or not _is_main()
    seconds = 0.1 if shows_bars() else LINE_SECONDS
    return tqdm(total=total, desc=label, disable=hidden, leave=False, unit=unit, mininterval=seconds, delay=seconds)


def _is_main() -> bool:
    if "torch" not in sys.modules:  # without torch, no process group exists, and importing torch would take seconds
        return True
    from soft_trainer.system import distributed

    return distributed.is_main()


def table(headers: Sequence[str], rows: Sequence[Sequence], floats: str = ".3f", text: Sequence[str] = ()) -> str:
    """Formats rows as a Markdown table. Numbers are right-aligned, and None becomes an empty cell.

    Args:
        floats: the format of floats, by default three decimals.
        text: the headers of columns to treat as text, even if the values look like numbers.
    """
    from tabulate import tabulate  # slow to import

    unparsed = []
    if rows:  # without rows, tabulate has no columns to index
        unparsed = list(map(headers.index, text))
    return tabulate(
        rows, headers, tablefmt="pipe", floatfmt=floats, missingval="", intfmt=",", disable_numparse=unparsed
    )


def shortened(text: str, width: int = 100) -> str:
    """Shortens a text to one line of at most `width` characters. A URL is cut at its start: the end says more."""
    # `textwrap.shorten` drops a long text without spaces, such as a url or a Chinese docstring.
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    if "://" in text and " " not in text:
        return f"…{text[1 - width :]}"
    return f"{text[: width - 1].rstrip()}…"


def duration(seconds: float) -> str:
    """Formats seconds as a rounded duration, such as `8 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def nearest(name, known: Iterable[str], otherwise: str = "", number: int = 1) -> str:
    """Suggests known names similar to a misspelt `name`, as the end of an error message: `; did you mean 'bm25'?`.

    Args:
        otherwise: the text to return if no name is similar, without the semicolon.
        number: the maximum number of suggestions. With more than one, `otherwise` follows them.
    """
    near = difflib.get_close_matches(str(name), list(known), n=number)
    if not near:
        return f"; {otherwise}" if otherwise else ""
    suggestion = f"; did you mean {' or '.join(map(repr, near))}?"
    if number == 1:
        return suggestion
    return f"{suggestion} {otherwise[0].upper()}{otherwise[1:]}"


def nearest_file(path: str) -> str:
    """Returns the end of a message about a missing file: a similar name in its folder, or "" if there is none."""
    folder, name = os.path.split(path)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.8)
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


TRACEBACK = "SOFT_TRAINER_TRACEBACK"  # the environment variable that shows where an error came from


@contextlib.contextmanager
def one_line_errors(until: Callable[[], bool] = bool) -> Iterator[None]:
    """Turns any exception into a one-line UserError. Once `until()` is true, exceptions pass through unchanged.

    Raises:
        UserError: the `with` block raised an exception, and SOFT_TRAINER_TRACEBACK is not set. The message has the
            exception's type and text, and the file and line of the last frame.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK) or until():
            raise
        text = str(error)
        if "Traceback (most recent call last)" in text:  # from a data worker; the last line is the message
            text = text.strip().splitlines()[-1]
        words = " ".join(text.split())
        frames = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
        raise UserError(
            f"{type(error).__name__}: {words} ({last.filename}:{last.lineno}; {TRACEBACK}=1 shows the traceback)"
        ) from error


# A file instead of a folder, a folder instead of a file, or a location that the user may not write to.
WRONG_PATH = (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Prints an error that the user can fix on one line, then exits.

    The exit code is 2 for a UserError, a full disk or a path that cannot be written to. Ctrl-C exits with code 130
    and prints the message of the KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        for bar in list(getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())):
            bar.close()  # a bar that closes later would appear below the line
        print_on_main(str(interruption) or "interrupted")
        sys.exit(130)
    except (UserError, OSError) as error:
        wrong_path = isinstance(error, WRONG_PATH) and error.filename is not None
        if isinstance(error, OSError) and not wrong_path and error.errno not in FULL_DISK:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    finally:
        # After Ctrl-C in an `exec` of text, as in an import of SciPy, `python -m` would end itself with the signal,
        # even if the exception was handled. The next `exec` of text clears that.
        exec("")
