import inspect
import pkgutil
import re

from soft_trainer.estimators.base import Estimator, NeighbourEstimator
from soft_trainer.options import choices


def test_every_estimator_is_a_class_and_messages_list_those_that_find_neighbours():
    classes = {}
    for name, choice in choices.ESTIMATORS.items():
        if choice is not None:
            classes[name] = pkgutil.resolve_name(f"soft_trainer.estimators.{choice.reference}")
    assert all(issubclass(each, Estimator) for each in classes.values())
    for name, each in classes.items():
        choice = choices.ESTIMATORS[name]
        assert choice.finds_neighbours == issubclass(each, NeighbourEstimator), name
        assert choice.takes_model == ("model_name_or_path" in inspect.signature(each).parameters), name
        assert name == "bm25" or choice.compares_codes == each.compares_codes, name
    listed = re.split(", | or ", choices.FIND_NEIGHBOURS)
    assert sorted(listed) == sorted(name for name, each in classes.items() if issubclass(each, NeighbourEstimator))
