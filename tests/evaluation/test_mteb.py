"""mteb: our encoder as its model, our rows as its task, and the same MRR where nothing ties."""

import dataclasses
import importlib
import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.loading import load_model
from soft_trainer.encoders.scratch import small_roberta
from soft_trainer.errors import UserError
from soft_trainer.evaluation.evaluation_sets import EvaluationSet
from soft_trainer.evaluation.ranking import rank_codes, retrieval_metrics
from soft_trainer.evaluation.retrieval import graded_ranking
from soft_trainer.hub.export import export_encoder
from soft_trainer.options.model import LoraOptions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module")
def mteb():
    """The library, imported here because that takes three seconds, which the fast tests would have to wait for."""
    return importlib.import_module("mteb")


@pytest.fixture(scope="module")
def ours():
    """Our package of that name."""
    return importlib.import_module("soft_trainer.mteb")


@pytest.fixture(scope="module")
def encoder(_model, tokenizer, profile):
    return Encoder(_model.eval(), tokenizer, profile)


def corpus_of(rows, number: int) -> Dataset:
    """Different codes, more than the 1,000 at which mteb cuts a ranking."""
    names = [row["code"].split("(")[0].split()[1] for row in rows]
    codes = [f"def {names[i % 24]}_{names[i // 24 % 24]}(x): return {names[i // 576]}" for i in range(number)]
    return Dataset.from_list([{"code": code, "url": f"u{i:04}", "language": "python"} for i, code in enumerate(codes)])


def embeddings_of(encoder, rows):
    """Both sides, of length one. No code has the embedding of another, so nothing ties."""
    sides = encoder.encode_queries(rows.queries["docstring"][:]), encoder.encode_codes(rows.codebase["code"][:])
    queries, codes = (torch.nn.functional.normalize(side, dim=-1) for side in sides)
    assert len(np.unique(codes.numpy(), axis=0)) == len(codes)
    return queries, codes


def test_the_mrr_of_mteb_is_ours_with_its_cut_and_one_right_code(ours, encoder, rows):
    corpus, queries = corpus_of(rows, 1100), Dataset.from_list([{"docstring": row["docstring"]} for row in rows])
    query_embeddings, codes = embeddings_of(encoder, EvaluationSet("texts", queries, corpus))
    # The own codes have places from the first to the last, the last beyond the cut.
    order = (query_embeddings @ codes.T).argsort(dim=1, descending=True)
    targets = order[range(24), [0, 1, 2, *range(10, 1050, 51)]]
    ranks = rank_codes(query_embeddings, codes, targets).ranks
    assert (ranks > 1000).sum() == 1
    rows = EvaluationSet("one", queries.add_column("url", [f"u{target:04}" for target in targets.tolist()]), corpus)
    measured = ours.tasks.measure(ours.MtebEncoder(encoder), ours.EvaluationSetTask(rows, encoder.profile))
    ((_, _, scores, _),) = measured.scores()
    assert scores["mrr_at_1000"] == pytest.approx(retrieval_metrics(ranks, 1100, max_rank=1000)["mrr"], abs=1e-6)
    assert scores["languages"] == ["python-Code"] and measured.pool_sizes == {("default", "test"): 1100}
    assert ours.tasks.results_table([measured]).splitlines()[-1].split("|")[1].strip() == "one"
    assert ours.tasks.results_table([measured, measured]).splitlines()[-1].split("|")[1].strip() == "mean of 2 tasks"


def test_several_right_codes_count_as_ours_do(ours, encoder, rows):
    corpus = corpus_of(rows, 300)
    places = [(i, f"u{(i * 97 + 31 * place) % 300:04}") for i in range(len(rows)) for place in range(1 + i % 3)]
    queries = [
        {"docstring": rows[i]["docstring"], "url": url, "query_number": i, "relevance": 1.0} for i, url in places
    ]
    several = EvaluationSet("several", Dataset.from_list(queries), corpus)
    task = ours.EvaluationSetTask(several, encoder.profile)
    ((_, _, scores, _),) = ours.tasks.measure(ours.MtebEncoder(encoder), task).scores()
    targets = torch.tensor([int(url[1:]) for url in several.queries["url"][:]])
    ranking, numbers = rank_codes(*embeddings_of(encoder, several), targets), several.queries["query_number"][:]
    graded = graded_ranking(ranking, numbers, several.queries["relevance"][:])
    assert scores["mrr_at_1000"] == pytest.approx(retrieval_metrics(graded.ranking.ranks, 300)["mrr"], abs=1e-6)
    # mteb rounds these to five digits.
    assert scores["ndcg_at_10"] == pytest.approx(graded.ndcg.mean(), abs=1e-5)
    assert scores["map_at_1000"] == pytest.approx(graded.average_precision.mean(), abs=1e-5)
    halves = EvaluationSet("halves", Dataset.from_list([row | {"relevance": 1.5} for row in queries]), corpus)
    with pytest.raises(UserError, match="whole numbers as relevance"):
        ours.EvaluationSetTask(halves, encoder.profile)


