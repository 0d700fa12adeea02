"""Builds data-flow graphs, whose edges link each value in a function to the tokens that the value comes from.

`extract_data_flow` returns the edges that GraphCodeBERT's published extractor finds with today's grammars. It walks
the tree in the order set by the language's rules (`rules.py`). During the walk, a table holds the tokens that last
set each variable. The walk does not recurse, so code may be nested to any depth. Loops repeat only until `_MAX_WORK`
is used up, so nested loops do not take exponential time.

Some published rules look odd but are kept:

- A token counts as a sign if its text equals the name of its node type (PHP's `$name`).
- The body of a Python `for` with an `else` is skipped.
- JavaScript's plain assignments and `for (let` have no rule.
- Text that looks like a comment is removed before the code is parsed (`source.py`).

Some edges differ from the published edges, because the grammars of 2020 parsed less of the code. They lacked later
syntax (`??=`, `?.[`, `#private`, PHP's union types). They parsed Java and JavaScript methods without a class only in
part, so type parameters and `throws` became variables, and defaults lost their rule. In the Go grammar, line ends were
leaves. The published extractor also cuts tokens at byte positions in lines with non-ASCII characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from soft_trainer.dataflow.rules import COMES_FROM, Branch, Define, First, ForEach, Label, Loop
from soft_trainer.dataflow.source import Source

if TYPE_CHECKING:
    from tree_sitter import Node

# Real functions need up to 60,000 steps. Loops nested ten deep exceed this limit. Beyond the limit, loops are walked
# once, and all sources of a target share one edge.
_MAX_WORK = 100_000


class Edge(NamedTuple):
    """An edge between tokens: the value of `target` comes from, or is computed from, the values of `sources`.

    A variable's first occurrence has no sources.
    """

    target: int
    relation: str
    sources: tuple[int, ...]


class DataFlow(NamedTuple):
    """A function's tokens, and the edges between the tokens, sorted by target."""

    tokens: list[str]
    edges: list[Edge]


def extract_data_flow(code: str, language: str) -> DataFlow:
    """Returns the data-flow graph of `code`, following GraphCodeBERT's rules.

    Comments and docstrings are excluded. If the code has syntax errors, the graph covers the parts that parse.

    Args:
        code: the source code of a function or a block.
        language: one of `soft_trainer.dataflow.DATA_FLOW_LANGUAGES`.

    Raises:
        UserError: data flow is not available for this language.
    """
    source = Source(code, language)
    flow = _Flow(source)
    walks = [iter([source.root])]
    while walks:
        node = next(walks[-1], None)
        if node is None:
            walks.pop()
        else:
            walks.append(flow.walk(node))
    connected = set()
    for edge in flow.edges:
        if edge.sources:
            connected.update((edge.target, *edge.sources))
    edges = [edge for edge in flow.edges if edge.target in connected]
    return DataFlow(source.tokens, sorted(edges, key=itemgetter(0)))


