"""A `Criterion` equals the pure loss functions, with and without cancellation and masks."""

import copy
import dataclasses
import functools
import json
import random

import numpy as np
import own_losses
import pytest
import torch
from refusals import refused
from torch.nn import functional as F

from soft_trainer import losses
from soft_trainer.criterion import LOSSES, Criterion, Targets
from soft_trainer.errors import UserError
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.options.resolve import resolve, resolve_loss
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.weights import cancel_above_ratio, cancel_top_k, negative_weights

ALPHA, BETA, TEMPERATURE, FLOOR = 1.3, 0.7, 0.8, 0.9
SETTINGS = {"alpha": ALPHA, "beta": BETA, "temperature": TEMPERATURE, "floor": FLOOR}

PURE = {
    "soft_info_nce": lambda s, p, sim, n: losses.soft_info_nce(
        s, negative_weights(sim, ALPHA, BETA, TEMPERATURE, FLOOR, p, n), p
    ),
    "info_nce": lambda s, p, sim, n: losses.info_nce(s, p, negatives=n),
    "weighted_info_nce": lambda s, p, sim, n: losses.weighted_info_nce(s, sim, TEMPERATURE, p, negatives=n),
    "bce": lambda s, p, sim, n: losses.binary_cross_entropy(s, sim, TEMPERATURE, p, negatives=n),
    "kl_regularization": lambda s, p, sim, n: losses.kl_regularized_info_nce(
        s, sim, TEMPERATURE, 0.9, 0.4, p, negatives=n
    ),
}
CANCEL = {
    "none": lambda sim, p: torch.ones_like(sim, dtype=torch.bool),
    "top_k": lambda sim, p: cancel_top_k(sim, 2, p),
    "ratio": lambda sim, p: cancel_above_ratio(sim, 0.6, p),
}


def batch(queries=4, codes=9):
    """Makes scores, positives, and similarities between 0 and 1. The positive has similarity 1."""
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(queries, codes, generator=generator, dtype=torch.float64)
    similarity = torch.rand(queries, codes, generator=generator, dtype=torch.float64)
    positives = torch.arange(2, 2 + queries)
    return scores, positives, similarity.scatter(1, positives.unsqueeze(1), 1.0)


def test_the_tables_agree():
    assert PURE.keys() == LOSSES.keys()


@pytest.mark.parametrize("loss", PURE)
@pytest.mark.parametrize("cancel", CANCEL)
@pytest.mark.parametrize("duplicate", [False, True], ids=["unmasked", "masked"])
def test_equals_the_pure_function(loss, cancel, duplicate):
    scores, positives, similarity = batch()
    negatives = None
    kept = CANCEL[cancel](similarity, positives)
    if duplicate:
        # The least similar column of each query, which cancellation would never choose.
        least = similarity.argmin(1, keepdim=True)
        negatives = torch.ones_like(kept).scatter(1, least, False)
        kept = kept & negatives
    settings = SETTINGS | {"infonce_weight": 0.9, "kl_weight": 0.4, "distill_temperature": 0.5}
    settings |= {"cancel": cancel, "cancel_k": 2, "cancel_ratio": 0.6}
    criterion = Criterion(loss, **settings)
    targets = criterion.targets(positives, negatives, similarity=similarity)
    value = criterion(scores, targets)
    expected = PURE[loss](scores, positives, similarity, kept)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    distilled = Criterion(loss, **settings, distill_weight=0.3)
    expected = expected + 0.3 * losses.kl_divergence(scores, similarity, 0.5, positives, negatives=kept)
    found = distilled(scores, distilled.targets(positives, negatives, similarity=similarity))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    # The excluded columns had no effect.
    absent = ~kept.scatter(1, positives.unsqueeze(1), True)
    assert absent.any() == (cancel != "none" or duplicate)
    moved = criterion(scores.masked_fill(absent, 50.0), targets)
    torch.testing.assert_close(moved, value, rtol=0, atol=1e-12)


# The columns with a known similarity: of the third query not the positive, of the fourth only one.
ESTIMATED = torch.tensor(
    [
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
    ]
).bool()


