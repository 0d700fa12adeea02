"""Trains a static encoder on a repository's commits and documentation, and keeps it if searches improve.

The newest commits are the test set. Each is a query to the tree before all of them, with the memory of earlier
commits, and training does not see them. The encoder that is kept is exactly the one that was tested.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.significance import Interval, paired_bootstrap
from soft_trainer.mining.history import MinedHistory
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.commits.memory_weight import MIN_QUERIES
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.git_files import repository_of
from soft_trainer.search.index.static import StaticSearchEncoder, default_static_folder, static_folder
from soft_trainer.search.measuring.judged import JudgedQuery, history_queries, score_search
from soft_trainer.search.measuring.verdict import MEMORY, search_of
from soft_trainer.source.functions import Row

BASE = f"{MEMORY} + the encoder before training"
LEARNED = f"{MEMORY} + the trained encoder"
LEARNING_LOCK = "learning.lock"
FOLDERS = "encoder-*"  # the folders of trained encoders, in the folder of the index
# These were chosen on the six repositories in benchmarks/learning.md.
LEARNING_RATE = 3e-3
EPOCHS = 10
BATCH = 256
LENGTH = 256  # tokens of a code; a code of ten thousand would make its whole batch as long
WEIGHT = 0.5  # the encoder's weight in the ranking, because the commit memory knows much of what it has learned


class Lesson(NamedTuple):
    """The outcome of learning.

    Attributes:
        encoder: the folder of the encoder that improves searches most, or None if neither improves them.
        queries: the number of commits in the test.
        ranks: for each of the three searches, the reciprocal rank of each query's first right function. Empty if there
            are too few commits.
        verdict: a sentence that describes the outcome.
    """

    encoder: Path | None
    queries: int
    ranks: dict[str, np.ndarray]
    verdict: str


def base_encoder(model: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of the static encoder to train. By default, the latest one made by `soft-trainer distil`.

    Raises:
        UserError: no encoder was distilled, or the model is not a static encoder.
    """
    folder = static_folder(os.fspath(model or default_static_folder()))
    if folder is None and model is None:
        remedy = "`soft-trainer distil sentence-transformers/all-MiniLM-L6-v2` makes one, once for all repositories"
        raise UserError(f"learn: no static encoder to train was found: {remedy}; or name one with --model")
    if folder is None:
        raise UserError(f"learn: {model} is not a static encoder; make one with `soft-trainer distil {model}`")
    return Path(os.path.realpath(folder))


def learn(index: CodeIndex, base: str | os.PathLike[str] | None = None, progress: bool = False) -> Lesson:
    """Trains a static encoder on the repository of an index, and gives the index the encoder that helps most.

    That may be the trained encoder, the same encoder before training, or neither. If neither helps, the index keeps an
    encoder that the user chose earlier.

    Args:
        base: the folder or Hub name of the encoder to train; see `base_encoder`.

    Raises:
        UserError: no encoder to train was found, or the folder is not in a readable git repository.
    """
    folder = base_encoder(base)
    found = repository_of(index.folder)
    if found is None:
        raise UserError(f"learn: {index.folder} is not in a git repository, so there are no commits to learn from")
    index_dir = Path(os.path.realpath(index.index_dir))
    scratch = tempfile.TemporaryDirectory(prefix="soft_trainer-")
    with scratch as work, store.write_lock(index_dir, name=LEARNING_LOCK):
        lesson = study(found[0], folder, Path(work))
        if lesson.encoder not in (None, folder):
            lesson = lesson._replace(encoder=_kept(lesson.encoder, index_dir))
        if lesson.encoder is not None:
            index.encode(lesson.encoder, progress)
            vectors.weigh(index.database, WEIGHT)
        elif lesson.ranks and index.model and Path(index.model) in {folder, *index_dir.glob(FOLDERS)}:
            with store.write_lock(index_dir, name=store.ENCODING_LOCK):
                vectors.forget(index.database, index_dir)
        for old in index_dir.glob(FOLDERS):
            if str(old) != index.model:
                shutil.rmtree(old)
    return lesson


