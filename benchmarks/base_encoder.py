"""Makes `base`, the static encoder in the package: gathers rows, distils MiniLM over their words, and trains on them.

    python benchmarks/base_encoder.py rows --sources SOURCES --data DIR --work WORK
    python benchmarks/base_encoder.py make --work WORK --model sentence-transformers/all-MiniLM-L6-v2

`rows` writes the training rows to WORK, and the list of their packages to `base_packages.tsv`. The rows are the
documented functions of packages: packages of Debian and npm that are unpacked in `SOURCES/LANGUAGE/PACKAGE`, and
packages that are installed in the running Python, which should have this package with its extra `test`. DIR has the
evaluation sets. `excluded_names` and `Tests` decide which rows are excluded.

`make` distils MiniLM over the words in the rows, trains the vectors with `Settings`, which `base_study.md` chose, and
writes them, as int8, to `soft_trainer/encoders/base`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import shutil
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import set_up
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_array, vstack
from tokenizers import Tokenizer
from torch.nn import functional as F

from soft_trainer.encoders.static_numpy import token_weights
from soft_trainer.mining.duplicates import minhash, near_duplicates
from soft_trainer.shares import PARTITIONS
from soft_trainer.system.packaged import VECTORS

PACKAGES = Path(__file__).with_name("base_packages.tsv")
HELD_OUT = "held_out_packages.tsv"
LANGUAGES = ("python", "java", "ruby", "php", "go", "javascript")
KEEP = ("short_functions", "magic_methods", "constructors")  # as in the quickstart
PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Zlib|matplotlib")
COPYLEFT = re.compile(r"GPL|MPL|EPL|CDDL")
# Repositories that the studies of search and of commits measure, and their forks. They are in no row.
STUDIED = frozenset(
    """aiohttp astropy axios bat black bubbletea caddy chi click cli cobra express fastapi fastify fd flask flask fzf
    gin gson guzzle httpx httpx2 httpcore httpcore2 jinja jinja2 joblib jsoup laravel laravel-framework mocha mockito
    model2vec monolog parser php-parser puma pydantic pydantic_core pylint pytest _pytest rack rails redux requests
    ripgrep seaborn sentence-transformers sentence_transformers sidekiq sinatra sphinx starlette sympy tornado trl twig
    uvicorn xarray""".split()
)
# Other names of the same project.
ALIASES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "git": "python-git",
    "mongodb/mongo-ruby-driver": "ruby-mongo",
    "gdelugre/origami": "origami-pdf",
    "golang-github-hashicorp-hcl": "hcl-v2",
}
CARD = Path(__file__).with_name("base_card.md")
DIMENSIONS = 384
VOCABULARY = 27_000
LENGTH = 256  # tokens of a text
FILES = 150  # of a package
PER_PACKAGE = 500  # rows
PER_LANGUAGE = 12_000  # rows of the packages that are not installed
BUILT = {"dist", "build", "umd", "bundle", "bundles", "third_party", "thirdparty", "external", "testdata"}
TEMPERATURE = 0.05  # of the teacher's cosines
Row = dict[str, Any]


def lines_of(path: Path) -> Iterator[Row]:
    """Yields the rows in a gzipped file of JSON lines."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def plain_name(name: str) -> str:
    """Returns a package's name without the prefixes of distributions and owners, such as `npm/` and `ruby-`."""
    name = re.sub(r"^golang-(github-)?[^-]+-(?=.)", "", name.lower())
    return re.sub(r"^(python3?|ruby|(lib)?php|golang|lib)-", "", name.rsplit("/", 1)[-1]).replace("_", "-")


def excluded_names(data: Path) -> set[str]:
    """Returns the names of packages and repositories that are measured somewhere."""
    names = {line.split("\t")[1] for line in (data / HELD_OUT).read_text().splitlines()}
    for name in LANGUAGES:
        for split in ("valid", "test"):
            names |= {row["repo"] for row in lines_of(data / "mined" / name / f"{split}.jsonl.gz")}
    for split in ("valid", "test"):
        names |= {row["repo"] for row in lines_of(data / "csn-ruby" / f"{split}.jsonl.gz")}
    for language in ("python", "go"):
        for row in lines_of(data / "csn99" / language / "codebase.jsonl.gz"):
            names.add("/".join(row["url"].split("/")[3:5]))
    # Bazel and OpenJDK are split by folder, whose names say nothing: `bazel/util`.
    return {name if name.startswith(("bazel", "openj")) else plain_name(name) for name in names | STUDIED}


