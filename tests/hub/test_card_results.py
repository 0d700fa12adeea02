"""Results that are added to a card: only `model-index` changes."""

import pytest
from huggingface_hub import EvalResult, ModelCard

from soft_trainer.errors import UserError
from soft_trainer.hub.card_results import add_eval_results, check_card

HEADER = """license: mit  # as the data
model-index:
- name: mine
  results:
  - task:
      type: text-retrieval
    dataset:
      name: other
      type: other
    metrics:
    - type: mrr
      value: 0.1
# a comment of mine
tags:
- code
"""
TEXT = "\n# Mine   \n\nMy own words: --- and ---\n---\nmore\n"


def result(value, name="set", split="test", **changes):
    fields = {"task_type": "Retrieval", "dataset_type": name, "dataset_name": name, "dataset_split": split}
    fields |= {"metric_type": "mrr", "metric_value": value, "source_name": "mteb", "source_url": "https://a.b"}
    return EvalResult(**(fields | changes))


def values(path):
    return {(r.dataset_name, r.dataset_split): r.metric_value for r in ModelCard.load(path).data.eval_results}


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_only_model_index_changes_and_a_second_evaluation_replaces_its_own(tmp_path, line_break):
    card = tmp_path / "README.md"
    card.write_bytes(f"---\n{HEADER}---\n{TEXT}".replace("\n", line_break).encode())
    add_eval_results(card, [result(0.5), result(0.6, split="valid")])
    add_eval_results(card, [result(0.7), result(0.8, "new")])
    assert values(card) == {("other", None): 0.1, ("set", "test"): 0.7, ("set", "valid"): 0.6, ("new", "test"): 0.8}
    content = card.read_bytes().decode()
    assert content.endswith(f"---\n{TEXT}".replace("\n", line_break))
    kept = "license: mit  # as the data\n# a comment of mine\ntags:\n- code\n".replace("\n", line_break)
    assert content.startswith(f"---{line_break}{kept}model-index:{line_break}")
    assert (content.count("\r\n") == content.count("\n")) == (line_break == "\r\n")
    add_eval_results(card, [result(0.7), result(0.8, "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md"]
    assert card.read_bytes().decode() == content


def test_a_result_from_elsewhere_on_the_same_data_is_kept(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n")
    add_eval_results(card, [result(0.5, source_name=None, source_url=None)])
    add_eval_results(card, [result(0.7)])
    assert [entry.metric_value for entry in ModelCard.load(card).data.eval_results] == [0.5, 0.7]


def test_a_card_without_a_header_gets_one(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("# Mine\n")
    add_eval_results(card, [result(0.5)])
    assert values(card) == {("set", "test"): 0.5} and card.read_text().endswith("---\n# Mine\n")


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "index",
    [
        HEADER.split("\n", 1)[1].split("# a comment")[0].replace("  results:", "# mine, too\n  results:"),
        "model-index: [\n  {name: mine, results: [{task: {type: a}, dataset: {name: other, type: other},\n"
        "metrics: [{type: mrr, value: 0.1}]}]}\n]  # by hand\n",
        HEADER.split("\n", 1)[1].split("# a comment")[0].replace("model-index", '"model-index"'),
        HEADER.split("\n", 1)[1].split("# a comment")[0]
        + "      source:\n        name: |\n          a\n          b\n",
        "model-index: []\n",
        "model-index:\n",
    ],
)
def test_a_model_index_written_by_hand_is_replaced_whole(tmp_path, index, line_break):
    card = tmp_path / "README.md"
    card.write_bytes(f"---\nlicense: mit\n{index}# kept\ntags: [code]\n---\ntext\n".replace("\n", line_break).encode())
    add_eval_results(card, [result(0.5)])
    text = card.read_bytes().decode()
    assert text.startswith("---\nlicense: mit\n# kept\ntags: [code]\nmodel-index:\n".replace("\n", line_break))
    assert text.count("model-index") == 1 and values(card)[("set", "test")] == 0.5
    assert ("value: 0.1" in text) == ("0.1" in index)


def test_a_card_that_is_not_utf_8_is_refused_and_stays(tmp_path):
    card = tmp_path / "README.md"
    card.write_bytes("---\nauthor: Müller\n---\n".encode("latin-1"))
    for refused in (lambda: check_card(card), lambda: add_eval_results(card, [result(0.5)])):
        with pytest.raises(UserError, match="README.md: results cannot be added: it is not UTF-8"):
            refused()
    assert card.read_bytes() == "---\nauthor: Müller\n---\n".encode("latin-1")


@pytest.mark.parametrize("header", ["{model-index: [], a: 1}", "a: &x [1]\nmodel-index: []\nmodel-index: []\n"])
def test_a_model_index_that_cannot_be_taken_out_is_refused_before(tmp_path, header):
    card = tmp_path / "README.md"
    card.write_text(f"---\n{header}\n---\ntext\n")
    with pytest.raises(UserError, match="README.md: results cannot be added"):
        check_card(card)


@pytest.mark.parametrize("header", ["a: [", "model-index: 3\n", "model-index:\n- name: x\n", "- a\n"])
def test_a_header_of_another_form_is_refused_and_the_card_stays(tmp_path, header):
    card = tmp_path / "README.md"
    card.write_text(f"---\n{header}\n---\ntext\n")
    before = card.read_bytes()
    with pytest.raises(UserError, match="README.md: results cannot be added"):
        add_eval_results(card, [result(0.5)])
    assert card.read_bytes() == before
