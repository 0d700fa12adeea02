import shutil
import sys

from soft_trainer.encoders.loading import load_encoder
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.fields import EstimatorOptions


def test_names_give_estimators_with_their_options(encoder_dir, tmp_path):
    assert choose_estimator(EstimatorOptions(estimator="none")) is None
    bm25 = choose_estimator(EstimatorOptions(estimator="bm25", bm25_idf="lucene", bm25_scope="corpus"))
    assert (bm25.idf, bm25.scope) == ("lucene", "corpus")
    named = {"estimator_model": str(encoder_dir), "estimator_cache_dir": str(tmp_path)}
    trained = choose_estimator(EstimatorOptions(estimator="trained_model", **named))
    assert trained.cache_dir == str(tmp_path)


def test_a_folder_may_have_an_at_sign_in_its_path(encoder_dir, tmp_path):
    folder = tmp_path / "ann@example.org" / "encoder"
    shutil.copytree(encoder_dir, folder)
    estimator = choose_estimator(EstimatorOptions(estimator="trained_model", estimator_model=str(folder)))
    assert estimator.load().profile == load_encoder(encoder_dir).profile


def test_an_own_class_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text("class Mine:\n    fit = similarity = print\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)  # an installed command must also find modules in the current folder
    assert type(choose_estimator(EstimatorOptions(estimator="my_estimators:Mine"))).__name__ == "Mine"
    sys.modules.pop("my_estimators")