def text(tokens: Iterable[str]) -> str:
    """Returns the text of a query or a function, by which rows are compared."""
    return " ".join(tokens).lower()


def docstring_free(code: str) -> list[str]:
    """Returns the tokens of a Python function without its documentation, or [] if it cannot be parsed."""
    from soft_trainer.source.definitions import parse
    from soft_trainer.source.functions import FileFunctions

    source = code.encode()
    tree = parse(source, "python")
    found = FileFunctions(tree, source, "python", "f.py").rows()
    return found[0]["code_tokens"] if found else []


class Tests:
    """The queries and functions of all sets that encoders are measured on.

    Attributes:
        queries: the text of every query.
        codes: the tokens of every function in a corpus.
    """

    def __init__(self, data: Path, standard_library: Path):
        self.queries: set[str] = set()
        self.codes: list[list[str]] = []
        for folder in (*(data / "mined" / name for name in LANGUAGES), data / "csn-ruby"):
            self._add(folder, ("valid", "test"))
        self._add(standard_library, ("train", "valid", "test"))
        for language in ("python", "go"):
            folder = data / "csn99" / language
            self.queries |= {row["query"].lower() for row in lines_of(folder / "relevance.jsonl.gz")}
            self.codes += [row["code_tokens"] for row in lines_of(folder / "codebase.jsonl.gz")]
        with gzip.open(data / "cosqa" / "cosqa-retrieval-dev-500.json.gz") as file:
            self.queries |= {row["doc"].lower() for row in json.load(file)}
        with gzip.open(data / "cosqa" / "code_idx_map.json.gz") as file:
            self.codes += filter(None, map(docstring_free, json.load(file)))

    def _add(self, folder: Path, splits: tuple[str, ...]) -> None:
        for split in splits:
            for row in lines_of(folder / f"{split}.jsonl.gz"):
                self.queries.add(text(row["docstring_tokens"]))
                self.codes.append(row["code_tokens"])
        self.codes += [row["code_tokens"] for row in lines_of(folder / "codebase.jsonl.gz")]


def installed() -> Iterator[Row]:
    """Yields the documented functions of the installed packages with a permissive licence; `repo` is the package."""
    from soft_trainer.mining.tree import mine

    root = sysconfig.get_path("purelib")
    packages = metadata.packages_distributions()
    mined = mine(root, "python", 1, KEEP).rows
    for split in PARTITIONS:
        for row in mined[split]:
            module = row["path"].split("/")[0].removesuffix(".py")
            owners = packages.get(module, [])
            if owners and module != "soft_trainer" and "_vendor" not in row["path"] and permissive(owners[0]):
                yield {**row, "repo": owners[0], "module": module}


def licence(package: str) -> str:
    """Returns the licence that an installed package declares, on one line."""
    declared = metadata.metadata(package)
    classifiers = [line for line in declared.get_all("Classifier") or [] if line.startswith("License ::")]
    short = (declared.get("License") or "").strip().split("\n")[0]
    named = ", ".join(line.rsplit(" :: ", 1)[-1] for line in classifiers)
    return declared.get("License-Expression") or named or short[:60]


def permissive(package: str) -> bool:
    """Returns True if an installed package declares only permissive licences."""
    declared = licence(package)
    return bool(PERMISSIVE.search(declared)) and not COPYLEFT.search(declared)