def test_only_estimated_columns_are_cancelled_weighed_and_compared():
    scores, positives, similarity = batch()
    similarity[0, :4] = torch.tensor([0.9, 0.2, 1.0, 0.8])
    similarity[1, 3:7] = torch.tensor([1.0, 0.9, 0.1, 0.95])
    expected = ESTIMATED.new_ones(4, 9).scatter(1, positives.unsqueeze(1), False)
    expected[0, [0, 3]] = expected[1, [4, 6]] = False
    for cancel in ({"cancel": "ratio", "cancel_ratio": 0.7}, {"cancel": "top_k", "cancel_k": 2}):
        kept = Criterion("info_nce", **cancel).targets(positives, similarity=similarity, estimated=ESTIMATED).negatives
        assert kept[:2].tolist() == expected[:2].tolist()
        if cancel["cancel"] == "ratio":  # nothing is known of these queries' positives
            assert kept[2:].tolist() == expected[2:].tolist()
    for weighting in ("positive_aware", "linear"):
        criterion = Criterion(weighting=weighting, **SETTINGS, margin=0.5, distill_weight=1.0)
        targets = criterion.targets(positives, similarity=similarity, estimated=ESTIMATED)
        weighed = targets.weights != 1
        assert weighed[:2].sum() > 3 and not (weighed & ~ESTIMATED).any() and not weighed[3].any()
        assert weighed[2].any() == (weighting == "linear")  # Eq. 4 needs no similarity of the positive
        moved = similarity.masked_fill(~ESTIMATED, torch.nan)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(
                criterion(scores, targets), criterion(scores, criterion.targets(positives, similarity=similarity))
            )
        hidden = criterion.targets(positives, similarity=moved.nan_to_num(-7.0), estimated=ESTIMATED)
        assert criterion(scores, hidden) == criterion(scores, targets)


POSITIVES = torch.tensor([2, 0, 5, 7])
# The first query has two more relevant codes, the second none, and the third lists its positive again.
EXTRA_POSITIVES = torch.zeros(4, 9, dtype=torch.bool).index_put(
    (torch.tensor([0, 0, 2, 2, 3]), torch.tensor([4, 8, 5, 1, 0])), torch.tensor(True)
)


def loop_over_positives(criterion, scores, similarity, negatives):
    """Computes the loss by definition: one positive at a time, with the other positives' columns deleted."""
    means = []
    for query in range(len(scores)):
        right = {int(POSITIVES[query]), *EXTRA_POSITIVES[query].nonzero().flatten().tolist()}
        values = []
        for answer in sorted(right):
            kept = []
            for column in range(scores.shape[1]):
                negative = column not in right and (negatives is None or bool(negatives[query, column]))
                if column == answer or negative:
                    kept.append(column)
            positive = torch.tensor([kept.index(answer)])
            row = slice(query, query + 1)
            targets = criterion.targets(positive, similarity=similarity[row, kept])
            values.append(criterion(scores[row, kept], targets))
        means.append(sum(values) / len(values))
    return sum(means) / len(means)


