import pytest
from refusals import refused

from soft_trainer import BM25Estimator, InitialModelEstimator, SimCSEEstimator, TrainedModelEstimator


def test_an_estimator_prints_as_the_call_that_makes_it():
    words = BM25Estimator("text", document_column="code", k1=2.0)
    assert repr(words) == "BM25Estimator(column='text', document_column='code', k1=2.0)"
    assert repr(InitialModelEstimator(cache_dir=None)) == "InitialModelEstimator(cache_dir=None)"


@pytest.mark.parametrize(
    "estimator", [BM25Estimator(), SimCSEEstimator("x"), TrainedModelEstimator("x"), InitialModelEstimator()], ids=repr
)
def test_an_estimator_that_is_not_fitted_is_reported(estimator):
    says = f"{type(estimator).__name__} is not fitted: call fit(split) first"
    with refused(says):
        estimator.similarity([0], [0])
    with refused(says):
        estimator.neighbours(1, excluded=None)
