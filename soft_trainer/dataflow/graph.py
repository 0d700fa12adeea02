"""Builds data-flow graphs: an edge leads from a value of a function to the tokens that it comes from.

`extract_data_flow` returns the edges of GraphCodeBERT's published extractor, with the present grammars. The rules of
the language (`rules.py`) turn the tree into a flat program. The program then runs on a table of states: variable ->
tokens that last gave it a value. Neither step recurses, so the nesting may have any depth. Loops repeat only until
`_MAX_WORK` is used up, so nested loops do not take exponential time.

Some published rules look odd and are kept: a token whose text equals the name of its node type counts as a sign (PHP's
`$name`); the body of a Python `for` with an `else` is skipped; JavaScript's plain assignments and `for (let` have no
rule; text that looks like a comment is removed before the code is parsed (`source.py`).

Some edges differ from those under the grammars of 2020, which did not parse the code as well. They lacked later syntax
(`??=`, `?.[`, `#private`, PHP's union types). They parsed Java and JavaScript methods without a class only in part, so
that type parameters and `throws` became variables and defaults lost their rule. Line ends were leaves of the Go
grammar. The published extractor also cuts the tokens of lines with letters outside ASCII at byte positions.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from tree_sitter import Node

from soft_trainer.dataflow.rules import COMES_FROM, Branch, Define, First, ForEach, Label, Loop
from soft_trainer.dataflow.source import Source, read

# Real functions need up to 60,000 steps. Only loops nested ten deep reach this number.
_MAX_WORK = 100_000
# Up to this number every pair has an edge. Beyond it, all sources of a target share one edge.
_MAX_PAIRS = 20_000


class Edge(NamedTuple):
    """The value of token `target` comes from, or is computed from, tokens `sources` (none: a first mention)."""

    target: int
    relation: str
    sources: tuple[int, ...]


class DataFlow(NamedTuple):
    """The tokens of a function and the edges between them, sorted by target."""

    tokens: list[str]
    edges: list[Edge]


def extract_data_flow(code: str, language: str) -> DataFlow:
    """Returns the data-flow graph of `code` by GraphCodeBERT's rules.

    Comments and docstrings are left out. For code with syntax errors, the graph covers the parts that parse.

    Args:
        code: one function, or another piece of source.
        language: one of `soft_trainer.dataflow.LANGUAGES`.

    Raises:
        UserError: any other language.
    """
    source = read(code, language)
    flow = _Flow(source)
    flow.run(_compile(source))
    connected = {token for target, _, sources in flow.edges if sources for token in (target, *sources)}
    edges = [Edge(*edge) for edge in sorted(flow.edges, key=itemgetter(0)) if edge[0] in connected]
    return DataFlow(source.tokens, edges)


class _Flow:
    """The states and edges while a program runs. The public methods are the instructions."""

    def __init__(self, source: Source):
        self.edges: list[tuple[int, str, tuple[int, ...]]] = []
        self._source = source
        self._states: dict[str, tuple[int, ...]] = {}
        self._forks: list[tuple[dict, list[dict]]] = []  # states before a branch, states after each arm
        self._outside: list[dict] = []  # states to return to after an arm
        self._loops: list[int] = []  # start of the second pass of each open loop, -1 for none
        self._merged: dict[tuple[int, str], tuple | set] = {}  # edges of the outermost open loop
        self._next = self._work = self._pairs = 0

    def run(self, program: list[tuple]) -> None:
        """Runs `program`, a list of `(instruction, *operands)`."""
        while self._next < len(program):
            instruction, *operands = program[self._next]
            self._next += 1
            instruction(self, *operands)

    def use(self, token: int, name: bool) -> None:
        """Reads a value. It comes from the tokens that last set its variable. A new name becomes a variable."""
        text = self._source.tokens[token]
        known = self._states.get(text)
        if known is None and name:
            self._states[text] = (token,)
        self._record(token, COMES_FROM, known or ())

    def set(self, targets: tuple, relation: str, sources: tuple, grouped: bool) -> None:
        """Gives every target the value of the sources, by one edge (`grouped`) or an edge for each source."""
        self._pairs += len(targets) * len(sources)
        grouped = grouped or self._pairs > _MAX_PAIRS
        for target in targets:
            for part in (sources,) if grouped else ((source,) for source in sources):
                self._record(target, relation, part)
            self._states[self._source.tokens[target]] = (target,)

    def fork(self) -> None:
        """Begins a branch."""
        self._forks.append((dict(self._states), []))

    def enter(self) -> None:
        """Begins an arm with the states before the branch."""
        self._outside.append(self._states)
        self._states = dict(self._forks[-1][0])

    def leave(self) -> None:
        """Ends an arm."""
        self._forks[-1][1].append(self._states)
        self._states = self._outside.pop()

    def join(self, skippable: bool) -> None:
        """Ends a branch. A variable may come from any arm, and from before the branch if it is `skippable`."""
        before, arms = self._forks.pop()
        for states in [*arms, before] if skippable else arms:
            self._work += len(states)
            for name, tokens in states.items():
                known = self._states.setdefault(name, tokens)
                if known is not tokens and known != tokens:
                    self._states[name] = tuple(sorted({*known, *tokens}))

    def loop(self) -> None:
        """Begins a loop. It has a second pass only if `mark` follows."""
        self._loops.append(-1)

    def mark(self) -> None:
        """Marks the start of the second pass."""
        self._loops[-1] = self._next

    def again(self) -> None:
        """Ends a pass. The loop ends after its second pass."""
        start = self._loops.pop()
        if start >= 0 and self._work < _MAX_WORK:
            self._loops.append(-1)
            self._next = start
        elif not self._loops:
            self.edges += [(*key, tuple(sorted(sources))) for key, sources in self._merged.items()]
            self._merged = {}

    def _record(self, target: int, relation: str, sources: tuple) -> None:
        """Keeps an edge. Inside a loop, edges with the same target and relation become one."""
        self._work += 1 + len(sources)
        if not self._loops:
            self.edges.append((target, relation, sources))
            return
        known = self._merged.setdefault((target, relation), sources)
        if type(known) is set:
            known.update(sources)
        elif known != sources:
            self._merged[target, relation] = {*known, *sources}


def _compile(source: Source) -> list[tuple]:
    """Compiles the tree into a flat program, in the order of the data flow."""
    program, stack, rules = [], [source.root], source.rules
    while stack:
        task = stack.pop()
        if type(task) is tuple:
            program.append(task)
            continue
        kind = task.type
        if kind in rules.atoms or not task.child_count:
            token = source.at.get(task.start_byte)
            if token is not None and source.value[token]:
                program.append((_Flow.use, token, source.name[token]))
            continue
        rule = rules.nodes.get(kind)
        tasks = _EXPAND[type(rule)](rule, task, source) if rule else None
        stack += reversed(task.children if tasks is None else tasks)
    return program


def _assign(target: Node, origin: Node, rule: Define, source: Source) -> list:
    """Reads the right side, then sets the left side."""
    targets, origins = [[target]], [[origin]]
    if rule.pairwise:
        left, right = source.parts(target), source.parts(origin)
        if left and len(left) == len(right):
            targets, origins = left, right
    pairs = zip(targets, origins, strict=True)
    sets = [(_Flow.set, source.values(*a), rule.relation, source.values(*b), rule.grouped) for a, b in pairs]
    return [*(node for nodes in origins for node in nodes), *sets]


def _define(rule: Define, node: Node, source: Source) -> list | None:
    """Expands a declaration, an assignment or an increment. None if the tree lacks the target."""
    if not rule.target:
        values = source.values(node)
        return [(_Flow.set, values, rule.relation, values, False)]
    target, origin = node.child_by_field_name(rule.target), node.child_by_field_name(rule.source)
    if target is None:
        return None
    if origin is None:
        return [(_Flow.set, source.values(target), COMES_FROM, (), True)] if rule.declares else []
    return _assign(target, origin, rule, source)


def _branch(rule: Branch, node: Node, source: Source) -> list:
    """Expands the arms of a branch. Each starts with the states before the branch."""
    tasks, armed = [(_Flow.fork,)], False
    kinds = [child.type for child in node.children]
    for child, kind in zip(node.children, kinds, strict=True):
        armed = (armed and rule.rest) or kind in rule.arms
        tasks += [(_Flow.enter,), child, (_Flow.leave,)] if armed else [child]
    return [*tasks, (_Flow.join, rule.exhaustive.isdisjoint(kinds))]


def _loop(rule: Loop, node: Node, source: Source) -> list:
    """Expands a loop. The rule names the start of its second pass."""
    waiting = bool(rule.again_after)
    tasks = [(_Flow.loop,)] if waiting else [(_Flow.loop,), (_Flow.mark,)]
    for child in node.children:
        if not waiting or child.type != rule.again_after:
            tasks.append(child)
            continue
        waiting = False
        update = child.child_by_field_name("update")
        first = [part for part in child.children if part != update] if update else [child]
        tasks += [*first, (_Flow.mark,), *([update] if update else [])]
    return [*tasks, (_Flow.again,)]


def _for_each(rule: ForEach, node: Node, source: Source) -> list | None:
    """Expands a loop over a collection. None if the tree lacks the target or the collection."""
    if rule.target:
        target, origin = node.child_by_field_name(rule.target), node.child_by_field_name(rule.source)
    else:
        origin, target = (*node.named_children, None, None)[:2]
    if target is None or origin is None:
        return None
    body = node.child_by_field_name("body")
    if rule.body_type and node.children[-1].type != rule.body_type:
        body = None
    tasks = _assign(target, origin, rule, source) + ([body] if body else [])
    return [(_Flow.loop,), (_Flow.mark,), *tasks, (_Flow.again,)]


def _first(rule: First, node: Node, source: Source) -> list:
    """Expands the children of the rule's type, then the others."""
    return sorted(node.children, key=lambda child: child.type != rule.kind)


def _label(rule: Label, node: Node, source: Source) -> list | None:
    """Expands a label and its siblings. None if the label is more than a name."""
    label, *rest = node.children
    tokens = source.values(label)
    if label.type != rule.kind or len(tokens) != 1:
        return None
    return [(_Flow.use, tokens[0], rule.variable), *rest]


_EXPAND = {Define: _define, Branch: _branch, Loop: _loop, ForEach: _for_each, First: _first, Label: _label}
