"""Pushes a run's rows to the Hub as a data set with a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from datasets import Dataset, DatasetInfo, Features, concatenate_datasets
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard, DatasetCardData
from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.data.column_names import NEGATIVES, SCORES
from soft_trainer.data.columns import known_columns, row_texts
from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts.codesearchnet import FEATURES, FILE_FEATURES, HUB_SPLITS
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.files import PUSHED_ROWS, ROW_FILES, reporting_disk_errors, write_rows, write_text
from soft_trainer.hub.push import Repository
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main, table

USES = {
    "train": "pairs to train on",
    "valid": "queries used to choose the best checkpoint",
    "test": "queries for the reported results",
    "codebase": "the corpus: the functions that are ranked for each query",
}
_TEMPLATE = Path(__file__).with_name("data_card.md.jinja")


def push_data(splits: Mapping[str, Split], arguments: DataArguments, args: TrainingArguments) -> None:
    """Pushes a run's rows to the Hub from the main process, if `push_data_to_hub` is set.

    Raises:
        UserError: the push failed; see `Repository.push`.
    """
    if arguments.push_data_to_hub and distributed.is_main():
        folder = write_data(pushed_tables(splits), arguments, Path(args.output_dir) / PUSHED_ROWS)
        print_on_main(f"Rows pushed: {repository_of_rows(arguments, args).push(folder, 'Rows of a run')}")


def repository_of_rows(arguments: DataArguments, args: TrainingArguments) -> Repository:
    """Returns the repository that `push_data_to_hub` names. Raises UserError if its name is invalid."""
    return Repository(arguments.push_data_to_hub, args.hub_token, args.hub_private_repo, repo_type="dataset")


def pushed_tables(splits: Mapping[str, Split]) -> dict[str, Dataset]:
    """Returns a run's rows as `{split: table}`: the pairs of each split, and the corpus as `codebase`.

    Raises:
        UserError: a split has judgments, which rows of one query and one function cannot represent.
    """
    tables = {}
    corpora = []
    for name, split in splits.items():
        if split.judgments.graded:
            raise UserError(
                f"push_data_to_hub can push only pairs of a query and a function, but {name} has judgments"
            )
        tables[name] = split.to_pairs()
        if name == "train":
            for column, values in _lists_of_queries(split).items():
                tables[name] = tables[name].add_column(column, values)
        else:
            corpora.append(split.corpus)
    for name in ("valid", "test"):
        parts = [tables.pop(key) for key in splits if key.startswith(f"{name}-")]  # a part for each language
        if parts:
            tables[name] = concatenate_datasets(parts)
    if corpora:
        distinct = {corpus._fingerprint: corpus for corpus in corpora}
        tables["codebase"] = concatenate_datasets(list(distinct.values()))
    return tables


def _lists_of_queries(split: Split) -> dict[str, list[list]]:
    """Returns each query's list of negatives, as texts, and of the scores of its positive and its negatives.

    Columns that the split lacks are skipped.
    """
    judgments = split.judgments
    known = judgments.scores().todok()
    scores = [[known.get(pair, None)] for pair in map(tuple, judgments.pairs().tolist())]
    columns = {}
    if judgments.negatives is not None:
        texts = list(row_texts(split.corpus, known_columns(split.corpus, ("code", "code_tokens"))[0]))
        columns[NEGATIVES] = []
        for query, row in enumerate(judgments.negatives):
            codes = row.indices.tolist()
            columns[NEGATIVES].append([texts[code] for code in codes])
            scores[query] += [known.get((query, code), None) for code in codes]
    if known.nnz:
        columns[SCORES] = scores
    return columns


def write_data(data: Mapping[str, Dataset], arguments: DataArguments, folder: str | Path) -> Path:
    """Writes the rows to `SPLIT.jsonl.gz` files with CodeSearchNet's columns, and their card to `README.md`.

    If a split has a column `source`, `negatives` or `scores`, all splits get it. An earlier run's splits are deleted.

    Returns:
        The folder.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    folder = Path(folder)
    present = {name for rows in data.values() for name in rows.column_names}
    features = Features({name: kind for name, kind in FILE_FEATURES.items() if name in FEATURES or name in present})
    languages = arguments.languages or languages_in(data)
    files = [{"split": HUB_SPLITS.get(split, split), "path": f"{split}.jsonl.gz"} for split in data]
    header = DatasetCardData(
        language=["code"],
        license="other",
        task_categories=["text-retrieval"],
        tags=["code-search", "soft-infonce", *languages],
        configs=[{"config_name": "default", "data_files": files}],
    )
    DatasetInfosDict({"default": DatasetInfo(features=features)}).to_dataset_card_data(header)
    split, rows = next(iter(data.items()))
    repositories = Counter()
    if "repo" in rows.column_names:
        repositories.update(rows["repo"])
    card = DatasetCard.from_template(
        header,
        template_path=str(_TEMPLATE),
        title=arguments.rows_name.rsplit("/", 1)[-1],
        name=arguments.rows_name,
        languages=languages,
        source=arguments.source_dir,
        filters=arguments.filters,
        split=split,
        repositories=len(repositories),
        largest=", ".join(f"{name} ({count:,})" for name, count in repositories.most_common(5)),
        negatives=NEGATIVES in features,
        scores=SCORES in features,
        rows=table(["split", "rows", "use"], [(name, len(part), USES[name]) for name, part in data.items()]),
    )
    with reporting_disk_errors(folder):
        complete = {}
        for name, rows in data.items():
            complete[name] = ({column: row.get(column) for column in features} for row in rows)
        write_rows(complete, folder)
        for name in {*ROW_FILES} - {f"{split}.jsonl.gz" for split in data}:
            (folder / name).unlink(missing_ok=True)
        write_text(folder / "README.md", str(card))
    return folder
