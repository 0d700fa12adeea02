"""Lexical BM25: splitting identifiers, the formula, and ties."""

import math

import pytest
import torch
from refusals import refused

from soft_trainer.evaluation.lexical import lexical_rankings, split_identifiers

CODES = [
    ["def", "readJSONFile", "(", "path", ")"],
    ["def", "write_json_file", "(", "path", ",", "value", ")"],
    ["def", "close", "(", ")"],
    ["def", "shutdown", "(", ")"],
    ["def", "read_JSON_file", "(", "path", ")"],
]


def bm25(query, documents):
    """Computes the BM25 scores of all documents with a loop over the words."""
    k1, b = 1.2, 0.75
    average, total, scores = sum(map(len, documents)) / len(documents), len(documents), [0.0] * len(documents)
    for word in query:
        having = sum(word in words for words in documents)
        for row, words in enumerate(documents):
            norm, count = k1 * (1 - b + b * len(words) / average), words.count(word)
            scores[row] += math.log(1 + (total - having + 0.5) / (having + 0.5)) * count * (k1 + 1) / (count + norm)
    return scores


def lexical_ranking(queries, codes, targets, top_k=10):
    unread = torch.zeros(len(queries), 1), torch.zeros(len(codes), 1)
    return lexical_rankings(queries, codes, targets, unread, top_k)["lexical"]


def test_identifiers_are_split_into_words():
    tokens = ["parseHTTPHeader", "parse_http_header", "__init__", "HTML5Parser", "'Could not open'", "größe", "+="]
    words = "parse http header parse http header init html 5 parser could not open größe"
    assert split_identifiers(tokens) == words.split()


def test_scores_are_bm25_and_order_the_codes():
    query, documents = ["Read", "the", "json", "file", "file"], [split_identifiers(code) for code in CODES]
    ranking = lexical_ranking([query], CODES, [1], top_k=3)
    scores = bm25(split_identifiers(query), documents)
    assert ranking.top_indices.tolist() == [[0, 4, 1]]
    assert ranking.top_scores[0].tolist() == pytest.approx([scores[0], scores[4], scores[1]], rel=1e-12)
    assert ranking.ranks.tolist() == [3]


def test_ties_count_against_the_own_code_and_take_the_lower_row_and_blocks_do_not_matter():
    ranking = lexical_ranking([["read", "file"], ["unheard"]], CODES, [4, 0])
    assert ranking.ranks.tolist() == [2, 5]
    assert ranking.top_indices[0, :2].tolist() == [0, 4]
    assert ranking.top_indices[1].tolist() == [0, 1, 2, 3, 4]
    queries = [["close"], ["write", "value"], ["shutdown"]] * 50
    ranking = lexical_ranking(queries, CODES, torch.tensor([2, 1, 3] * 50), top_k=1)
    assert ranking.ranks.tolist() == [1] * 150
    assert ranking.top_indices.flatten().tolist() == [2, 1, 3] * 50


def test_what_cannot_be_searched_is_refused():
    with refused("contains a word"):
        lexical_ranking([["a"]], [["("], []], [0])


def test_an_encoder_and_bm25_are_added_after_standardising_each_query():
    queries, targets = [["read", "json"], ["close"], ["unheard"]], [4, 3, 0]
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    embeddings[1][4] = embeddings[1][0]  # codes 0 and 4 also have the same words, so they tie
    ranking = lexical_rankings(queries, CODES, targets, embeddings)["combined"]
    documents = [split_identifiers(code) for code in CODES]
    own = torch.tensor([bm25(query, documents) for query in queries], dtype=torch.float64)
    theirs = embeddings[0].double() @ embeddings[1].double().T
    both = [
        (s - s.mean(1, keepdim=True)) / s.std(1, correction=0, keepdim=True).clamp_min(1e-9) for s in (own, theirs)
    ]
    scores = sum(both).round(decimals=9)
    assert ranking.ranks.tolist() == [int((scores[q] >= scores[q, t]).sum()) for q, t in enumerate(targets)]
    assert ranking.top_scores[0].tolist() == pytest.approx(sorted(scores[0].tolist(), reverse=True))
    assert ranking.ranks[0] >= 2  # the tie counts against the query's positive


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_a_collapsed_encoder_adds_nothing_to_bm25(noise):
    generator = torch.Generator().manual_seed(0)
    queries, targets = [["read", "json"], ["close"], ["unheard"]], [4, 3, 0]
    direction = torch.randn(8, generator=generator)
    embeddings = [direction * (1 + noise * torch.randn(rows, 8, generator=generator)) for rows in (3, 5)]
    rankings = lexical_rankings(queries, CODES, targets, embeddings)
    assert rankings["lexical"].ranks.tolist() == [2, 5, 5]
    for name in ("ranks", "top_indices"):
        assert torch.equal(getattr(rankings["combined"], name), getattr(rankings["lexical"], name))
