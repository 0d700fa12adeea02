import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES
from soft_trainer.dataflow.inputs import graph_embeddings, graph_features, pad_graph_features

# code, positions of the nodes a, b, a among the code tokens (0 is <s>), position of </s>
DRAWN = {
    "ruby": ("def f(a)\n  b = a\nend", (4, 6, 8), 10),
    "python": ("def f(a):\n    b = a", (4, 7, 9), 10),
    "java": ("void f(int a) { int b = a; }", (5, 9, 11), 14),
    "javascript": ("function f(a) { let b = a; }", (4, 8, 10), 13),
    "php": ("function f($a) { $b = $a; }", (6, 10, 13), 17),
    "go": ("func f(a int) { b = a }", (4, 8, 10), 12),
}
KEYS = {"input_ids", "position_ids", "node_starts", "node_ends", "edge_targets", "edge_sources"}


@pytest.fixture(scope="module")
def word_tokenizer():
    """Returns a tokenizer that gives every code token a single id."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "@", "a", "b", "f", "=", "(", ")"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    # With the default's small weights, the model is nearly linear, and a wrong mask would not show.
    config = RobertaConfig(**size, **ids, max_position_embeddings=400, initializer_range=0.3)
    return RobertaModel(config).eval()


def encode(model, features, tokenizer):
    """Returns the pooler output of a padded batch of graph features."""
    batch = pad_graph_features(features, tokenizer.pad_token_id)
    with torch.no_grad():
        return model(
            inputs_embeds=graph_embeddings(model.get_input_embeddings(), batch),
            attention_mask=batch["attention_mask"][:, None],
            position_ids=batch["position_ids"],
        ).pooler_output


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
def test_features_and_mask_of_a_hand_drawn_graph(word_tokenizer, language):
    code, positions, end = DRAWN[language]
    features = graph_features(code, language, word_tokenizer)
    assert features.keys() == KEYS and all(type(x) is int for column in features.values() for x in column)
    assert [features["input_ids"][position] for position in (0, *positions, end)] == [0, 5, 6, 5, 2]
    assert features["input_ids"][end + 1 :] == [3, 3, 3]
    assert features["position_ids"] == [*range(2, end + 3), 0, 0, 0]
    assert features["node_starts"] == list(positions)
    assert features["node_ends"] == [position + 1 for position in positions]
    assert list(zip(features["edge_targets"], features["edge_sources"], strict=True)) == [(1, 2), (2, 0)]
    mask = pad_graph_features([features], 1)["attention_mask"][0]
    sees = [set(row.nonzero().flatten().tolist()) for row in mask]
    code_places, nodes = set(range(end + 1)), [end + 1, end + 2, end + 3]
    assert sees[0] == sees[end] == code_places | set(nodes)
    for position in range(1, end):
        assert sees[position] == code_places | {
            node for node, own in zip(nodes, positions, strict=True) if own == position
        }
    assert sees[nodes[0]] == {positions[0]}
    assert sees[nodes[1]] == {positions[1], nodes[2]}
    assert sees[nodes[2]] == {positions[2], nodes[0]}


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
def test_a_node_is_the_mean_of_its_code_tokens(functions, tokenizer, model, language):
    features = graph_features(functions[language].replace("sum", "sum_of_it"), language, tokenizer)
    batch = pad_graph_features([features], tokenizer.pad_token_id)
    words = model.get_input_embeddings()
    vectors, own = graph_embeddings(words, batch)[0], words(batch["input_ids"])[0]
    ranges = list(zip(features["node_starts"], features["node_ends"], strict=True))
    first = len(own) - len(ranges)
    assert torch.equal(vectors[:first], own[:first])
    assert max(end - start for start, end in ranges) > 2
    for vector, (start, end) in zip(vectors[first:], ranges, strict=True):
        torch.testing.assert_close(vector, own[start:end].mean(0))


def test_code_tokens_are_tokenized_as_after_a_space_but_the_first(tokenizer):
    features = graph_features("total = price", "python", tokenizer)
    text = tokenizer.convert_ids_to_tokens(features["input_ids"])
    lead = len(tokenizer.tokenize("@"))
    expected = tokenizer.tokenize("total") + tokenizer.tokenize("@ =")[lead:] + tokenizer.tokenize("@ price")[lead:]
    assert text == ["<s>", *expected, "</s>", "<unk>", "<unk>"]


@pytest.mark.parametrize(
    ("code_length", "data_flow_length", "code_tokens", "nodes"),
    [
        (256, 64, 13, 3),
        (10, 2, 10, 2),  # two nodes keep their room, the code is truncated
        (10, 6, 13, 3),  # code takes the room that nodes do not need
        (14, 2, 13, 3),  # a node takes the room that the code does not need
    ],
)
def test_truncation(word_tokenizer, code_length, data_flow_length, code_tokens, nodes):
    features = graph_features(DRAWN["go"][0], "go", word_tokenizer, code_length, data_flow_length)
    assert len(features["node_starts"]) == nodes
    assert len(features["input_ids"]) == code_tokens + nodes
    assert features["input_ids"][code_tokens - 1] == word_tokenizer.sep_token_id


def test_a_padded_batch_gives_the_vectors_of_single_rows(functions, tokenizer, model):
    rows = [graph_features(code, language, tokenizer) for language, code in functions.items()]
    rows += [graph_features(code, language, tokenizer, 20, 12) for language, code in functions.items()]
    rows += [graph_features("", "python", tokenizer), graph_features("x", "python", tokenizer)]
    assert any(0 in row["node_ends"] for row in rows), "some nodes are cut off from their code"
    together = encode(model, rows, tokenizer)
    alone = torch.cat([encode(model, [row], tokenizer) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
