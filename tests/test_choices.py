import pkgutil
import re

from soft_trainer import choices
from soft_trainer.estimators.base import Estimator, NeighbourEstimator


def test_every_estimator_is_a_class_and_messages_list_those_that_find_neighbours():
    classes = {}
    for name, place in choices.ESTIMATORS.items():
        if place is not None:
            classes[name] = pkgutil.resolve_name(f"soft_trainer.estimators.{place}")
    assert all(issubclass(each, Estimator) for each in classes.values())
    listed = re.split(", | or ", choices.FIND_NEIGHBOURS)
    assert sorted(listed) == sorted(name for name, each in classes.items() if issubclass(each, NeighbourEstimator))
