"""Report on finished runs, from their own records: report.md, report.csv and the page report.html with pictures.

soft-trainer report OUTPUT_DIRS --output_dir report
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "folders", metavar="OUTPUT_DIRS", nargs="+", help="output folders of runs, or folders of such folders"
    )
    parser.add_argument("--output_dir", default="report", help="where to write (default: report)")


def run(arguments: argparse.Namespace) -> None:
    """Writes the report and prints its first table."""
    # Imported here, so that --help does not wait for torch.
    from soft_trainer.evaluation.figures import new_figure
    from soft_trainer.studies.report.report import make_report, markdown, sections, write_report

    new_figure(1, 1)  # reports a missing matplotlib before anything is computed
    report = make_report(arguments.folders)
    for line in report.left_out:
        sys.stderr.write(f"left out: {line}\n")
    sys.stdout.write(f"{markdown(sections(report)[0].table)}\n")
    for path in write_report(report, arguments.output_dir):
        sys.stderr.write(f"Written to {path}\n")