def unpacked(folder: Path, language: str) -> Iterator[Row]:
    """Yields documented functions of the packages in the folders of `folder`; `repo` is the package.

    A `+` in the name of a folder stands for the `/` in a package's name. At most `FILES` files of a package are read,
    drawn at random, and none in a folder of built files. A package has at most `PER_PACKAGE` rows, and a language at
    most `PER_LANGUAGE`.
    """
    from soft_trainer.mining.tree import mine
    from soft_trainer.source.languages import SOURCE_LANGUAGES
    from soft_trainer.source.names import is_test_path

    with tempfile.TemporaryDirectory() as scratch:
        for package in sorted(folder.iterdir()):
            paths = [
                path for path in sorted(package.rglob("*")) if path.suffix in SOURCE_LANGUAGES[language].extensions
            ]
            read = []
            for path in paths:
                name = path.relative_to(package)
                small = path.is_file() and 200 < path.stat().st_size < 300_000
                if small and not is_test_path(str(name), language) and BUILT.isdisjoint(name.parts):
                    read.append(name)
            random.Random(0).shuffle(read)
            for name in read[:FILES]:
                (Path(scratch, package.name) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(package / name, Path(scratch, package.name) / name)
        mined = mine(scratch, language, 1, KEEP).rows
    taken: Counter[str] = Counter()
    rows = []
    for row in (row for split in PARTITIONS for row in mined[split]):
        package = row["path"].split("/")[0]
        taken[package] += 1
        if taken[package] <= PER_PACKAGE:
            rows.append({**row, "repo": package.replace("+", "/")})
    random.Random(0).shuffle(rows)
    yield from rows[:PER_LANGUAGE]


def gathered(sources: Path) -> Iterator[Row]:
    """Yields the rows of all sources, without any exclusion but the licence."""
    for folder in sorted(sources.iterdir()):
        yield from unpacked(folder, folder.name)
    yield from installed()


def kept(rows: Iterable[Row], names: set[str], tests: Tests) -> tuple[list[Row], Counter[str]]:
    """Drops rows of measured packages, texts of test sets, and near-duplicates. Returns the rows, and counts."""
    left: list[Row] = []
    dropped: Counter[str] = Counter()
    codes = {text(tokens) for tokens in tests.codes}
    for row in rows:
        owners = {row["repo"], row.get("module", row["repo"])}
        # Not from a local path: it would name a package's own folders. Go's packages have their address in their path.
        for address in (row["url"], row["path"]):
            owners |= {"/".join(match) for match in re.findall(r"github\.com/([^/]+)/([^/]+)", address)}
        owners |= {ALIASES[name] for name in owners if name in ALIASES}
        if not names.isdisjoint(owners | set(map(plain_name, owners))):
            dropped["measured package"] += 1
        elif text(row["docstring_tokens"]) in tests.queries:
            dropped["query of a test set"] += 1
        elif text(row["code_tokens"]) in codes:
            dropped["function of a test set"] += 1
        else:
            left.append(row)
    signatures = [minhash(tokens) for tokens in (*tests.codes, *(row["code_tokens"] for row in left))]
    near = near_duplicates(range(len(signatures)), signatures.__getitem__)[len(tests.codes) :]
    dropped["near-duplicate"] = int(near.sum())
    return [row for row, copy in zip(left, near, strict=True) if not copy], dropped


def rows(arguments: argparse.Namespace) -> None:
    """Writes the training rows, and the list of packages."""
    from soft_trainer.mining.tree import mine_to
    from soft_trainer.source.source_files import source_folder

    data, work = Path(arguments.data), Path(arguments.work)
    mine_to(source_folder("stdlib"), "python", work / "stdlib", num_workers=1, keep=KEEP)
    left, dropped = kept(gathered(Path(arguments.sources)), excluded_names(data), Tests(data, work / "stdlib"))
    write_rows(left, work / "train.jsonl.gz")
    write_packages(left)
    print(f"{len(left):,} rows; dropped: {dict(dropped)}")
    print(Counter(row["language"] for row in left))


def write_rows(left: list[Row], path: Path) -> None:
    """Writes rows to a gzipped file of JSON lines."""
    columns = ("repo", "path", "func_name", "language", "docstring", "docstring_tokens", "code", "code_tokens", "url")
    with gzip.open(path, "wt") as file:
        for row in left:
            file.write(json.dumps({name: row[name] for name in columns}) + "\n")


def write_packages(left: list[Row]) -> None:
    """Writes the packages of the rows, with their language, version, licence and number of rows."""
    counts = Counter((row["language"], row["repo"], "module" in row) for row in left)
    lines = ["language\tpackage\tversion\tlicence\trows\n"]
    for (language, name, is_installed), count in sorted(counts.items()):
        version, declared = "", ""
        if is_installed:
            version, declared = metadata.version(name), licence(name)
        lines.append(f"{language}\t{name}\t{version}\t{declared}\t{count}\n")
    PACKAGES.write_text("".join(lines))


@dataclass(frozen=True)
class Settings:
    """Settings of a training. The defaults train `base`.

    Attributes:
        start: the folder in `WORK/starts` with the distilled encoder.
        sampling: "rows", "languages" or "root": each row once an epoch, languages equally often, or in proportion to
            the square root of their rows.
        batches: "random", "language" or "similar".
        weight: the weight of the teacher's KL term.
        regression: epochs of a regression on the teacher's embeddings, before training on pairs.
        without: languages to exclude, separated by commas.
    """

    start: str = "words"
    batch: int = 2048
    rate: float = 2e-3
    epochs: int = 4
    sampling: str = "rows"
    batches: str = "random"
    weight: float = 1.0
    regression: int = 0
    scale: float = 20.0
    without: str = ""
    seed: int = 1


class TrainingRows:
    """Rows as the tokens of an encoder.

    Args:
        folder: the encoder before training.
        rows: the rows, with the columns of CodeSearchNet.
        teacher: the teacher's embeddings of the queries and of the functions, float[n, d] each.
    """

    def __init__(self, folder: Path, rows: Iterable[Row], teacher: Sequence[np.ndarray] = ()):
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(LENGTH)
        self.tokenizer.no_padding()
        self.unknown = self.tokenizer.token_to_id("[UNK]")
        self.vectors = load_file(folder / "model.safetensors")[VECTORS].astype(np.float32)
        texts: tuple[list[str], list[str]] = ([], [])
        languages = []
        for row in rows:
            texts[0].append(" ".join(row["docstring_tokens"]))
            texts[1].append(" ".join(row["code_tokens"]))
            languages.append(LANGUAGES.index(row["language"]))
        self.queries, self.codes = (self.weights(*each) for each in zip(texts, ("query", "code"), strict=True))
        self.equal = [numbered(each) for each in texts]
        self.languages = np.array(languages)
        self.teacher = [torch.from_numpy(each.astype(np.float32)) for each in teacher]

    def weights(self, texts: list[str], side: str) -> csr_array:
        """Returns the weights of the texts' tokens, float32[n, V]."""
        found = []
        for first in range(0, len(texts), 1000):  # the encodings of all texts would take gigabytes
            encodings = self.tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
            ids = [each.ids for each in encodings]
            found.append(token_weights(ids, len(self.vectors), side, self.unknown))
        return vstack(found, format="csr")


def embed(vectors: torch.Tensor, weights: csr_array) -> torch.Tensor:
    """Embeds texts from the weights of their tokens, float32[n, V]. Returns Tensor[n, d]."""
    ids, starts = (torch.from_numpy(each.astype(np.int64)) for each in (weights.indices, weights.indptr[:-1]))
    shares = torch.from_numpy(weights.data)
    return F.normalize(F.embedding_bag(ids, vectors, starts, mode="sum", per_sample_weights=shares), dim=1)


def numbered(texts: list[str]) -> np.ndarray:
    """Returns a number for each text, the same for equal texts. (A NumPy array of long texts would take gigabytes.)"""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts])