@pytest.mark.parametrize("loss", PURE)
@pytest.mark.parametrize("distill_weight", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_several_positives_against_a_plain_loop(loss, distill_weight, masked):
    generator = torch.Generator().manual_seed(5)
    scores, similarity = 3 * torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    # A mask may already exclude a relevant code from the negatives, like the mask of false negatives.
    negatives = torch.rand(4, 9, generator=generator) < 0.6 if masked else None
    criterion = Criterion(loss, alpha=1.3, beta=0.7, temperature=0.5, distill_weight=distill_weight)
    scores.requires_grad_()
    value = criterion(scores, criterion.targets(POSITIVES, negatives, EXTRA_POSITIVES, similarity))
    expected = loop_over_positives(criterion, scores, similarity, negatives)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(each, scores)[0] for each in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_duplicate_does_not_use_up_the_k():
    similarity = torch.tensor([[9.0, 8, 7, 6, 5, 4]])
    negatives = torch.tensor([[True, False, True, False, True, True]])
    criterion = Criterion("info_nce", cancel="top_k", cancel_k=2)
    targets = criterion.targets(torch.tensor([0]), negatives, similarity=similarity)
    assert targets.negatives.tolist() == [[False, False, False, False, False, True]]


def test_info_nce_needs_no_similarity():
    scores, positives, _ = batch()
    criterion = Criterion("info_nce")
    assert not criterion.needs_similarity
    assert criterion(scores, Targets(positives)) == losses.info_nce(scores, positives)
    assert Criterion("info_nce", cancel="top_k").needs_similarity
    assert all(Criterion(loss).needs_similarity for loss in LOSSES if loss != "info_nce")


OTHER_VALUES = {"alpha": 2.5, "beta": 2.0, "temperature": 0.3, "floor": 0.95, "margin": 0.9}
OTHER_VALUES |= {
    "infonce_weight": 0.2,
    "kl_weight": 0.1,
    "distill_temperature": 0.2,
    "cancel_k": 1,
    "cancel_ratio": 0.9,
}


@pytest.mark.parametrize(
    ("loss", "weighting"), [*((loss, "linear") for loss in LOSSES), ("soft_info_nce", "positive_aware")]
)
def test_the_effective_settings_are_those_that_change_the_loss(loss, weighting):
    scores, positives, similarity = batch()
    for cancel in CANCEL:
        for distill_weight in (0, 0.3):
            criterion = Criterion(loss, weighting, cancel=cancel, distill_weight=distill_weight, margin=0.8)
            value = criterion(scores, criterion.targets(positives, similarity=similarity))
            for name, other in OTHER_VALUES.items():
                changed = dataclasses.replace(criterion, **{name: other})
                same = changed(scores, changed.targets(positives, similarity=similarity)) == value
                assert same == (name not in criterion.effective) == (name in criterion.unread), name
    assert OTHER_VALUES.keys() | {"loss", "weighting", "cancel", "distill_weight"} == {
        field.name for field in dataclasses.fields(Criterion)
    }


@pytest.mark.parametrize(
    "options, smallest",
    [
        ({}, 5),
        ({"alpha": 1.3, "beta": 0.7}, 3),
        ({"cancel": "top_k"}, 8),
        ({"cancel": "top_k", "cancel_k": 1}, 6),
        ({"cancel": "ratio"}, 5),
        ({"loss": "info_nce"}, 2),
        ({"loss": "info_nce", "cancel": "top_k"}, 5),
        ({"loss": "bce"}, 2),
    ],
)
def test_smallest_batch(options, smallest):
    assert Criterion(**options).smallest_batch == smallest


@pytest.mark.parametrize("cancel", ["none", "top_k"])
@pytest.mark.parametrize("loss", LOSSES)
def test_targets_hold_only_what_the_loss_reads(loss, cancel):
    scores, positives, similarity = batch()
    targets = Criterion(loss, cancel=cancel, alpha=0.5).targets(positives, similarity=similarity)
    assert (targets.weights is not None) == (loss == "soft_info_nce")
    assert (targets.similarity is not None) == (loss not in ("soft_info_nce", "info_nce"))
    assert (targets.negatives is None) == (cancel == "none")
    distilled = Criterion(loss, cancel=cancel, alpha=0.5, distill_weight=0.1)
    assert distilled.targets(positives, similarity=similarity).similarity is similarity


def test_targets_of_a_block_are_a_block_of_the_targets():
    scores, positives, similarity = batch()
    criterion = Criterion(distill_weight=0.5, cancel="top_k", cancel_k=1)
    targets = criterion.targets(POSITIVES, extra_positives=EXTRA_POSITIVES, similarity=similarity)
    blocks = [slice(0, 3), slice(3, 4)]
    parts = [len(targets[block]) / 4 * criterion(scores[block], targets[block]) for block in blocks]
    torch.testing.assert_close(sum(parts), criterion(scores, targets), rtol=0, atol=1e-12)


def test_a_loss_without_its_similarities_is_an_error():
    with pytest.raises(ValueError, match="loss=soft_info_nce, cancel=top_k: similarity is missing"):
        Criterion(cancel="top_k").targets(torch.arange(3))


# ---- A user's own functions ----


def test_a_users_loss_gets_what_it_names():
    scores, positives, similarity = batch()
    negatives = torch.ones_like(scores, dtype=torch.bool)
    negatives[:, 0] = False
    extra_positives = ~negatives
    settings = Criterion("own_losses:hinge", "own_losses:halves")
    targets = settings.targets(positives, negatives, extra_positives, similarity)
    assert targets.weights[0].unique().tolist() == [0.0, 1.0]  # the positive is most similar
    expected = own_losses.hinge(
        scores, positives, weights=targets.weights, negatives=negatives, extra_positives=extra_positives
    )
    assert settings(scores, targets) == expected > 0
    assert settings.needs_similarity and not Criterion("own_losses:info_nce").needs_similarity


def test_weights_of_a_user_are_0_on_what_does_not_count_and_1_on_the_positive():
    similarity = torch.tensor([[0.2, 0.9, 0.1, 0.8]])
    negatives = torch.tensor([[False, True, True, False]])
    criterion = Criterion(weighting="own_losses:halves")
    weights = criterion.targets(torch.tensor([0]), negatives, similarity=similarity).weights
    assert weights.tolist() == [[1.0, 0.5, 1.0, 0.0]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "no_such_module:loss"}, "loss='no_such_module:loss': No module named"),
        ({"loss": "own_losses:nothing"}, "has no attribute 'nothing'"),
        ({"loss": "own_losses:torch"}, "loss=own_losses:torch: expected a function"),
        ({"loss": "own_losses:unknown"}, "TypeError: unknown() missing 1 required positional argument: 'rows'"),
        ({"loss": "own_losses:several"}, "returned Tensor[3] for scores of Tensor[3, 5]: expected a scalar"),
        ({"loss": "own_losses:total"}, "for the same queries twice: expected the mean over queries"),
        ({"loss": "own_losses:over_the_batch_size"}, "for the same queries twice: expected the mean over queries"),
        ({"loss": "own_losses:sum_of_scores"}, "for the same queries twice: expected the mean over queries"),
        ({"loss": "own_losses:symmetric_total"}, "for the same queries twice: expected the mean over queries"),
        ({"loss": "own_losses:constant"}, "with a gradient for the scores"),
        ({"loss": "own_losses:needs_negatives"}, "failed on a test batch of 3 queries and 5 functions. TypeError"),
        ({"loss": "own_losses:hinge"}, "loss=own_losses:hinge needs an estimator"),
        ({"loss": "own_losses:info_nce", "false_negatives": "positives"}, "has no argument `extra_positives`"),
        (
            {"loss": "own_losses:info_nce", "weighting": "own_losses:halves"},
            "loss=own_losses:info_nce uses no weights",
        ),
        (
            {"weighting": "own_losses:hinge"},
            "weighting=own_losses:hinge failed on a test batch of 3 queries and 5 functions. TypeError: hinge()",
        ),
        ({"weighting": "own_losses:one_weight"}, "returned Tensor[3] for similarities of Tensor[3, 5]"),
        ({"loss": lambda scores: scores}, "expected a scalar"),
    ],
)
def test_a_function_that_no_step_can_call_is_refused(options, message):
    needs_estimator = "weighting" in options and "loss" not in options
    with pytest.raises(UserError) as error:
        resolve_loss(SoftInfoNCEOptions(**options), object() if needs_estimator else None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["in_both_directions", "with_a_balance", "uniform"])
