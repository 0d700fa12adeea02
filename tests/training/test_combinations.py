"""Random combinations of settings either give the same loss as plain arithmetic, or a one-line error."""

import contextlib
import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.nn import functional as F
from trainings import still

from soft_trainer.encoders.encoding import encode, pad
from soft_trainer.errors import UserError
from soft_trainer.options.choices import LOSSES
from soft_trainer.options.fields import STRATEGIES
from soft_trainer.options.loss_options import CANCELLATIONS
from soft_trainer.training.batches import Batch

STEPS = 3
NUMBERS = st.integers(1, 24).map(lambda rows: 25 - rows)
TWINS = st.integers(0, 6)
OPTIONS = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.integers(1, 9).map(lambda size: 10 - size),
        "gradient_accumulation_steps": st.integers(1, 3),
        "gradient_cache_chunk_size": st.sampled_from([None, None, 1, 2, 5]),
        "dataloader_drop_last": st.booleans(),
        "false_negatives": st.sampled_from(["mask", "ignore"]),
        "train_sampling_strategy": st.sampled_from(STRATEGIES),
        "cancel": st.sampled_from(CANCELLATIONS),
        "loss": st.sampled_from(sorted(LOSSES)),
    }
)
quick = partial(settings, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def make(trainer_of, _model, rows):
    """Returns a function that makes a float64 trainer without dropout, on rows in two languages.

    The texts of `twins` rows occur twice.
    """

    def trainer(number: int, twins: int, **options):
        own = [rows[row % len(rows)] for row in range(number)]
        for twin in range(min(twins, number // 2)):
            own[-1 - twin] = own[twin]
        languages = ("go", "ruby", "ruby")
        own = [row | {"url": str(n), "language": languages[n % 3]} for n, row in enumerate(own)]
        arguments = {"train_dataset": Dataset.from_list(own), "model": still(_model)}
        return trainer_of(cancel_k=1, max_steps=STEPS, arguments=arguments, **options)

    return trainer


def plain_loss(trainer, rows: list[int], of_process: list[int]) -> float:
    """Computes the mean loss of the queries `of_process` against the codes `rows` by the formulas."""
    tokens = {side: trainer._tokens(trainer.train_dataset, side) for side in ("query", "code")}
    padded = {side: pad([tokens[side][row] for row in rows], trainer.processing_class.pad_token_id) for side in tokens}
    with torch.no_grad():
        q, c = (F.normalize(encode(trainer.model, trainer.encoder, padded[side])) for side in tokens)
    own = [rows.index(row) for row in of_process]
    scores, positives = 20 * q[own] @ c.T, torch.tensor(own)
    negatives = None
    if trainer.plan.options.false_negatives == "mask":
        texts = [
            [" ".join(row[name]) for name in ("docstring_tokens", "code_tokens")] for row in trainer.train_dataset
        ]
        negatives = torch.tensor(
            [[all(a != b for a, b in zip(texts[r], texts[s], strict=True)) for s in rows] for r in of_process]
        )
        negatives.scatter_(1, positives[:, None], True)
    similarity = trainer.estimator.similarity(torch.tensor(of_process), torch.tensor(rows)).double()
    return trainer.criterion(scores, trainer.criterion.targets(positives, negatives, similarity=similarity)).item()


@pytest.mark.slow
@quick(max_examples=12)
@given(number=NUMBERS, twins=TWINS, options=OPTIONS)
def test_a_training_has_the_plain_loss_or_is_refused(make, number, twins, options):
    with contextlib.suppress(UserError):
        trainer = make(number, twins, learning_rate=0.0, **options)
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
        make(number, twins, **options).get_train_dataloader()