def study(repository: str | os.PathLike[str], base: Path, work: Path) -> Lesson:
    """Trains an encoder in the folder `work` on all but a repository's newest commits, and tests it on those."""
    try:
        queries, mined = history_queries(repository, None, work / "tree", source_dir=repository)
    except UserError as error:
        return Lesson(None, 0, {}, f"learned nothing: {error}")
    if len(queries) < MIN_QUERIES:
        few = f"only {len(queries)} of the newest commits can judge an encoder, and it takes {MIN_QUERIES}"
        return Lesson(None, len(queries), {}, f"learned nothing: {few}")
    encoders = {BASE: base, LEARNED: train(base, mined.rows["train"] + mined.rows["valid"], work / "encoder")}
    with CodeIndex.build(work / "tree", work / "index") as index:
        index.remember(repository=os.fspath(repository), tip=mined.cut)
        ranks = _judged(index, queries, mined, encoders)
    best, verdict = decide(ranks)
    return Lesson(encoders.get(best), len(queries), ranks, verdict)


def train(base: Path, rows: list[Row], output_dir: Path) -> Path:
    """Trains a static encoder on pairs and writes it to `output_dir`, which is returned."""
    # These import torch, which a search does not need.
    from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
    from soft_trainer.encoders.export import export_encoder

    encoder = load_encoder(base)
    arguments = SoftInfoNCETrainingArguments(
        output_dir=str(output_dir),
        loss="info_nce",
        learning_rate=LEARNING_RATE,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=min(BATCH, len(rows)),
        warmup_steps=0.1,
        seed=1234,
        save_strategy="no",
        report_to=[],
    )
    profile = encoder.profile.replace(code_length=LENGTH)
    trainer = SoftInfoNCETrainer(encoder.model, arguments, rows, processing_class=encoder.tokenizer, encoder=profile)
    trainer.train()
    return export_encoder(trainer.model, encoder.tokenizer, encoder.profile, output_dir)


def decide(ranks: Mapping[str, np.ndarray]) -> tuple[str, str]:
    """Returns the name of the search to keep, and a line that gives the reason.

    An encoder is kept only if the whole 95 % interval of its gain over words with memory is above 0. If that is true
    of both, the one with the higher MRR is kept. If it is true of neither, words with memory stay.

    Args:
        ranks: the reciprocal ranks of the same queries in each of the three searches.
    """
    best = MEMORY
    parts = []
    for name in (LEARNED, BASE):
        gain = ranks[name] - ranks[MEMORY]
        interval = paired_bootstrap(gain)
        parts.append(f"{name} {_written(gain, interval)}")
        if interval.low > 0 and ranks[name].mean() > ranks[best].mean():
            best = name
    training = ranks[LEARNED] - ranks[BASE]
    parts.append(f"training alone {_written(training, paired_bootstrap(training))}")
    number = len(ranks[MEMORY])
    measured = f"MRR on the newest {number} commits, {MEMORY} {ranks[MEMORY].mean():.3f}; {'; '.join(parts)}"
    return best, f"kept: {best}. {measured}"


def _written(gain: np.ndarray, interval: Interval) -> str:
    return f"{gain.mean():+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _judged(
    index: CodeIndex, queries: list[JudgedQuery], mined: MinedHistory, encoders: Mapping[str, Path]
) -> dict[str, np.ndarray]:
    """Runs the queries with words and memory, and then with each encoder added. Returns the ranks for `Lesson`."""
    ranks = {MEMORY: _reciprocal_ranks(index, queries, mined, lexical=True)}
    for name, folder in encoders.items():
        index.encode(folder)
        vectors.weigh(index.database, WEIGHT)
        ranks[name] = _reciprocal_ranks(index, queries, mined, lexical=False)
    return ranks


def _reciprocal_ranks(index: CodeIndex, queries: list[JudgedQuery], mined: MinedHistory, lexical: bool) -> np.ndarray:
    measured = score_search(queries, mined, search_of(index, lexical=lexical, commits=True))
    return np.array([measures.mrr for measures in measured["functions"]])


def _kept(encoder: Path, index_dir: Path) -> Path:
    """Copies a trained encoder into the index's folder, to a subfolder whose name contains the encoder's identity."""
    identity = StaticSearchEncoder(encoder.name, encoder).identity
    kept = index_dir / f"encoder-{identity[:16]}"
    if not kept.exists():
        aside = index_dir / f"encoder-{identity[:16]}.part"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(encoder, aside)
        aside.rename(kept)
    return kept