def test_the_encoder_passes_the_check_that_mteb_has_for_models(ours, mteb, encoder):
    assert isinstance(ours.MtebEncoder(encoder), mteb.EncoderProtocol)
    report = mteb.mock_run(ours.MtebEncoder(encoder))
    assert report.all_passed and sum(result is not None for result in report.task_results.values()) > 20


def test_both_sides_and_the_score_are_those_of_the_encoder(ours, mteb, encoder, rows):
    model, task = ours.MtebEncoder(encoder), mteb.get_task("CosQA").metadata
    texts = [row["docstring"] + " with many more words than sixteen tokens can hold in any way" for row in rows[:3]]
    common = {"task_metadata": task, "hf_split": "test", "hf_subset": "default"}
    queries, codes = (
        model.encode([{"text": texts[:2]}, {"text": texts[2:]}], prompt_type=kind, **common)
        for kind in (mteb.types.PromptType.query, mteb.types.PromptType.document)
    )
    assert torch.equal(queries, encoder.encode_queries(texts)) and torch.equal(codes, encoder.encode_codes(texts))
    assert not torch.allclose(queries, codes)  # cut to 16 and 32 tokens
    expected = encoder.score(queries, codes) / encoder.profile.score_scale
    torch.testing.assert_close(model.similarity(queries.numpy(), codes), expected)
    torch.testing.assert_close(model.similarity_pairwise(queries, codes), expected.diagonal())
    assert model.mteb_model_meta.similarity_fn_name == "cosine"


def test_data_flow_needs_one_language_and_is_left_out_without(ours, mteb, encoder, tokenizer, rows, capsys):
    profile = encoder.profile.replace(data_flow_length=16, code_length=24)
    torch.manual_seed(1)
    graphs = Encoder(small_roberta("32x1", tokenizer, profile).eval(), tokenizer, profile)
    model, codes = ours.MtebEncoder(graphs), [row["code"] for row in rows[:4]]
    common = {"hf_split": "test", "prompt_type": mteb.types.PromptType.document}
    names = ("CosQA", "CodeSearchNetRetrieval", "CodeFeedbackST")
    known, subset, unknown = (mteb.get_task(name).metadata for name in names)
    for task, name, language in ((known, "default", "python"), (subset, "go", "go")):
        embeddings = model.encode([{"text": codes}], task_metadata=task, hf_subset=name, **common)
        assert torch.equal(embeddings, graphs.encode_codes(codes, language))
    for _ in range(2):
        embeddings = model.encode([{"text": codes}], task_metadata=unknown, hf_subset="default", **common)
    plain = dataclasses.replace(graphs, profile=profile.replace(data_flow_length=0, code_length=40))
    assert torch.equal(embeddings, plain.encode_codes(codes))
    assert capsys.readouterr().err.count("CodeFeedbackST: no single language") == 1
    assert ours.model.code_language(mteb.get_task("CodeTransOceanContest").metadata, "default") is None
    assert [*map(ours.model.language_code, ("csharp", "kotlin", None))] == ["c#-Code", "eng-Latn", "eng-Latn"]


def test_tasks_are_found_by_name_and_those_that_cannot_be_measured_are_one_line(ours, encoder):
    names = [task.metadata.name for task in ours.tasks.find_tasks("CosQA,, MTEB(Code, v1)")]
    assert len(names) == len(set(names)) == 12 and names[0] == "CosQA"
    pictures = next(task.metadata.name for task in ours.tasks.TASK_LIST if task.metadata.modalities == ["image"])
    for name, *words in (
        ("cosqa", "did you mean 'CosQA'"),
        ("MTEB(Code)", "did you mean 'MTEB(Code, v1)'"),
        ("%%", "available-tasks"),
        (pictures, f"mteb={pictures}: ", "reads image; an encoder of code"),
    ):
        with refused(*words):
            ours.tasks.find_tasks(name)
    with refused("CosQA: mteb cannot load", "needs the network once"):
        ours.tasks.load(*ours.tasks.find_tasks("CosQA"))
    corpus = Dataset.from_list([{"docstring": "a", "code": "b", "url": "u"}])
    with refused("CosQA: mteb has a task of this name, ", "rename the folder"):
        ours.EvaluationSetTask(EvaluationSet("CosQA", corpus, corpus), encoder.profile)


