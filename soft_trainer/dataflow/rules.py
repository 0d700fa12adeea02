"""Defines the syntax-tree nodes through which data flows in each language.

The rules follow GraphCodeBERT's published extractor, which used the grammars of 2020. If a grammar has split, renamed
or wrapped a node since then, the rules use the current node, so that `graph.py` needs no special cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

COMES_FROM = "comesFrom"
COMPUTED_FROM = "computedFrom"


@dataclass(frozen=True)
class Define:
    """A node that assigns values to variables. Every token of the target depends on every token of the source.

    Attributes:
        target: the field that contains the target, or "" if the node is both target and source (`i++`).
        source: the field that contains the source.
        relation: `COMES_FROM` for a declaration, or `COMPUTED_FROM` for an assignment.
        grouped: True for one edge from all sources to a target, False for one edge per source.
        pairwise: True to match `a, b = c, d` child by child if both sides have equally many children.
        declares: True if a target without a source declares a variable. If False, a node without a source is skipped.
    """

    target: str
    source: str = ""
    relation: str = COMPUTED_FROM
    grouped: bool = False
    pairwise: bool = False
    declares: bool = False


class Branch(NamedTuple):
    """A node with alternative arms, such as `if`. Every arm starts from the state before the node.

    After the node, a variable's value may come from any of the arms.

    Attributes:
        arms: the types of the children that are arms.
        rest: True if all children after the first arm are also arms.
        exhaustive: child types, such as `else`, that guarantee that one arm runs. If the node has such a child, the
            state before the node is dropped.
    """

    arms: frozenset[str]
    rest: bool = True
    exhaustive: frozenset[str] = frozenset()


class Loop(NamedTuple):
    """A node that is walked twice, so that a value assigned at its end reaches its beginning.

    Attributes:
        again_after: a child type. The second pass starts after the first child of this type, or at that child's
            `update` field. Without such a child, there is no second pass. If "", the second pass covers everything.
    """

    again_after: str = ""


@dataclass(frozen=True)
class ForEach(Define):
    """A loop over a collection, walked twice. The target is computed from the source before the body is walked.

    If the grammar has no fields, `target` and `source` are "", and the first two named children are source and target.

    Attributes:
        body_type: the body is walked only if the last child has this type. If "", the body is always walked.
    """

    body_type: str = ""


class First(NamedTuple):
    """A node whose children of type `kind` are walked first, such as the loops of a comprehension."""

    kind: str


class Label(NamedTuple):
    """A rule for nodes whose first child may be a name. A child of type `kind` is a name, not an expression.

    Attributes:
        kind: the type of child that is a name.
        variable: whether the name becomes a variable.
    """

    kind: str
    variable: bool


Rule = Define | Branch | Loop | ForEach | First | Label


@dataclass(frozen=True)
class Rules:
    """The rules of one language. Most attributes are sets of node types.

    Attributes:
        nodes: the rule for each node type. A node without a rule is walked child by child.
        atoms: nodes that become a single token, whatever they contain.
        plain: strings that become a single token unless they interpolate something.
        comments: comments, which are not tokens.
        dropped: parts of strings that are leaves in today's grammars but were not in 2020, and so are not tokens.
        text_comments: True if comments are removed from the text before parsing, as GraphCodeBERT does.
        signs: named leaves without a value, such as keywords and operators.
        keywords: names that are treated as signs, except after a `$`, where they are variables.
        wrappers: nodes that are skipped, so that their children become children of the node's parent.
        heads: for each node type, how many leading children are grouped into one if there are more children (`a.b` in
            the call `a.b(c)`).
        method_name: the type of a method's name. Without a class, it counts as a function's name.
        docstring: the type of a statement that is documentation if it consists of a string.
    """

    nodes: dict[str, Rule]
    atoms: frozenset[str]
    plain: frozenset[str] = frozenset()
    comments: frozenset[str] = frozenset({"comment"})
    dropped: frozenset[str] = frozenset()
    text_comments: bool = False
    signs: frozenset[str] = frozenset()
    keywords: frozenset[str] = frozenset()
    wrappers: frozenset[str] = frozenset()
    heads: dict[str, int] = field(default_factory=dict)
    method_name: str = ""
    docstring: str = ""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_DECLARE = Define("name", "value", COMES_FROM, declares=True)
_TUPLES = Define("left", "right", grouped=True, pairwise=True)
_ASSIGN = Define("left", "right")
_UPDATE = Define("")
_CLAUSES = First("for_in_clause")

DATA_FLOW_RULES = {
    "ruby": Rules(
        nodes={
            "keyword_parameter": _DECLARE,
            "assignment": _TUPLES,
            "operator_assignment": Define("left", "right", grouped=True),
            **_each("if elsif else unless when", Branch(_types("if elsif else unless when"), rest=False)),
            "for": ForEach("pattern", "value", grouped=True),
            **_each("while_modifier until", Loop()),
        },
        atoms=_types("string"),
        plain=_types("bare_string bare_symbol"),
        dropped=_types("string_content heredoc_content"),
        wrappers=_types("body_statement block_body"),
        heads={"call": 3},
    ),
    "python": Rules(
        nodes={
            "default_parameter": _DECLARE,
            **_each("assignment augmented_assignment", _TUPLES),
            "for_in_clause": Define("left", "right", grouped=True),
            "if_statement": Branch(_types("elif_clause else_clause"), rest=False, exhaustive=_types("else_clause")),
            "for_statement": ForEach("left", "right", body_type="block", grouped=True, pairwise=True),
            "while_statement": Loop(),
            **_each("list_comprehension set_comprehension dictionary_comprehension generator_expression", _CLAUSES),
        },
        atoms=_types("string"),
        dropped=_types("line_continuation"),
        docstring="expression_statement",
    ),
    "java": Rules(
        nodes={
            "variable_declarator": _DECLARE,
            "assignment_expression": _ASSIGN,
            "update_expression": _UPDATE,
            "if_statement": Branch(_types("if_statement else")),
            # The grammar of 2020 had a `for_init`, which kept the published extractor from a second pass.
            "for_statement": Loop(again_after="for_init"),
            "enhanced_for_statement": ForEach("name", "value"),
            "while_statement": Loop(),
            **_each("type_parameter class_literal", Label("type_identifier", variable=True)),
        },
        atoms=_types("string_literal"),
        comments=_types("line_comment block_comment"),
        text_comments=True,
    ),
    "javascript": Rules(
        nodes={
            "variable_declarator": _DECLARE,
            **_each("assignment_pattern object_assignment_pattern augmented_assignment_expression", _ASSIGN),
            "update_expression": _UPDATE,
            "if_statement": Branch(_types("if_statement else_clause")),
            "for_statement": Loop(again_after="variable_declaration"),
            "while_statement": Loop(),
        },
        atoms=_types("string"),
        comments=_types("comment html_comment"),
        text_comments=True,
        dropped=_types("string_fragment"),
        signs=_types("optional_chain"),
        method_name="property_identifier",
    ),
    "php": Rules(
        nodes={
            "simple_parameter": Define("name", "default_value", COMES_FROM, declares=True),
            **_each("assignment_expression augmented_assignment_expression reference_assignment_expression", _ASSIGN),
            "update_expression": _UPDATE,
            **_each("if_statement else_clause", Branch(_types("if_statement else_clause"))),
            "for_statement": Loop(again_after="assignment_expression"),
            "foreach_statement": ForEach("", ""),
            "while_statement": Loop(),
        },
        atoms=_types("string encapsed_string heredoc nowdoc"),
        text_comments=True,
        signs=_types("cast_type primitive_type php_end_tag"),
        keywords=_types("self static parent"),
    ),
    "go": Rules(
        nodes={
            "var_spec": _DECLARE,
            "assignment_statement": _ASSIGN,
            "inc_statement": _UPDATE,
            "if_statement": Branch(_types("if_statement else")),
            "for_statement": Loop(again_after="for_clause"),
            "keyed_element": Label("literal_element", variable=False),
        },
        atoms=_types("raw_string_literal"),
        text_comments=True,
        dropped=_types("interpreted_string_literal_content"),
    ),
}
