"""Makes `base`, the static encoder in the package, from MiniLM (Apache-2.0) and a list of words.

    python benchmarks/base_encoder.py make --model sentence-transformers/all-MiniLM-L6-v2
    python benchmarks/base_encoder.py words --data DIR

`make` needs only MiniLM. It distils MiniLM over the words in `base_words.tsv` and writes the vectors, as int8, to
`soft_trainer/encoders/base`.

`words` writes that list, from `mined/LANGUAGE/train.jsonl.gz` in DIR for Python, Java and Ruby, and from the source
code and documentation of the packages installed in the running Python. The standard library, other languages, and
packages with functions in a valid or test split are excluded, because encoders are tested on them. For each word,
the list has the number of occurrences per billion words, averaged over the five sources.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS = Path(__file__).with_name("base_words.tsv")
LANGUAGES = ("python", "java", "ruby")
CODE = (".py", ".pyi")
DOCUMENTATION = (".md", ".rst", ".txt", "METADATA")
VOCABULARY = 20_000
CARD = """---
license: apache-2.0
base_model: sentence-transformers/all-MiniLM-L6-v2
library_name: sentence-transformers
tags: [sentence-transformers, feature-extraction, code-search, static-embeddings]
---

# base

The encoder that comes with soft_trainer: `load_encoder("base")`. It has a vector for each of {entries:,} words of code
and English documentation, and an embedding is the normalised mean of a text's vectors. The vectors were distilled from
[all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) (Apache-2.0) by
`benchmarks/base_encoder.py`, and reduced to {dimensions} dimensions. It is a starting point for training on pairs of a
query and a function, and it needs neither torch nor a download to search.
"""


def lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def texts_of_rows(path: Path) -> Iterator[str]:
    """Yields the documentation and the code of rows."""
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            yield row["docstring"]
            yield row["code"]


def tested_packages(data: Path) -> set[str]:
    """Returns the names of packages in the valid and test splits, without the prefix that Debian gives them."""
    names = set()
    for split in ("valid", "test"):
        with gzip.open(data / "mined" / "python" / f"{split}.jsonl.gz", "rt") as file:
            names |= {Path(json.loads(line)["path"]).parts[4].removesuffix(".py").lower() for line in file}
    return names


def installed(excluded: set[str], endings: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines of files of the installed packages."""
    root = Path(sysconfig.get_path("purelib"))
    for path in sorted(root.rglob("*")):
        package = path.relative_to(root).parts[0].partition("-")[0].removesuffix(".py").lower()
        if path.name.endswith(endings) and path.is_file() and package not in excluded:
            yield from lines(path)


def words(arguments: argparse.Namespace) -> None:
    """Writes the list of words."""
    from soft_trainer.encoders.static import count_words

    data = Path(arguments.data)
    excluded = tested_packages(data) | {"soft_trainer"}
    sources = [texts_of_rows(data / "mined" / name / "train.jsonl.gz") for name in LANGUAGES]
    sources += [installed(excluded, endings) for endings in (CODE, DOCUMENTATION)]
    shares = Counter()
    for source in sources:
        counts = count_words(source)
        total = sum(counts.values())
        print(f"{len(counts):,} words, {total:,} occurrences", flush=True)
        for word, count in counts.items():
            shares[word] += count / total / len(sources)
    most = sorted(shares, key=lambda word: (-shares[word], word))
    kept = [word for word in most if word.isascii()][:VOCABULARY]
    WORDS.write_text("".join(f"{word}\t{round(shares[word] * 1e9)}\n" for word in kept))


def make(arguments: argparse.Namespace) -> None:
    """Distils MiniLM over the list of words into the package."""
    from safetensors.numpy import load_file, save_file

    from soft_trainer import load_encoder
    from soft_trainer.encoders.export import export_encoder
    from soft_trainer.encoders.packaged import INT8, PACKAGED, SCALES, VECTORS, WEIGHTS
    from soft_trainer.encoders.static import distilled

    rows = (line.split("\t") for line in WORDS.read_text().splitlines())
    counts = {word: int(count) for word, count in rows}
    encoder = distilled(load_encoder(arguments.model, device="cpu"), counts, arguments.dimensions, progress=True)
    with tempfile.TemporaryDirectory() as place:
        folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, Path(place) / "float32")
        tensors = load_file(folder / WEIGHTS)
        for name in VECTORS:
            vectors = tensors.pop(name)
        scales = np.abs(vectors).max(1) / 127
        tensors[INT8] = np.round(vectors / np.maximum(scales, 1e-12)[:, None]).astype(np.int8)
        tensors[SCALES] = scales.astype(np.float32)
        save_file(tensors, folder / WEIGHTS)
        (folder / "README.md").write_text(CARD.format(entries=len(vectors), dimensions=arguments.dimensions))
        shutil.rmtree(PACKAGED, ignore_errors=True)
        shutil.copytree(folder, PACKAGED)
    size = sum(path.stat().st_size for path in PACKAGED.rglob("*"))
    print(f"{len(vectors):,} entries, {size / 1e6:.2f} MB")


def main() -> None:
    """Makes the list of words, or the encoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("words")
    command.add_argument("--data", required=True)
    command.set_defaults(call=words)
    command = commands.add_parser("make")
    command.add_argument("--model", required=True)
    command.add_argument("--dimensions", type=int, default=256)
    command.set_defaults(call=make)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
