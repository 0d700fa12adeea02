"""Random combinations of settings: each trains with the finite loss of plain arithmetic or is refused."""

import contextlib
import dataclasses
import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from trainings import still

from soft_trainer import BM25Estimator
from soft_trainer.data.batches import Batch
from soft_trainer.data.collator import ChunkCost, PairCollator
from soft_trainer.encoders.encoding import encode
from soft_trainer.errors import UserError
from soft_trainer.options.fields import CANCELLATIONS, LOSSES, STRATEGIES
from soft_trainer.training.gradient_cache import cached_backward

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Combination:
    """Settings of a training on `rows` rows; the texts of `twins` of them occur twice."""

    rows: int
    twins: int
    batch_size: int
    accumulation: int
    processes: int
    chunk_size: int | None
    drop_last: bool
    gather: bool
    masked: bool
    strategy: str
    cancel: str
    loss: str


COMBINATIONS = st.builds(
    Combination,
    rows=st.integers(1, 24).map(lambda rows: 25 - rows),
    twins=st.integers(0, 6),
    batch_size=st.integers(1, 9).map(lambda size: 10 - size),
    accumulation=st.integers(1, 3),
    processes=st.integers(1, 4),
    chunk_size=st.sampled_from([None, None, 1, 2, 5]),
    drop_last=st.booleans(),
    gather=st.booleans(),
    masked=st.booleans(),
    strategy=st.sampled_from(list(STRATEGIES)),
    cancel=st.sampled_from(CANCELLATIONS),
    loss=st.sampled_from(LOSSES),
)
quick = partial(settings, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(combination: Combination, rows: list[dict]) -> Dataset:
    """Makes rows of two languages with row numbers as urls; the first `twins` of them are repeated at the end."""
    own = [rows[number % len(rows)] for number in range(combination.rows)]
    for twin in range(min(combination.twins, combination.rows // 2)):
        own[-1 - twin] = own[twin]
    return Dataset.from_list(
        [row | {"url": str(n), "language": ("go", "ruby", "ruby")[n % 3]} for n, row in enumerate(own)]
    )


def make(trainer_of, model, rows, combination: Combination, **options):
    """Makes a trainer with the settings, in float64 and without dropout."""
    return trainer_of(
        per_device_train_batch_size=combination.batch_size,
        gradient_accumulation_steps=combination.accumulation,
        gradient_cache_chunk_size=combination.chunk_size,
        dataloader_drop_last=combination.drop_last,
        gather_negatives=combination.gather,
        duplicates="mask" if combination.masked else "ignore",
        train_sampling_strategy=combination.strategy,
        cancel=combination.cancel,
        cancel_k=1,
        loss=combination.loss,
        estimator=BM25Estimator(),
        max_steps=STEPS,
        arguments={"train_dataset": rows_of(combination, rows), "model": still(model)},
        **options,
    )


def plain_loss(trainer, rows: list[int], of_process: list[int]) -> float:
    """Computes the mean loss of the queries `of_process` against the codes `rows`, from the formulas."""
    tokens = {side: trainer._tokens(trainer.train_dataset, side) for side in ("query", "code")}
    collated = PairCollator(trainer.processing_class.pad_token_id)(
        [{f"{side}_ids": tokens[side][row] for side in tokens} for row in rows]
    )
    with torch.no_grad():
        q, c = (F.normalize(encode(trainer.model, trainer.encoder, collated[side].chunks[0])) for side in tokens)
    own = [rows.index(row) for row in of_process]
    scores, positives = 20 * q[own] @ c.T, torch.tensor(own)
    negatives = None
    if trainer.plan.options.duplicates == "mask":
        texts = [
            [" ".join(row[name]) for name in ("docstring_tokens", "code_tokens")] for row in trainer.train_dataset
        ]
        negatives = torch.tensor(
            [[all(a != b for a, b in zip(texts[r], texts[s], strict=True)) for s in rows] for r in of_process]
        )
        negatives.scatter_(1, positives[:, None], True)
    similarity = trainer.estimator.similarity(torch.tensor(of_process), torch.tensor(rows)).double()
    return trainer.loss_settings(scores, positives, similarity, negatives).item()


@pytest.mark.slow
@quick(max_examples=12)
@given(combination=COMBINATIONS)
def test_a_training_has_the_plain_loss_or_is_refused(trainer_of, _model, rows, combination):
    combination = dataclasses.replace(combination, processes=1)
    with contextlib.suppress(UserError):
        trainer = make(trainer_of, _model, rows, combination, learning_rate=0.0)
        taken, step = [], trainer.training_step

        def recorded(model, inputs: Batch, items=None):
            loss = step(model, inputs, items)
            taken.append((inputs.rows.tolist(), loss.item() * trainer.current_gradient_accumulation_steps))
            return loss

        trainer.training_step = recorded
        trainer.train()
        assert trainer.state.global_step == STEPS and len(taken) >= STEPS
        for batch, loss in taken:
            assert math.isfinite(loss)
            assert loss == pytest.approx(plain_loss(trainer, batch, batch), abs=1e-5)
        return
    with pytest.raises(UserError):  # before the first step
        make(trainer_of, _model, rows, combination).get_train_dataloader()


@pytest.mark.slow
@quick(max_examples=15)
@given(combination=COMBINATIONS)
def test_processes_make_equal_passes_and_share_the_loss_of_the_global_batch(trainer_of, _model, rows, combination):
    alone = dataclasses.replace(
        combination, processes=1, batch_size=combination.batch_size * combination.processes, gather=True
    )
    try:
        trainer = make(trainer_of, _model, rows, alone)
        sampler = trainer.get_train_dataloader().batch_sampler
    except UserError:
        return
    trainer.estimator.fit(trainer.train_dataset)
    trainer.data_collator = PairCollator(trainer.processing_class.pad_token_id, ChunkCost(1.0), combination.chunk_size)
    trainer._own_collator = False
    batches = trainer._train_batches()
    batches.gather, batches.world_size = combination.gather, combination.processes
    for batch_rows in list(sampler)[:2]:
        shares, passes = [], []
        for rank in range(combination.processes):
            batches.rank = rank
            shares.append(batch := batches.__getitems__(batch_rows))
            passes.append((len(batch.query.chunks), len(batch.code.chunks)))
        assert len(set(passes)) == 1, passes
        assert [row for batch in shares for row in batch.rows] == batch_rows
        with torch.no_grad():
            codes = [trainer.embeddings(trainer.model, batch.code) for batch in shares]
        losses = []
        for rank, batch in enumerate(shares):
            trainer.model.zero_grad()
            met = torch.cat(codes) if combination.gather else codes[rank]
            own = list(batch.rows)
            loss = trainer._block_loss(trainer.embeddings(trainer.model, batch.query), met, batch, slice(None))
            assert math.isfinite(loss.item())
            losses.append(loss.item() / combination.processes)
            if not combination.gather and own:
                expected = plain_loss(trainer, own, own) * batch.loss_scale(len(own))
                assert loss.item() == pytest.approx(expected, abs=1e-5)
            if combination.chunk_size is not None and not combination.gather:
                cached = cached_backward(
                    lambda chunk: encode(trainer.model, trainer.encoder, chunk),
                    batch,
                    lambda q, c, block, batch=batch: trainer._block_loss(q, c, batch, block),
                    torch.Tensor.backward,
                    gathers=False,
                    block_size=2,
                    no_sync=contextlib.nullcontext,
                )
                assert cached.item() == pytest.approx(loss.item(), abs=1e-9)
        if combination.gather:
            assert sum(losses) == pytest.approx(plain_loss(trainer, batch_rows, batch_rows), abs=1e-5)
