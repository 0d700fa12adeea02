"""Data flow is extracted quickly from any input, even from random bytes."""

import time

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES, extract_data_flow

LOOPS = {
    "ruby": ("until a do\n", "a = a\n", "end\n"),
    "python": ("while a:\n", "a = a\n", ""),
    "java": ("while (a) {", "a = a;", "}"),
    "javascript": ("while (a) {", "a += a;", "}"),
    "php": ("while ($a) {", "$a = $a;", "}"),
    "go": ("for i := 0; i < n; i++ {", "a = a", "}"),
}
NOISE = ("(", "{", "'", '"', "/*", "\0", "é", "\ud800", "<<A ", "%w(", "if ", "=", "${", "?>", "\n\n", "#", "`", "\\")


def answer(code: str, language: str) -> None:
    """Checks that the graph of `code` is well formed and takes less than a second."""
    start = time.process_time()
    tokens, edges = extract_data_flow(code, language)
    assert time.process_time() - start < 1.0
    assert all(0 <= token < len(tokens) for edge in edges for token in (edge.target, *edge.sources))


def mutated(code: str, other: str, draw) -> str:
    """Returns `code` with bytes removed, doubled, or inserted from `other` or at random. `draw(n)` is below `n`."""
    data = code.encode()
    start = draw(len(data))
    end = min(len(data), start + draw(40))
    strange = other.encode()[draw(len(other)) :][:60]
    noise = NOISE[draw(len(NOISE))].encode("utf-8", "surrogatepass") * (1 + draw(30))
    middle = (b"", data[start:end] * 2, strange, noise, bytes([draw(256)]))[draw(5)]
    return (data[:start] + middle + data[end:]).decode("utf-8", "replace")


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_source(functions, language, data):
    def draw(n):
        return data.draw(st.integers(0, n - 1))

    answer(mutated(functions[language], functions[DATA_FLOW_LANGUAGES[draw(6)]], draw), language)


@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
@pytest.mark.parametrize("code", ["", "\0", "\n\n", "\ud800", "(" * 3000, "'" * 3000, "a = b + " * 900, "é" * 999])
def test_strange_source(language, code):
    answer(code, language)


def nested(language: str, depth: int) -> str:
    head, body, tail = LOOPS[language]
    return "".join(" " * i + head for i in range(depth)) + " " * depth + body + tail * depth


@pytest.mark.slow
@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
@pytest.mark.parametrize("depth", [3, 90])
def test_nested_loops_end_in_time(language, depth):
    code = nested(language, depth)
    answer(code, language)
    tokens, edges = extract_data_flow(code, language)
    targets = [i for i, token in enumerate(tokens) if token == "a"]
    assert targets[-2] in {edge.target for edge in edges if edge.sources}


@pytest.mark.slow
@pytest.mark.parametrize("language", DATA_FLOW_LANGUAGES)
def test_a_function_of_3000_tokens(functions, language):
    code = nested(language, 40 if language == "python" else 200)
    answer(f"{code}\n{functions[language] * 40}", language)
