from soft_trainer import BM25Estimator, InitialModelEstimator


def test_an_estimator_prints_as_the_call_that_makes_it():
    words = BM25Estimator("text", document_column="code", k1=2.0)
    assert repr(words) == "BM25Estimator(column='text', document_column='code', k1=2.0)"
    assert repr(InitialModelEstimator(cache_dir=None)) == "InitialModelEstimator(cache_dir=None)"
