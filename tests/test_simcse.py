import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import refused
from transformers import TrainerCallback

from soft_trainer import losses
from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.estimators.frozen_encoder import SimCSEEstimator
from soft_trainer.files import newest_complete
from soft_trainer.options.parse import parse
from soft_trainer.simcse import (
    SimCSEArguments,
    SimCSETrainingArguments,
    alignment,
    build_trainer,
    load_queries,
    uniformity,
)
from soft_trainer.training.finite import NotFiniteError

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.fixture
def make_trainer(encoder_dir, data_dir, tmp_path):
    def make(folder=encoder_dir, **options):
        settings = {"per_device_train_batch_size": 8, "max_steps": 2, "use_cpu": True, "report_to": "none"}
        args = SimCSETrainingArguments(output_dir=str(tmp_path / "run"), **settings | options)
        arguments = SimCSEArguments(model_name_or_path=str(folder), data_dirs=[str(data_dir)], query_length=16)
        return build_trainer(arguments, args)[0]

    return make


@pytest.fixture
def options(encoder_dir, data_dir, tmp_path) -> list[str]:
    return [
        *("--model_name_or_path", str(encoder_dir), "--data_dirs", str(data_dir), "--output_dir", str(tmp_path)),
        *("--query_length", "16", "--per_device_train_batch_size", "4", "--max_steps", "3", "--use_cpu", "true"),
    ]


def test_alignment_and_uniformity_of_known_points():
    points = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    assert alignment(points, points.flip(1)).item() == pytest.approx((2 + 2 + 2) / 3)
    # Squared distances 2, 4 and 2.
    assert uniformity(points).item() == pytest.approx(math.log((2 * math.exp(-4) + math.exp(-8)) / 3), rel=1e-5)
    assert uniformity(torch.ones(5, 4)).item() == pytest.approx(0, abs=1e-6)