def rows_for(work: Path, settings: Settings) -> TrainingRows:
    """Reads the rows that settings need."""
    languages = [row["language"] for row in lines_of(work / "train.jsonl.gz")]
    kept = [number for number, language in enumerate(languages) if language not in settings.without.split(",")]
    numbers = set(kept)
    rows = (row for number, row in enumerate(lines_of(work / "train.jsonl.gz")) if number in numbers)
    teacher = []
    if settings.weight or settings.regression:
        teacher = [np.load(work / f"teacher_{side}.npy")[kept] for side in ("queries", "codes")]
    return TrainingRows(work / "starts" / settings.start, rows, teacher)


def drawn(rows: TrainingRows, settings: Settings, generator: np.random.Generator) -> np.ndarray:
    """Draws the rows of an epoch."""
    numbers = np.arange(rows.queries.shape[0])
    if settings.sampling == "rows":
        return generator.permutation(numbers)
    sizes = np.bincount(rows.languages, minlength=len(LANGUAGES)).astype(float)
    share = sizes**0.5 if settings.sampling == "root" else (sizes > 0).astype(float)
    wanted = np.round(share / share.sum() * len(numbers)).astype(int)
    parts = []
    for language, count in enumerate(wanted):
        own = numbers[rows.languages == language]
        while count > 0:  # each row as often as the others, give or take one
            parts.append(generator.permutation(own)[:count])
            count -= len(own)
    return generator.permutation(np.concatenate(parts))


