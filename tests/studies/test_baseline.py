"""Baselines by sentence-transformers: their options, their output folder, and their place in a study."""

import json
from dataclasses import asdict

import pytest
import torch
from refusals import refused
from torch.nn.functional import normalize

from soft_trainer import record
from soft_trainer.cli.__main__ import parse_command, run_command
from soft_trainer.errors import UserError
from soft_trainer.studies import execution
from soft_trainer.studies.baseline import train_baseline
from soft_trainer.studies.grid import read_study

HERE = ["--language", "python", "--use_cpu", "true", "--disable_tqdm", "true", "--max_steps", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "triplet"], "baseline='triplet': use one of mnrl, gist"),
        (["--hardness_mode", "all"], "hardness_mode='all': use one of in_batch_negatives"),
        (["--hardness_mode", "all_negatives"], "needs baseline=mnrl and a hardness_strength above 0"),
        (["--mined_negatives", "21"], "mined_negatives=21: from 0 to mined_ranks=20"),
        (["--weighting", "positive_aware"], "weighting: an option of our trainer"),
        (["--train_sampling_strategy", "similar"], "train_sampling_strategy: an option of our trainer"),
        (["--gradient_checkpointing", "true"], "gradient_checkpointing: an option of our trainer"),
        (["--save_strategy", "steps"], "save_strategy: an option of our trainer"),
        (["--estimator", "bm25"], "estimator: an option of our trainer"),
        (["--early_stopping_patience", "2"], "early_stopping_patience: an option of our trainer"),
        (["--save_strategy", "no", "--estimator", "none", "--from_scratch", "32x1"], "trains a pretrained encoder"),
    ],
)
def test_what_a_baseline_cannot_do_is_refused_before_a_model_loads(words, message):
    with refused(message):
        command, options = parse_command(["baseline", *HERE, *words])
        command.run(*options)


def test_a_folder_with_another_baseline_or_a_run_of_ours_is_left_alone(encoder_dir, data_dir, tmp_path):
    def settings_of(kind, words):
        places = ["--model_name_or_path", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(tmp_path)]
        _, options = parse_command([kind, *HERE, *places, *words])
        return options

    baseline, *options = settings_of("baseline", ["--mined_negatives", "1"])
    settings = record.settings_of(*options)
    for made, words in (
        (asdict(baseline), "(mined_negatives was 1, is 0)"),
        ({**asdict(baseline), "baseline": "gist"}, "(baseline was gist, is mnrl; mined_negatives was 1, is 0)"),
        ({}, "(baseline was None, is mnrl)"),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"options": settings | made}))
        with refused("holds another run", words):
            train_baseline(*settings_of("baseline", []))
        if made:
            with refused("holds another run", "is None)"):
                record.check_output_dir(*options)
        else:
            record.check_output_dir(*options)


def test_gist_is_for_cosine_scores(encoder_dir, data_dir, own_cache, tmp_path):
    places = ["--model_name_or_path", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(tmp_path)]
    with refused("baseline=gist compares by cosine", "--score_function cosine"):
        run_command(["baseline", *HERE, *places, "--baseline", "gist", "--score_function", "dot"])


COSINE = ["--score_function", "cosine", "--score_scale", "20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "loss"),
    [
        (["--hardness_mode", "in_batch_negatives", "--hardness_strength", "9"], "MultipleNegativesRankingLoss"),
        (["--baseline", "gist", "--mined_negatives", "1", *COSINE], "CachedGISTEmbedLoss"),
    ],
)
def test_a_baseline_trains_and_writes_the_folder_of_a_run(encoder_dir, data_dir, own_cache, tmp_path, words, loss):
    from soft_trainer import load_encoder

    folder = tmp_path / "out"
    places = ["--model_name_or_path", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(folder)]
    assert run_command(["baseline", *HERE, *words, *places, "--per_device_train_batch_size", "2"]) == 0
    made = json.loads((folder / "run.json").read_text())
    assert made["loss"]["loss"] == loss and made["training"]["steps"] == 2
    assert 0 < made["results"]["test"]["trained"]["mrr"] <= 1
    trained, before = load_encoder(folder).model.state_dict(), load_encoder(encoder_dir).model.state_dict()
    assert any((trained[name] != before[name]).any() for name in before)
    assert (folder / "ranks-test-trained.parquet").exists()


def test_a_study_starts_the_command_of_a_module(tmp_path):
    path = tmp_path / "study.yaml"
    method = [{"name": "ours"}, {"name": "mnrl", "module": "soft_trainer.studies.baseline"}]
    path.write_text(json.dumps({"output_dir": str(tmp_path), "grid": {"method": method, "seed": [1]}}))
    study = read_study(path)
    assert [execution.command(study, study.runs[name])[5] for name in ("ours/1", "mnrl/1")] == ["train", "baseline"]
    both = [{"name": "b", "module": "soft_trainer.simcse"}]
    path.write_text(json.dumps({"output_dir": str(tmp_path), "grid": {"method": method, "other": both}}))
    with pytest.raises(UserError, match="mnrl/b: it has two modules"):
        read_study(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "scale"), [(["--score_function", "dot", "--score_scale", "1"], 1.0), (COSINE, 20.0)]
)
def test_a_baseline_trains_with_the_score_that_it_is_measured_by(
    words, scale, encoder_dir, data_dir, own_cache, tmp_path, monkeypatch
):
    import sentence_transformers

    def trained(*_, loss, **__):
        a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]])
        score = normalize(a) @ normalize(b).T if words is COSINE else a @ b.T
        assert loss.scale == scale and torch.allclose(loss.similarity_fct(a, b), score)
        raise KeyboardInterrupt

    monkeypatch.setattr(sentence_transformers, "SentenceTransformerTrainer", trained)
    places = ["--model_name_or_path", str(encoder_dir), "--data_dir", str(data_dir), "--output_dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        run_command(["baseline", *HERE, *places, *words])
