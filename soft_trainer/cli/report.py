"""Report on finished runs in a Markdown page with tables, paired tests and figures.

soft-trainer report outputs/my-study
soft-trainer report outputs/my-study --baseline infonce --output_dir report
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer report` to a parser."""
    add = parser.add_argument
    add("folders", metavar="OUTPUT_DIRS", nargs="+", help="output folders of runs, or folders that contain them")
    add("--baseline", metavar="NAME", help="method to compare the others with (default: InfoNCE)")
    add("--output_dir", default="report", help="output folder (default: report, in the present folder)")


def run(arguments: argparse.Namespace) -> None:
    """Writes a report on finished runs and prints its Markdown."""
    # Imported here, so that --help does not wait for torch.
    from soft_trainer.studies.report import write_report

    page = write_report(arguments.folders, arguments.output_dir, arguments.baseline)
    sys.stdout.write(page.read_text(encoding="utf-8"))
    sys.stderr.write(f"Written to {page}\n")
