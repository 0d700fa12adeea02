import pytest
import torch

from soft_trainer import BM25Estimator, InitialModelEstimator, MixtureEstimator, SimCSEEstimator
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator


class Fixed(Estimator):
    alpha, beta, temperature = 1.2, 0.8, 0.5

    def __init__(self, values):
        self.values = torch.tensor(values)

    def fit(self, dataset):
        self.rows = len(dataset)

    def similarity(self, query_rows, code_rows):
        return self.values[torch.as_tensor(query_rows)][:, torch.as_tensor(code_rows)]


A = [[9.0, 1.0, 2.0], [0.0, 5.0, 1.0], [3.0, 3.0, 3.0]]
B = [[1.0, 0.0, 4.0], [2.0, 2.0, 2.0], [0.0, 9.0, 1.0]]


def test_a_softmax_at_temperature_one_gives_the_average_of_the_distributions_back():
    mixture = MixtureEstimator([Fixed(A), Fixed(B)], shares=[3, 1], temperatures=[1.0, 2.0])
    rows = [0, 1, 2]
    own = torch.eye(3, dtype=torch.bool)
    members = [torch.tensor(A), torch.tensor(B) / 2]
    a, b = (values.masked_fill(own, -torch.inf).softmax(1) for values in members)
    found = mixture.similarity(rows, rows).masked_fill(own, -torch.inf).softmax(1)
    torch.testing.assert_close(found, 0.75 * a + 0.25 * b)
    assert mixture.temperature == 1.0


def test_defaults_are_the_first_members_and_each_members_own_temperature():
    mixture = MixtureEstimator([Fixed(A), BM25Estimator()])
    assert (mixture.alpha, mixture.beta) == (1.2, 0.8)
    assert mixture.temperatures == [0.5, 1.0] and mixture.shares == [0.5, 0.5]


def test_columns_in_another_order_and_of_other_rows_line_up():
    mixture = MixtureEstimator([Fixed(A), Fixed(B)])
    whole = mixture.similarity([0, 1, 2], [0, 1, 2])
    torch.testing.assert_close(mixture.similarity([2, 0], [1, 2, 0]), whole[[2, 0]][:, [1, 2, 0]])


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_shares_that_do_not_fit_are_refused(shares):
    with pytest.raises(UserError, match="2 numbers above 0"):
        MixtureEstimator([Fixed(A), Fixed(B)], shares=shares)


def test_an_estimator_prints_as_the_call_that_makes_it():
    words = BM25Estimator("text", document_column="code", k1=2.0)
    assert repr(words) == "BM25Estimator(column='text', document_column='code', k1=2.0)"
    assert repr(InitialModelEstimator(cache_dir=None)) == "InitialModelEstimator(cache_dir=None)"
    mixture = MixtureEstimator([SimCSEEstimator("folder"), Fixed(A)], [3, 1])
    members = "[SimCSEEstimator(model_name_or_path='folder'), Fixed(values=tensor("
    assert repr(mixture).startswith(f"MixtureEstimator(members={members}")