def grouped(order: np.ndarray, groups: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """Reorders rows so that `size` successive rows are mostly of one group."""
    by_group = order[np.argsort(groups[order], kind="stable")]
    parts = np.array_split(by_group, max(1, len(order) // size))
    return np.concatenate([parts[number] for number in generator.permutation(len(parts))])


def trained(rows: TrainingRows, settings: Settings) -> np.ndarray:
    """Trains the vectors of a start, and returns them, float32[V, d]."""
    from sklearn.cluster import MiniBatchKMeans

    torch.manual_seed(settings.seed)
    generator = np.random.default_rng(settings.seed)
    vectors = torch.nn.Parameter(torch.from_numpy(rows.vectors).clone())
    if settings.regression:
        regress(vectors, rows, settings, generator)
    optimizer = torch.optim.AdamW([vectors], lr=settings.rate, weight_decay=0.0, fused=True)
    count = rows.queries.shape[0]
    steps = -(-count // settings.batch) * settings.epochs
    step = 0
    for _ in range(settings.epochs):
        order = drawn(rows, settings, generator)
        if settings.batches == "language":
            order = grouped(order, rows.languages, settings.batch, generator)
        if settings.batches == "similar":
            with torch.no_grad():
                queries = embed(vectors, rows.queries).numpy()
            clusters = MiniBatchKMeans(
                count // 400, batch_size=4096, n_init=1, max_iter=10, random_state=settings.seed
            )
            order = grouped(order, clusters.fit_predict(queries), 64, generator)
        for first in range(0, len(order), settings.batch):
            optimizer.param_groups[0]["lr"] = settings.rate * (1 - step / steps)
            loss = loss_of(vectors, rows, order[first : first + settings.batch], settings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return vectors.detach().numpy()


def loss_of(vectors: torch.Tensor, rows: TrainingRows, batch: np.ndarray, settings: Settings) -> torch.Tensor:
    """Returns the InfoNCE loss of a batch, with the teacher's KL term if it has a weight."""
    queries, codes = (embed(vectors, side[batch]) for side in (rows.queries, rows.codes))
    scores = queries @ codes.T * settings.scale
    equal = np.zeros((len(batch), len(batch)), dtype=bool)
    for texts in rows.equal:
        equal |= texts[batch][:, None] == texts[batch]
    positive = torch.eye(len(batch), dtype=torch.bool)
    masked = torch.from_numpy(equal) & ~positive
    loss = F.cross_entropy(scores.masked_fill(masked, -torch.inf), torch.arange(len(batch)))
    if settings.weight:
        numbers = torch.from_numpy(batch)
        taught = rows.teacher[0][numbers] @ rows.teacher[1][numbers].T / TEMPERATURE
        excluded = masked | positive
        target = taught.masked_fill(excluded, -1e9).softmax(1)
        logs = scores.masked_fill(excluded, -1e9).log_softmax(1)
        loss = loss + settings.weight * F.kl_div(logs, target, reduction="batchmean")
    return loss


def regress(vectors: torch.Tensor, rows: TrainingRows, settings: Settings, generator: np.random.Generator) -> None:
    """Moves the embeddings of the texts towards the teacher's embeddings, reduced by PCA."""
    from sklearn.decomposition import PCA

    texts = vstack([rows.queries, rows.codes], format="csr")
    taught = torch.cat(rows.teacher).numpy()
    reduced = PCA(vectors.shape[1], random_state=0).fit_transform(taught).astype(np.float32)
    target = F.normalize(torch.from_numpy(reduced), dim=1)
    optimizer = torch.optim.AdamW([vectors], lr=3e-3, weight_decay=0.0, fused=True)
    for _ in range(settings.regression):
        order = generator.permutation(len(target))
        for first in range(0, len(target), 1024):
            batch = order[first : first + 1024]
            embedded = embed(vectors, texts[batch])
            loss = 1 - (embedded * target[torch.from_numpy(batch)]).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def words_of(rows: Iterable[Row]) -> dict[str, float]:
    """Returns how often words occur in rows, as a share of a language's words, averaged over the languages."""
    from soft_trainer.encoders.static_torch import count_words

    texts: dict[str, list[str]] = {}
    for row in rows:
        texts.setdefault(row["language"], []).extend((" ".join(row["docstring_tokens"]), " ".join(row["code_tokens"])))
    shares: Counter[str] = Counter()
    for each in texts.values():
        counts = count_words(each)
        total = sum(counts.values())
        for word, count in counts.items():
            if word.isascii():
                shares[word] += count / total / len(texts)
    return dict(shares)


def distil(work: Path, model: str) -> Path:
    """Distils MiniLM over the rows' words into `WORK/starts/words`, and returns the folder."""
    from soft_trainer import load_encoder
    from soft_trainer.encoders.export import export_encoder
    from soft_trainer.encoders.static_torch import distilled

    folder = work / "starts" / "words"
    if not folder.exists():
        words = words_of(lines_of(work / "train.jsonl.gz"))
        start = distilled(load_encoder(model, device="cpu"), words, DIMENSIONS, VOCABULARY, progress=True)
        export_encoder(start.model, start.tokenizer, start.profile, folder)
    return folder


def teach(work: Path, model: str) -> None:
    """Embeds the rows with MiniLM, in int8 and with at most 40 and 80 tokens a text, which takes ten CPU minutes."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from soft_trainer import load_encoder
    from soft_trainer.encoders.onnx import FLOAT_FILE, OnnxEncoder
    from soft_trainer.encoders.onnx_export import write_onnx

    teacher = load_encoder(model, device="cpu")
    teacher = replace(teacher, profile=teacher.profile.replace(query_length=40, code_length=80))
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(teacher, Path(folder))
        kinds = {"op_types_to_quantize": ["MatMul"], "weight_type": QuantType.QInt8}
        quantize_dynamic(Path(folder, FLOAT_FILE), Path(folder, "int8.onnx"), per_channel=True, **kinds)
        Path(folder, "int8.onnx").replace(Path(folder, FLOAT_FILE))
        encoder = OnnxEncoder(Path(folder))
        for side, column, name in (("query", "docstring", "queries"), ("code", "code", "codes")):
            texts = [" ".join(row[f"{column}_tokens"]) for row in lines_of(work / "train.jsonl.gz")]
            parts = [encoder.encode(texts[first : first + 1000], side) for first in range(0, len(texts), 1000)]
            np.save(work / f"teacher_{name}.npy", np.concatenate(parts).astype(np.float16))


def make(arguments: argparse.Namespace) -> None:
    """Distils, trains and writes the package's encoder."""
    from soft_trainer import load_encoder
    from soft_trainer.encoders.export import export_encoder

    set_up(1)
    work = Path(arguments.work)
    start = distil(work, arguments.model)
    if not (work / "teacher_codes.npy").exists():
        teach(work, arguments.model)
    encoder = load_encoder(start, device="cpu")
    vectors = trained(rows_for(work, Settings()), Settings())
    encoder.model.embeddings.weight.data.copy_(torch.from_numpy(vectors))
    package(export_encoder(encoder.model, encoder.tokenizer, encoder.profile, work / "float32"))


def package(folder: Path) -> None:
    """Writes an encoder to the package, with int8 vectors and the card."""
    from soft_trainer.system.packaged import INT8, PACKAGED, SCALES, STATIC_CODE, WEIGHTS

    with tempfile.TemporaryDirectory() as scratch:
        aside = Path(scratch) / "base"
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(STATIC_CODE.name))
        vectors = load_file(aside / WEIGHTS)[VECTORS]
        scales = np.abs(vectors).max(1) / 127
        rounded = np.round(vectors / np.maximum(scales, 1e-12)[:, None]).astype(np.int8)
        save_file({INT8: rounded, SCALES: scales.astype(np.float32)}, aside / WEIGHTS)
        (aside / "README.md").write_text(card(len(vectors)))
        shutil.rmtree(PACKAGED, ignore_errors=True)
        shutil.copytree(aside, PACKAGED)
    size = sum(path.stat().st_size for path in PACKAGED.rglob("*"))
    print(f"{len(vectors):,} entries, {size / 1e6:.2f} MB")


def card(entries: int) -> str:
    """Returns the encoder's card, with the packages of its rows."""
    lines = [line.split("\t") for line in PACKAGES.read_text().splitlines()[1:]]
    pairs: Counter[str] = Counter()
    packages: dict[str, list[str]] = {}
    for language, name, version, declared, count in lines:
        pairs[language] += int(count)
        source = "installed" if version else "unpacked"
        about = f"{name} {version} ({declared})" if version else name
        packages.setdefault(f"{language}, {source}", []).append(about)
    text = CARD.read_text().replace("{entries}", f"{entries:,}").replace("{pairs}", f"{pairs.total():,}")
    text = text.replace("{dimensions}", str(DIMENSIONS))
    text = text.replace("{languages}", ", ".join(f"{count:,} {name}" for name, count in pairs.most_common()))
    listed = "\n\n".join(f"**{kind}**: {', '.join(names)}." for kind, names in packages.items())
    return text.replace("{packages}", listed)


def main() -> None:
    """Gathers the rows, or makes the encoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("rows")
    command.add_argument("--sources", required=True)
    command.add_argument("--data", required=True)
    command.add_argument("--work", required=True)
    command.set_defaults(call=rows)
    command = commands.add_parser("make")
    command.add_argument("--work", required=True)
    command.add_argument("--model", required=True)
    command.set_defaults(call=make)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