def test_cheap_checks_come_before_the_downloads(encoder, data_dir, tmp_path, monkeypatch):
    folder = str(export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "tiny"))
    monkeypatch.setattr("soft_trainer.mteb.tasks.load", None)  # no data are looked at
    end = ["--language", "python", "--use_cpu", "true", "--mteb", "CosQA"]
    file = tmp_path / "file"
    file.write_text("mine")
    for words, says in (
        ([folder, "--data_dir", "/nowhere"], "/nowhere"),
        (["/nowhere/model"], "/nowhere/model"),
        ([folder, "--output_dir", str(file)], f"cannot save to {file}"),
    ):
        with refused(says):
            run_command(["evaluate", *words, *end])


def test_a_task_that_fails_leaves_the_results_of_earlier_ones(ours, encoder, data_dir, tmp_path, monkeypatch, capsys):
    folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "tiny")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    other, measure, names = tmp_path / "other", ours.tasks.measure, []
    shutil.copytree(data_dir, other)

    def measure_one(model, task, *rest):
        names.append(task.metadata.name)
        if len(names) > 1:
            raise UserError("the second one fails")
        return measure(model, task, *rest)

    monkeypatch.setattr(ours.tasks, "measure", measure_one)
    words = ["--data_dir", str(data_dir), "--eval_data_dir", str(other), "--language", "python", "--use_cpu", "true"]
    with pytest.raises(UserError, match="the second one fails"):
        run_command(["evaluate", str(folder), *words, "--disable_tqdm", "true", "--mteb"])
    assert names == [f"{data_dir.name}-test", "other"] and f"| {names[0]} " in capsys.readouterr().out
    assert "MRR@1000 over 24 codes" in (folder / "README.md").read_text()


def test_the_command_writes_the_table_the_file_and_the_card(
    ours, mteb, encoder, data_dir, tmp_path, monkeypatch, capsys
):
    folder = export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "tiny")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\nMy own words.\n")
    words = ["evaluate", str(folder), "--use_cpu", "true", "--disable_tqdm", "true"]
    with monkeypatch.context() as patched:
        patched.setattr("soft_trainer.training.building.load_model", None)  # the data are looked at before
        with pytest.raises(UserError, match="CosQA: mteb cannot load"):
            run_command([*words, "--mteb", "CosQA"])
    words += ["--data_dir", str(data_dir), "--language", "python", "--mteb"]
    assert run_command([*words, "--output_dir", str(tmp_path / "out")]) == 0
    name = f"{data_dir.name}-test"
    assert capsys.readouterr().out.splitlines()[2].split("|")[1].strip() == name
    meta = ours.MtebEncoder(folder, device="cpu").mteb_model_meta
    (file,) = (tmp_path / "out").rglob(f"{name}.json")
    score = json.loads(file.read_text())["scores"]["test"][0]["main_score"]
    assert mteb.ResultCache(tmp_path / "out").load_task_result(name, meta).get_score() == score
    card = (folder / "README.md").read_text()
    assert card.endswith("---\n\nMy own words.\n") and "MRR@1000 over 24 codes" in card
    assert run_command(words) == 0
    assert (folder / "README.md").read_text() == card
    assert run_command([*words, "--code_length", "8"]) == 0
    assert (folder / "README.md").read_text() == card and "stays as it is" in capsys.readouterr().err


def test_results_of_an_adapter_are_not_filed_under_its_base(ours, encoder, data_dir, tmp_path):
    parts = encoder.tokenizer, encoder.profile
    base = export_encoder(encoder.model, *parts, tmp_path / "base")
    model = load_model(base, encoder.profile)
    add_lora(model, LoraOptions(lora_r=2))
    words = [
        "--data_dir",
        str(data_dir),
        "--language",
        "python",
        "--use_cpu",
        "true",
        "--disable_tqdm",
        "true",
        "--mteb",
    ]
    folder = export_encoder(model, *parts, tmp_path / "adapter")
    assert run_command(["evaluate", str(folder), *words, "--output_dir", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").rglob(f"{data_dir.name}-test.json")
    assert file.parents[1].name == "local__adapter"