def test_a_term_over_queries_is_refused_only_if_queries_are_divided(name):
    options = {"loss": f"own_losses:{name}"}
    assert resolve_loss(SoftInfoNCEOptions(**options)).loss == options["loss"]
    for divided, processes, words in (
        ({"gradient_cache_chunk_size": 8}, 1, "gradient_cache_chunk_size=8"),
        ({}, 2, "2 processes"),
    ):
        with refused("a query's term depends on other queries", f"change with {words}", "override block_loss"):
            resolve_loss(SoftInfoNCEOptions(**options, **divided), None, processes)
        resolve_loss(SoftInfoNCEOptions(loss="own_losses:info_nce", **divided), None, processes)
        resolve_loss(SoftInfoNCEOptions(loss="own_losses:hinge", **divided), object(), processes)


def test_a_function_from_python_is_kept_by_its_name():
    args = SoftInfoNCETrainingArguments("unused", loss=own_losses.hinge, weighting=own_losses.halves, use_cpu=True)
    kept = json.loads(args.to_json_string())
    assert (kept["loss"], kept["weighting"]) == ("own_losses:hinge", "own_losses:halves")
    assert resolve_loss(args, object()).loss_function is own_losses.hinge


@pytest.mark.parametrize(
    "noisy",
    [
        lambda scores: F.dropout(scores, 0.01),
        lambda scores: F.dropout(scores, 0.5),
        lambda scores: scores * (1 + random.random()),
        lambda scores: scores * torch.from_numpy(np.random.rand(*scores.shape)),
    ],
)
def test_a_random_loss_is_not_compared_with_itself(noisy):
    def loss(scores, positives):
        return own_losses.info_nce(noisy(scores), positives)

    for _ in range(20):
        assert resolve_loss(SoftInfoNCEOptions(loss=loss)).loss_function is loss


def test_a_weighting_without_a_number_is_named():
    def raw(similarity):
        return similarity

    with refused("raw returned nan for a test batch"):
        resolve_loss(SoftInfoNCEOptions(weighting=raw), object())


class Scaled:
    """A loss that is an object with a setting."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, scores, positives):
        return self.factor * own_losses.info_nce(scores, positives)


def scaled(factor):
    """Returns a loss that is a closure."""

    def loss(scores, positives):
        return factor * own_losses.info_nce(scores, positives)

    return loss


def of_alpha(scores, positives, *, alpha):
    """A loss whose setting has the name of an option."""
    return alpha * own_losses.info_nce(scores, positives)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (scaled(3), "test_criterion:scaled.<locals>.loss"),
        (Scaled(3), "test_criterion:Scaled"),
        (Scaled(3).__call__, "test_criterion:Scaled.__call__"),
        (functools.partial(of_alpha, alpha=3), "test_criterion:of_alpha"),
        (lambda scores, positives: 3 * own_losses.info_nce(scores, positives), "test_criterion:<lambda>"),
    ],
    ids=["closure", "object", "method", "partial", "lambda"],
)
def test_a_loss_may_be_any_callable_and_is_kept_with_its_name(loss, name, tmp_path):
    args = SoftInfoNCETrainingArguments(str(tmp_path), loss=loss, use_cpu=True)
    assert json.loads(args.to_json_string())["loss"] == name
    scores = torch.eye(4).requires_grad_()
    criterion = resolve(copy.copy(args)).criterion
    expected = 3 * F.cross_entropy(scores, torch.arange(4))
    assert criterion(scores, criterion.targets(torch.arange(4))).item() == pytest.approx(expected.item())
