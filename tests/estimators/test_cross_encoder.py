"""A cross-encoder as the teacher: its scores equal those of sentence-transformers, and it is refused as an encoder."""

import pytest
import torch
from datasets import Dataset
from refusals import refused
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import cos_sim
from transformers import BertConfig, BertForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from soft_trainer import (
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    distil_static,
    load_encoder,
)
from soft_trainer.data.load import training_split
from soft_trainer.encoders.profiles import is_cross_encoder
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.estimators.scores import CrossEncoderEstimator
from soft_trainer.options.fields import EstimatorOptions
from soft_trainer.sentence_transformers import SoftInfoNCELoss, with_rows
from soft_trainer.system import distributed

SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def saved(folder, tokenizer, labels: int = 1, config=RobertaConfig, kind=RobertaForSequenceClassification):
    """Saves a random sequence classifier with its tokenizer."""
    torch.manual_seed(1)
    sizes = SIZE | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": labels}
    model = kind(config(**sizes, max_position_embeddings=300, initializer_range=0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tokenizer, tmp_path_factory):
    """A cross-encoder as transformers saves it."""
    return saved(tmp_path_factory.mktemp("cross") / "reranker", tokenizer)


@pytest.fixture(scope="module")
def with_modules(plain, tmp_path_factory):
    """A cross-encoder as sentence-transformers saves it."""
    folder = tmp_path_factory.mktemp("cross") / "reranker"
    CrossEncoder(str(plain), device="cpu").save_pretrained(str(folder))
    return folder


@pytest.fixture
def named(rows) -> list[dict]:
    """The shared rows with two hard negatives each."""
    return [row | {"negatives": [rows[(n + 1) % 24]["url"], f"def f{n}(): pass"]} for n, row in enumerate(rows)]


@pytest.mark.parametrize("folder", ["plain", "with_modules"])
def test_scores_are_those_of_sentence_transformers(folder, named, request, tmp_path):
    folder = request.getfixturevalue(folder)
    split = training_split(Dataset.from_list(named))
    estimator = choose_estimator(
        EstimatorOptions(estimator="trained_model", estimator_model=str(folder), estimator_cache_dir=str(tmp_path))
    )
    assert isinstance(estimator, CrossEncoderEstimator)
    estimator.fit(split)
    similarity = estimator.similarity(range(24), range(len(split.corpus)))
    known = ~similarity.isnan()
    expected = torch.zeros(24, len(split.corpus), dtype=torch.bool)
    for query in range(24):
        expected[query, [query, (query + 1) % 24, 24 + query]] = True
    assert torch.equal(known, expected)
    queries, codes = known.nonzero(as_tuple=True)
    texts = [
        (" ".join(named[query]["docstring_tokens"]), split.corpus["code"][int(code)])
        for query, code in zip(queries.tolist(), codes.tolist(), strict=True)
    ]
    authority = CrossEncoder(str(folder), device="cpu")
    logits = torch.from_numpy(authority.predict(texts, activation_fn=torch.nn.Identity()))
    torch.testing.assert_close(similarity[known], logits, atol=1e-5, rtol=0)
    assert similarity[known].std() > 0.01

    class Failing(CrossEncoderEstimator):
        def _predicted(self, model, texts):
            raise AssertionError("the scores are not cached")

    again = Failing(str(folder), tmp_path)
    again.fit(split)
    torch.testing.assert_close(again.similarity(range(24), range(24)), similarity[:, :24], equal_nan=True)
    assert again.encoder_identity == estimator.encoder_identity
    with pytest.raises(AssertionError, match="not cached"):
        Failing(str(folder), tmp_path).fit(training_split([row | {"docstring_tokens": ["q"]} for row in named]))


def test_equal_pairs_are_scored_once(plain, rows):
    made = [row | {"negative": "def f(): pass", "url": f"{n}"} for n in range(3) for row in rows[:4]]
    asked = []

    class Counting(CrossEncoderEstimator):
        def _predicted(self, model, texts):
            asked.extend(texts)
            return super()._predicted(model, texts)

    estimator = Counting(str(plain), None, batch_size=2)
    split = training_split(Dataset.from_list(made))
    estimator.fit(split)
    assert len(asked) == len(set(asked)) == 8
    scores = estimator.similarity(range(12), range(len(split.corpus)))
    own = scores.diagonal()
    assert torch.equal(own[:4], own[4:8]) and torch.equal(own[:4], own[8:])


def test_processes_share_the_pairs(plain, rows, monkeypatch):
    estimator = CrossEncoderEstimator(str(plain), None, batch_size=2)
    model = estimator.load()
    texts = [(row["docstring"], row["code"]) for row in rows[:7]]
    expected = estimator._predicted(model, texts)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank_and_world_size", lambda rank=rank: (rank, 2))
        monkeypatch.setattr(distributed, "gather", lambda local: shares.append(local) or expected[:, 0])
        estimator._predicted(model, texts)
    assert list(map(len, shares)) == [4, 3]
    monkeypatch.setattr(distributed, "gather", lambda local: torch.cat(shares))
    torch.testing.assert_close(estimator._predicted(model, texts), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_learns_from_a_cross_encoder(plain, named, rows, model, tokenizer, profile, tmp_path):
    def make(rows, **options):
        args = SoftInfoNCETrainingArguments(
            str(tmp_path), teacher=str(plain), max_steps=3, use_cpu=True, per_device_train_batch_size=8, **options
        )
        return SoftInfoNCETrainer(model, args, rows, processing_class=tokenizer, encoder=profile)

    trainer = make(named, report_to="none")
    assert isinstance(trainer.estimator, CrossEncoderEstimator)
    assert trainer.criterion.distill_weight == 0.3 and trainer.criterion.loss == "info_nce"
    trainer.train()
    with refused("reranker: a cross-encoder scores each query", "add a column 'negatives'"):
        make(rows)
    with refused("CrossEncoderEstimator compares each query with its hard negatives alone: set negatives_per_query"):
        make(named, negatives_per_query=0)


def test_an_encoder_for_search_learns_from_a_cross_encoder_in_random_batches(plain, named, encoder_dir, tmp_path):
    args = SoftInfoNCETrainingArguments(
        str(tmp_path), teacher=str(plain), use_cpu=True, report_to="none", per_device_train_batch_size=8
    )
    trainer = SoftInfoNCETrainer(str(encoder_dir), args, named)
    assert isinstance(trainer.estimator, CrossEncoderEstimator)
    assert trainer.plan.train_sampling_strategy == "random"


@pytest.mark.slow
def test_the_loss_in_sentence_transformers_learns_from_a_cross_encoder(plain, encoder_dir, rows):
    columns = {name: [row[name] for row in rows[:8]] for name in ("docstring", "code")}
    columns |= {f"negative_{n}": [rows[row + n]["code"] for row in range(8)] for n in (8, 16)}
    data = with_rows(Dataset.from_dict(columns))
    model = SentenceTransformer(str(encoder_dir), device="cpu")
    loss = SoftInfoNCELoss(model, train_dataset=data, teacher=str(plain), distill_weight=0.5)
    embeddings = [model.encode(data[name][:], convert_to_tensor=True) for name in columns]
    found = loss.compute_loss_from_embeddings(embeddings, torch.tensor(data["label"]))
    teacher = CrossEncoder(str(plain), device="cpu")
    scores = 20 * cos_sim(embeddings[0], torch.cat(embeddings[1:])).double()
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(8), reduction="sum")
    for query in range(8):
        pairs = [(rows[query]["docstring"], rows[query + n]["code"]) for n in (8, 16)]
        wanted = torch.from_numpy(teacher.predict(pairs, activation_fn=torch.nn.Identity())).double().softmax(0)
        given = scores[query, [8 + query, 16 + query]].log_softmax(0)
        expected += 0.5 * (wanted * (wanted.log() - given)).sum()
    assert found.item() == pytest.approx(float(expected) / 8, abs=1e-5)


# ---- A cross-encoder instead of an encoder ----

EXPECTED = {
    "load_encoder": lambda folder, out: load_encoder(folder, device="cpu"),
    "trainer": lambda folder, out: SoftInfoNCETrainer(str(folder), SoftInfoNCETrainingArguments(str(out))),
    "distil": lambda folder, out: distil_static(str(folder), out),
    "simcse": lambda folder, out: choose_estimator(
        EstimatorOptions(estimator="simcse", estimator_model=str(folder))
    ).fit(training_split([{"query": "q", "code": "c"}])),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("folder", ["plain", "with_modules"])
def test_a_cross_encoder_is_not_an_encoder(folder, name, request, tmp_path):
    with refused("a cross-encoder, which scores pairs of texts and has no embeddings"):
        EXPECTED[name](request.getfixturevalue(folder), tmp_path / "out")


@pytest.mark.parametrize(
    ("labels", "config", "kind", "crosses"),
    [
        (1, RobertaConfig, RobertaForSequenceClassification, True),
        (1, BertConfig, BertForSequenceClassification, True),
        (3, BertConfig, BertForSequenceClassification, False),  # may start a training, as before
    ],
)
def test_one_label_makes_a_cross_encoder(labels, config, kind, crosses, tokenizer, tmp_path):
    folder = saved(tmp_path / "model", tokenizer, labels, config, kind)
    assert is_cross_encoder(folder) == crosses
    if not crosses:
        load_encoder(folder, device="cpu")
