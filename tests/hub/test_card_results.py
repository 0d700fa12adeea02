"""Results that are added to a card: only `model-index` changes."""

import pytest
from huggingface_hub import EvalResult, ModelCard, metadata_load

from soft_trainer.errors import UserError
from soft_trainer.hub.model_card import add_eval_results, card_header

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
    assert (content.count("\r\n") == content.count("\n")) == (line_break == "\r\n")
    header = metadata_load(card)
    assert list(header) == ["license", "model-index", "tags"] and header["tags"] == ["code"]
    add_eval_results(card, [result(0.7), result(0.8, "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md"]
    assert card.read_bytes().decode() == content


def test_a_card_without_a_header_gets_one_and_keeps_results_from_elsewhere_on_the_same_data(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("# Mine\n")
    add_eval_results(card, [result(0.5, source_name=None, source_url=None)])
    assert values(card) == {("set", "test"): 0.5} and card.read_text().endswith("---\n# Mine\n")
    add_eval_results(card, [result(0.7)])
    assert [entry.metric_value for entry in ModelCard.load(card).data.eval_results] == [0.5, 0.7]


@pytest.mark.parametrize(
    "header",
    ["a: [", "model-index: 3", "model-index:\n- name: x", "- a", "author: M\xfcller"],  # the last one is Latin-1
)
def test_a_header_that_cannot_take_results_is_refused_and_the_card_stays(tmp_path, header):
    card = tmp_path / "README.md"
    before = f"---\n{header}\n---\ntext\n".encode("latin-1")
    card.write_bytes(before)
    for refused in (lambda: card_header(card), lambda: add_eval_results(card, [result(0.5)])):
        with pytest.raises(UserError, match="README.md: results cannot be added"):
            refused()
    assert card.read_bytes() == before
