"""Flattens the splits of a run into tables, for tests that compare rows."""

from datasets import Dataset, concatenate_datasets


def tables_of(splits) -> dict[str, Dataset]:
    """Returns the pairs of each split, with all languages together, and the corpus as `codebase`."""
    pairs, corpora = {}, {}
    for name, split in splits.items():
        pairs.setdefault(name.split("-")[0], []).append(split.to_pairs())
        if name != "train":
            corpora[split.corpus._fingerprint] = split.corpus
    tables = {name: concatenate_datasets(parts) for name, parts in pairs.items()}
    return tables | ({"codebase": concatenate_datasets(list(corpora.values()))} if corpora else {})