class _Flow:
    """A walk over a syntax tree, with the state of each variable and the edges found so far.

    The method for a rule yields the nodes to walk, and resumes after each node has been walked.
    """

    def __init__(self, source: Source):
        self.edges: list[Edge] = []
        self._source = source
        self._states: dict[str, tuple[int, ...]] = {}
        self._merged: dict[tuple[int, str], set[int]] = {}  # the sources of each edge in the outermost open loop
        self._loops = 0
        self._work = 0

    def walk(self, node: Node) -> Iterator[Node]:
        """Returns the nodes to walk below a node, in data-flow order. If the node is a token, records its value."""
        source = self._source
        if node.type in source.rules.atoms or not node.child_count:
            token = source.value_at.get(node.start_byte)
            if token is not None:
                self._use(token, token in source.names)
            return iter(())
        rule = source.rules.nodes.get(node.type)
        if rule is None:
            return iter(node.children)
        return _WALKS[type(rule)](self, rule, node)

    def _use(self, token: int, name: bool) -> None:
        """Records that a token's value comes from the tokens that last set its variable.

        If `name` is True, a token without a variable becomes a new variable.
        """
        text = self._source.tokens[token]
        self._record(token, COMES_FROM, self._states.get(text, ()))
        if name:
            self._states.setdefault(text, (token,))

    def _set(self, targets: tuple, relation: str, sources: tuple, grouped: bool) -> None:
        """Records that each target gets its value from the sources.

        If `grouped`, a target gets a single edge. Otherwise, it gets one edge per source.
        """
        if grouped or self._work + len(targets) * len(sources) > _MAX_WORK:
            parts = [sources]
        else:
            parts = [(source,) for source in sources]
        for target in targets:
            for part in parts:
                self._record(target, relation, part)
            self._states[self._source.tokens[target]] = (target,)

    def _record(self, target: int, relation: str, sources: tuple) -> None:
        """Adds an edge. Inside a loop, edges with the same target and relation are merged."""
        self._work += 1 + len(sources)
        if self._loops:
            self._merged.setdefault((target, relation), set()).update(sources)
        else:
            self.edges.append(Edge(target, relation, sources))

    def _assign(self, target: Node, origin: Node, rule: Define) -> Iterator[Node]:
        """Walks the right side of an assignment, then sets the variables on the left side."""
        source = self._source
        targets = [[target]]
        origins = [[origin]]
        if rule.pairwise:
            left = source.parts(target)
            right = source.parts(origin)
            if left and len(left) == len(right):
                targets = left
                origins = right
        for nodes in origins:
            yield from nodes
        for a, b in zip(targets, origins, strict=True):
            self._set(source.values(*a), rule.relation, source.values(*b), rule.grouped)

    def _define(self, rule: Define, node: Node) -> Iterator[Node]:
        """Walks a declaration, an assignment or an increment."""
        if not rule.target:
            values = self._source.values(node)
            self._set(values, rule.relation, values, False)
            return
        target = node.child_by_field_name(rule.target)
        origin = node.child_by_field_name(rule.source)
        if target is None:
            yield from node.children
        elif origin is not None:
            yield from self._assign(target, origin, rule)
        elif rule.declares:
            self._set(self._source.values(target), COMES_FROM, (), True)

    def _branch(self, rule: Branch, node: Node) -> Iterator[Node]:
        """Walks each arm of a branch, starting from the state before the branch, then merges the final states."""
        before = dict(self._states)
        arms = []
        armed = False
        for child in node.children:
            armed = (armed and rule.rest) or child.type in rule.arms
            if not armed:
                yield child
                continue
            outside = self._states
            self._states = dict(before)
            yield child
            arms.append(self._states)
            self._states = outside
        if rule.exhaustive.isdisjoint(child.type for child in node.children):
            arms.append(before)
        for states in arms:
            self._work += len(states)
            for name, tokens in states.items():
                known = self._states.get(name, ())
                self._states[name] = tuple(sorted({*known, *tokens}))

    def _passes(self) -> Iterator[int]:
        """Yields the number of each pass over a loop: 0 and 1, or only 0 once the work limit has been reached."""
        self._loops += 1
        yield 0
        if self._work < _MAX_WORK:
            yield 1
        self._loops -= 1
        if not self._loops:
            self.edges += [Edge(*key, tuple(sorted(sources))) for key, sources in self._merged.items()]
            self._merged = {}

    def _loop(self, rule: Loop, node: Node) -> Iterator[Node]:
        """Walks a loop. The rule determines where the second pass starts."""
        first = node.children
        again = []
        if not rule.again_after:
            again = first
        for index, child in enumerate(first):
            if child.type == rule.again_after:
                update = child.child_by_field_name("update")
                again = [update] * (update is not None) + first[index + 1 :]
                break
        for number in self._passes():
            yield from again if number else first

    def _for_each(self, rule: ForEach, node: Node) -> Iterator[Node]:
        """Walks a loop over a collection twice."""
        if rule.target:
            target = node.child_by_field_name(rule.target)
            origin = node.child_by_field_name(rule.source)
        else:
            origin = node.named_child(0)
            target = node.named_child(1)
        if target is None or origin is None:
            yield from node.children
            return
        body = node.child_by_field_name("body")
        has_body = body is not None and rule.body_type in ("", node.children[-1].type)
        for _ in self._passes():
            yield from self._assign(target, origin, rule)
            if has_body:
                yield body

    def _first(self, rule: First, node: Node) -> Iterator[Node]:
        """Walks the children of the type `rule.kind` first, then the other children."""
        yield from sorted(node.children, key=lambda child: child.type != rule.kind)

    def _label(self, rule: Label, node: Node) -> Iterator[Node]:
        """Walks a label and its siblings. A label that is not a plain name is walked like any other node."""
        label, *rest = node.children
        tokens = self._source.values(label)
        if label.type == rule.kind and len(tokens) == 1:
            self._use(tokens[0], rule.variable)
            yield from rest
        else:
            yield from node.children


_WALKS = {
    Define: _Flow._define,
    Branch: _Flow._branch,
    Loop: _Flow._loop,
    ForEach: _Flow._for_each,
    First: _Flow._first,
    Label: _Flow._label,
}
