"""Prints messages, tables and errors for people, from the main process only."""

from __future__ import annotations

import contextlib
import difflib
import errno
import sys
from collections.abc import Iterable, Iterator, Sequence

from soft_trainer.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def print_on_main(text: str) -> None:
    """Writes `text` to standard error, on the main process only; it replaces the line of a progress bar."""
    if _is_main():
        sys.stderr.write(f"\r{text}\n")
        sys.stderr.flush()


def _is_main() -> bool:
    if "torch" not in sys.modules:  # then there is no process group, and importing torch takes seconds
        return True
    from soft_trainer import distributed

    return distributed.rank_and_world_size()[0] == 0


def table(headers: Sequence[str], rows: Sequence[Sequence], floats: str = ".3f") -> str:
    """Returns a Markdown table: numbers right-aligned, floats with three digits, None as an empty cell."""
    from tabulate import tabulate  # slow to import

    return tabulate(rows, headers, tablefmt="pipe", floatfmt=floats, missingval="", intfmt=",")


def duration(seconds: float) -> str:
    """Formats a duration for people: 8 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: suggests the closest known one, or --help."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "; --help lists them all"


# A file where a folder is expected, a folder where a file is expected, or a place that the user may not write to.
WRONG_PLACE = (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns an error that the user can solve into one line and an exit code.

    The code is 2 for a UserError, a full disk or a path that cannot be written to. It is 130 for Ctrl-C, with the
    message of the KeyboardInterrupt as the line.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        for bar in list(getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())):
            bar.close()  # a bar that closes later would appear below the line
        print_on_main(str(interruption) or "interrupted")
        sys.exit(130)
    except (UserError, OSError) as error:
        wrong_place = isinstance(error, WRONG_PLACE) and error.filename is not None
        if isinstance(error, OSError) and not wrong_place and error.errno not in FULL_DISK:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