def test_queries_are_distinct_and_held_out_ones_are_new(rows, data_dir, profile, tmp_path):
    more = [rows[0], rows[20], {**rows[21], "docstring_tokens": []}, rows[20]]
    for split, chosen in {"train": more, "valid": [rows[1], rows[22]]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    data = load_queries(SimCSEArguments(data_dirs=[str(data_dir), str(tmp_path)]), profile, seed=0)
    queries = {split: data[split]["query"] for split in data}
    assert sorted(queries["train"]) == sorted([row["docstring"] for row in rows[:16]] + [rows[20]["docstring"]])
    assert sorted(queries["valid"]) == sorted([row["docstring"] for row in rows[16:20]] + [rows[22]["docstring"]])


def test_a_query_finds_itself_under_another_dropout(make_trainer):
    trainer = make_trainer()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    torch.manual_seed(1)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    torch.manual_seed(1)
    views = [trainer.model(inputs)["sentence_embedding"] for inputs in trainer.collect_features(batch)[0]]
    assert loss.item() == pytest.approx(losses.info_nce(views[0] @ views[1].T / 0.07).item(), rel=1e-5)
    assert not torch.allclose(*views, atol=1e-3)
    trainer.model.eval()
    assert torch.equal(*(trainer.model(inputs)["sentence_embedding"] for inputs in trainer.collect_features(batch)[0]))


@pytest.mark.slow
def test_training_spreads_the_queries_and_measuring_does_not_disturb_it(make_trainer):
    weights = []
    for measured in ("no", "steps"):
        trainer = make_trainer(max_steps=8, eval_strategy=measured, eval_on_start=measured == "steps", eval_steps=2)
        trainer.train()
        weights.append(torch.cat([value.flatten() for value in trainer.model.state_dict().values()]))
    assert torch.equal(*weights)
    measured = [entry for entry in trainer.state.log_history if "eval_uniformity" in entry]
    assert [entry["step"] for entry in measured] == [0, 2, 4, 6, 8]
    assert measured[-1]["eval_uniformity"] < measured[0]["eval_uniformity"]
    assert 0 < measured[-1]["eval_alignment"] < 4


def test_evaluation_repeats(make_trainer):
    trainer = make_trainer()
    first, second = ({**trainer.evaluate(), "eval_runtime": 0} for _ in range(2))
    assert first == second


def test_a_model_without_dropout_is_refused(make_trainer, encoder_dir, tmp_path):
    folder = shutil.copytree(encoder_dir, tmp_path / "encoder")
    config = json.loads((folder / "config.json").read_text())
    dropouts = {name: 0.0 for name in config if name.endswith("dropout_prob")}
    (folder / "config.json").write_text(json.dumps(config | dropouts))
    with refused("no dropout"):
        make_trainer(folder)


def test_a_loss_that_is_not_finite_stops_the_run(make_trainer):
    class Breaker(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)

    trainer = make_trainer(logging_steps=1, eval_strategy="no", eval_on_start=False)
    trainer.add_callback(Breaker())
    with pytest.raises(NotFiniteError, match="loss of step 2 is nan"):
        trainer.train()


@pytest.mark.slow
def test_a_stopped_run_resumes_from_its_checkpoint(options, tmp_path):
    words = [*options, *"--save_strategy steps --save_steps 2".split()]
    assert run_command(["simcse", *words, "--save_total_limit", "2"]) == 0
    whole = load_encoder(tmp_path).model.state_dict()
    shutil.rmtree(tmp_path / "checkpoint-3")
    assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-2")
    assert run_command(["simcse", *words, "--resume_from_checkpoint", "last"]) == 0
    resumed = load_encoder(tmp_path).model.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_the_command_leaves_an_encoder_and_what_it_measured(options, encoder_dir, dataset, tmp_path):
    assert run_command(["simcse", *options]) == 0
    results = json.loads((tmp_path / "run.json").read_text())
    assert [entry["step"] for entry in results["measured"]] == [0, 1, 2, 3]
    encoder = load_encoder(tmp_path)
    assert encoder.profile.normalize and encoder.profile.query_length == 16
    assert encoder.profile.score_scale == pytest.approx(1 / 0.07)
    assert encoder.profile.code_columns == ("code_tokens", "code")
    before, after = (dict(load_encoder(folder).model.named_parameters()) for folder in (encoder_dir, tmp_path))
    assert all(not torch.equal(before[name], after[name]) for name in before)
    estimator = SimCSEEstimator(tmp_path, cache_dir=None)
    estimator.fit(dataset)
    similarity = estimator.similarity([0, 1], range(24))
    assert similarity.abs().max() <= 1 + 1e-5 and similarity[0, 0].item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "given, says",
    [
        (["--languages", "ruby", "cobol"], "language='cobol'"),
        (["--data_dirs", "/nowhere/at/all"], "no such folder"),
        (["--temperature", "0"], "temperature=0: must be above 0"),
        (["--query_columns", "summary"], "--query_columns"),
        (["--query_columns", "func_name_of_old"], "no column for the query"),
        (["--max_train_rows", "-1"], "max_train_rows=-1: must be 1 or more"),
        (["--max_eval_rows", "1"], "max_eval_rows=1: must be 2 or more"),
        (["--per_device_train_batch_size", "17"], "train: 16 queries are less than a batch of 17: lower --per_device"),
    ],
)
def test_what_is_wrong_is_named(given, says, options):
    place = options.index("--data_dirs")
    words = options[:place] + options[place + 2 :] if given[0] == "--languages" else options
    with refused(says):
        run_command(["simcse", *words, *given])


@pytest.mark.parametrize("recipe", ["simcse.yaml", "smoke/simcse.yaml"])
def test_recipes_parse(recipe):
    arguments, args = parse((SimCSEArguments, SimCSETrainingArguments), ["--config", str(RECIPES / recipe)])
    assert (args.temperature, args.learning_rate) == (0.07, 5e-4)
    if recipe == "simcse.yaml":
        assert (args.per_device_train_batch_size, args.num_train_epochs) == (256, 10)
        assert arguments.model_name_or_path == "sentence-transformers/msmarco-distilbert-dot-v5"
        assert len(arguments.languages) == 6


@pytest.mark.slow
def test_two_processes_leave_a_folder_for_sentence_transformers(options, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "soft_trainer.cli", "simcse", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "each query has 7 negatives; 2 processes" in done.stderr

    from sentence_transformers import SentenceTransformer

    texts = ["sort a list", "open a connection to a server"]
    theirs = torch.from_numpy(SentenceTransformer(str(tmp_path), device="cpu").encode(texts))
    assert torch.allclose(theirs, load_encoder(tmp_path, device="cpu").encode_queries(texts), atol=1e-6)
    assert theirs.norm(dim=1).tolist() == pytest.approx([1, 1], abs=1e-5)
