"""Matryoshka embeddings: the loss, the gradients, and the metrics for each number of dimensions."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from soft_trainer.encoders.encoding import check_dims, parse_dims, shorten
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.losses import soft_info_nce
from soft_trainer.system.files import PROFILE_FILE

DIMS = {"matryoshka_dims": "32,16,4"}


def test_dims_are_read_and_sorted():
    assert parse_dims(None) == ()
    assert parse_dims("64, 768,256") == parse_dims([256, 768, 64]) == (768, 256, 64)


@pytest.mark.parametrize("dims", [16, [8.7], 8.0, "768,x", "768,0", "64,64", ""])
def test_dims_that_cannot_be(dims):
    with pytest.raises(UserError) as error:
        parse_dims(dims)
    assert str(error.value).startswith(f"matryoshka_dims={dims}: expected distinct, comma-separated whole numbers")


@pytest.mark.parametrize("dim", ["8", 2.5, True, 33, 0])
def test_a_cut_that_cannot_be(dim):
    with pytest.raises(UserError, match="truncate_dim=.*: must be a whole number from 1 to 32"):
        check_dims([dim], 32, "truncate_dim")


def test_shortened_embeddings_are_normalised_anew_where_the_profile_normalises():
    rows = torch.randn(3, 8)
    assert torch.equal(shorten(EncoderProfile(), rows, 4), rows[:, :4])
    assert torch.equal(shorten(EncoderProfile(), rows, None), rows)
    normalised = shorten(EncoderProfile(normalize=True), F.normalize(rows, dim=-1), 4)
    torch.testing.assert_close(normalised, F.normalize(rows[:, :4], dim=-1))


def test_the_loss_is_the_sum_over_the_dimensions_with_shared_weights(trainer_of, dataset):
    trainer = trainer_of(**DIMS)
    trainer.model.eval()
    batch = trainer.weighed(next(iter(trainer.get_train_dataloader())))
    with torch.no_grad(), trainer.running():
        loss = trainer.compute_loss(trainer.model, batch)
        queries, codes = trainer.embeddings(trainer.model, batch)
    expected = 0.0
    for dim in (32, 16, 4):
        scores = F.normalize(queries[:, :dim], dim=-1) @ F.normalize(codes[:, :dim], dim=-1).T * 20
        expected += soft_info_nce(scores, batch.targets.weights, batch.targets.positives)
    torch.testing.assert_close(loss, expected)


def test_evaluation_measures_every_number_of_dimensions(trainer_of, dataset, tmp_path):
    trainer = trainer_of(**DIMS, eval_strategy="steps", eval_steps=3, metric_for_best_model="mrr_4")
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_mrr", "eval_mrr_16", "eval_mrr_4"} <= metrics.keys() and "eval_mrr_32" not in metrics
    output = trainer.predict(dataset)
    assert output.metrics["test_mrr_4"] == metrics["eval_mrr_4"]
    with pytest.raises(UserError, match="metric_for_best_model='mrr_8': this metric is not measured"):
        trainer_of(**DIMS, eval_strategy="steps", eval_steps=3, metric_for_best_model="mrr_8")
    for name in ("map", "ndcg@10"):  # plain pairs have them too
        trainer_of(**DIMS, eval_strategy="steps", eval_steps=3, metric_for_best_model=name)
        assert 0 < metrics[f"eval_{name}"] <= 1


def test_the_folder_stores_the_dimensions_and_gives_shorter_embeddings(trainer_of, dataset, tmp_path):
    from sentence_transformers import SentenceTransformer

    trainer = trainer_of(**DIMS, max_steps=1)
    trainer.train()
    trainer.save_model()
    folder = trainer.args.output_dir
    texts = dataset["docstring"][:4]
    whole, short = (load_encoder(folder, device="cpu", truncate_dim=dim) for dim in (None, 4))
    assert whole.profile.matryoshka_dims == (32, 16, 4)
    assert torch.equal(short.encode_queries(texts), whole.encode_queries(texts)[:, :4])
    theirs = SentenceTransformer(folder, device="cpu", truncate_dim=4).encode_query(texts)
    torch.testing.assert_close(torch.tensor(theirs), short.encode_queries(texts), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="truncate_dim=40"):
        load_encoder(folder, truncate_dim=40)
    again = trainer_of(arguments={"model": whole.model, "encoder": whole.profile})
    assert "eval_mrr_16" in again.evaluate()  # the folder stores the dimensions
    again.save_model(str(tmp_path / "again"))
    assert EncoderProfile.load(tmp_path / "again" / PROFILE_FILE).matryoshka_dims == ()  # the last training used none


@pytest.mark.slow
def test_a_run_writes_the_metrics_and_the_card(script, data_dir):
    code, errors = script(
        data_dir=data_dir, language="python", from_scratch="32x1", vocabulary_size=400, output_dir="out", max_steps=1,
        per_device_train_batch_size=8, query_length=16, code_length=32, use_cpu=True, examples=0, lexical=False,
        **DIMS,
    )  # fmt: skip
    assert code == 0, errors
    numbers = json.loads(Path("out/all_results.json").read_text())
    assert {"test_mrr", "test_mrr_16", "test_mrr_4", "test_untrained_mrr_4"} <= numbers.keys()
    record = json.loads(Path("out/run.json").read_text())
    assert record["results"]["test"]["trained"]["mrr_16"] == numbers["test_mrr_16"]
    card = Path("out/README.md").read_text()
    assert "MRR, 16 dimensions" in card and "truncate_dim=4" in card and "- matryoshka" in card
    assert "their first 32, 16 and 4 dimensions" in card
