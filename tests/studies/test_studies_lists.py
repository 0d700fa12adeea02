"""Lists in a study's YAML: joined by commas, as in a recipe, in options, names and placeholders."""

import pytest
import yaml
from refusals import refused

from soft_trainer.studies import execution
from soft_trainer.studies.grid import read_study


@pytest.fixture
def study(tmp_path):
    def write(**content):
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out")} | content))
        return read_study(path)

    return write


def test_a_list_of_an_option(study, tmp_path):
    (tmp_path / "recipe.yaml").write_text("lora_r: 4\nlora_target_modules: [query, value]\nreport_to: [none]\n")
    entry = {"name": "a", "config": "recipe.yaml", "matryoshka_dims": [32, 8]}
    plans = study(grid={"method": [entry]}, options={"estimator": "none", "filters": ["short_functions"]})
    (run,) = plans.chosen()
    model, data, args = execution.check(plans, run)
    assert args.matryoshka_dims == "32,8" and model.lora_target_modules == "query,value"
    assert data.filters == "short_functions" and args.report_to == []
    written = execution.recipe(plans, run)
    assert execution.parse(execution.OURS, [], options=written | {"use_cpu": True})[2].matryoshka_dims == "32,8"


def test_an_axis_of_lists_and_placeholders_in_a_list(study):
    plans = study(grid={"matryoshka_dims": [[32, 8], 32]}, options={"estimator": "none", "lora_r": 2})
    runs = plans.chosen("matryoshka_dims=32-8")
    assert list(plans.runs) == ["32-8", "32"] and [run.name for run in runs] == ["32-8"]
    assert execution.check(plans, runs[0])[2].matryoshka_dims == "32,8"
    options = {"estimator": "none", "eval_data_dir": ["a/{language}", "b/{filters}"], "filters": ["x", "y"]}
    plans = study(grid={"language": ["ruby"]}, options=options)
    assert plans.runs["ruby"].options["eval_data_dir"] == ["a/ruby", "b/x,y"]
    with refused("no option 'place' is given"):
        study(grid={"language": ["ruby"]}, options={"eval_data_dir": ["{place}"]})
