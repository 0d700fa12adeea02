"""Loads the additional evaluation sets of a run (`--eval_data_dir`): judged queries, or another project's rows.

`--eval_data_dir` accepts all that `load_rows` reads. Of rows, test is measured, otherwise valid, otherwise all rows.
Of judged queries, all splits but train are measured. A folder has one or more of these files:

    relevance.jsonl                                         judged queries: {"query": text, "url": id, "relevance":
                                                            number} on each line
    corpus.jsonl, queries.jsonl, qrels/dev.tsv, test.tsv    BEIR's layout
    test.jsonl                                              rows in CodeSearchNet's columns, as in `--data_dir`

Each file may be gzipped. `examples/published_sets.py` converts CoSQA, CoSQA+ and CodeSearchNet's challenge. The corpus
is the folder's codebase, such as codebase.jsonl. Without it, the corpus for test.jsonl consists of the functions of
valid and test, and the corpus for judged queries is the run's corpus.

An unjudged code has relevance 0. Several judgments of the same query and code are averaged. The gain in nDCG is the
relevance, as in trec_eval and mteb.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from datasets import Dataset

from soft_trainer.data.folders import SPLITS, list_files
from soft_trainer.data.layouts import JUDGED, LAYOUTS, TABLES
from soft_trainer.data.layouts.tables import row_files
from soft_trainer.data.load import read_source
from soft_trainer.data.make_splits import Context
from soft_trainer.data.row_checks import check_split, drop_unusable_rows
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.spec import option_specs
from soft_trainer.run.folder import record_of
from soft_trainer.shell.rows import column_names
from soft_trainer.system.files import DEPENDS_ON
from soft_trainer.system.fingerprints import source_fingerprint
from soft_trainer.system.terminal import print_on_main

DIVIDING = ("test_fraction", "split_seed", "group_column")  # the options that divide rows into train, valid and test


def load_evaluation_sets(
    arguments: DataArguments,
    profile: EncoderProfile,
    codebase: Dataset | None = None,
    trained: Mapping | None = None,
) -> dict[str, Split]:
    """Loads the evaluation sets in the folders that `--eval_data_dir` lists, keyed by name.

    A set is named after its folder. If a folder has several sets, they are called FOLDER-dev, FOLDER-test and so on.

    Args:
        codebase: the run's corpus, for judged queries in a folder without a corpus.
        trained: the result of `training_of`.

    Raises:
        UserError: a folder has no evaluation set, a file cannot be read, rows are unusable (see `check_split`), or two
            sets have the same name. The message includes the file and the row.
    """
    sets: dict[str, Split] = {}
    taken = {*SPLITS}
    for name in arguments.languages:
        taken.update(f"{split}-{name}" for split in SPLITS)
    folders = [Path(name.strip()) for name in (arguments.eval_data_dir or "").split(",") if name.strip()]
    context = Context(
        column_names(arguments)._replace(
            negatives=None, group=None, shared=len(folders) > 1 or arguments.data_dir is not None
        ),
        needed=(*SPLITS[1:], JUDGED.name),
        division=None,
        check=not arguments.drop_unusable,
        run_corpus=codebase,
        languages=arguments.languages,
    )
    for folder in folders:
        for part, split in (parts := _parts(folder, context, trained)).items():
            name = folder.resolve().name + (f"-{part}" if len(parts) > 1 else "")
            if name in taken or name in sets:
                raise UserError(f"eval_data_dir={folder}: another set is already called {name}; rename the folder")
            try:
                if arguments.drop_unusable:
                    split = drop_unusable_rows(split, name, profile)[0]
                check_split(split, "test", profile)
            except UserError as error:
                raise UserError(f"{folder}, {part}: {error}") from None
            sets[name] = split
            print_on_main(f"{name}: {len(split.queries):,} queries ({part}) and {len(split.corpus):,} functions")
    return sets


def _parts(folder: Path, context: Context, trained: Mapping | None) -> dict[str, Split]:
    """Loads the sets of one source: all judged queries and, of rows, test, otherwise valid, otherwise all rows.

    Raises:
        UserError: the source cannot be read. For a folder without a known file, the message lists what is known.
    """
    files = list_files(folder)
    looked_for = ""
    if any(layout.finds(files) for layout in LAYOUTS if layout is not TABLES):  # columns with fixed names
        context = context._replace(names=context.names._replace(shared=True))
    elif folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        looked_for = (
            ". No evaluation set found: expected test.jsonl, relevance.jsonl, or BEIR's files, plain or as .gz. The "
            "folder contains "
            f"{', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}"
        )
    try:
        splits = read_source(folder, context)
    except UserError as error:
        raise UserError(f"eval_data_dir={error}{looked_for}") from None
    splits.pop("train", None)
    if not splits:
        raise UserError(f"{folder}: has judgments only for train, not for dev or test")
    parts = {"dev" if name == "valid" else name: split for name, split in splits.items() if split.judgments.graded}
    if not parts or "test" in splits:
        name = "test" if "test" in splits else "valid"
        parts[name] = splits[name]
        if not parts[name].judgments.graded:
            warn_of_trained_rows("eval_data_dir", folder, trained, None)
    return parts


def training_of(encoder: str | None) -> Mapping:
    """Returns what an encoder's training depended on, from the `run.json` in its folder, or {}."""
    return record_of(Path(encoder)).get(DEPENDS_ON, {}) if encoder else {}


def warn_of_trained_rows(option: str, source: str | Path, trained: Mapping | None, arguments) -> None:
    """Warns if an encoder was trained on rows of a source that is measured whole, or is divided in another way.

    Args:
        option: the option that names the source.
        trained: the result of `training_of`.
        arguments: the `DataArguments` that divide the source, or None if it is measured whole.
    """
    if not trained or not Path(source).exists() or row_files(list_files(source)).keys() & {"valid", "test"}:
        return
    then = {name: trained.get(name, option_specs(DataArguments)[name].default) for name in DIVIDING}
    divided = arguments and {name: getattr(arguments, name) for name in DIVIDING}
    # For several sources, `data_dir` is a list of hashes.
    if divided != then and source_fingerprint(source) in trained.get("data_dir", ()):
        settings = ", ".join(f"{name}={value}" for name, value in then.items() if value is not None)
        print_on_main(
            f"warning: {option}={source}: the encoder was trained on rows from this folder; to measure only its test "
            f"split, set data_dir={source}, {settings}"
        )
