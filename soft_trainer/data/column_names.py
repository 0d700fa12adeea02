"""Lists the recognised names of columns. `docs/data.md` explains them."""

from __future__ import annotations

import ast
import re

QUERY_COLUMNS = ("docstring", "docstring_tokens")  # of CodeSearchNet
CODE_COLUMNS = ("original_string", "code", "code_tokens")  # of CodeSearchNet
CODES = ("code", "code_tokens")
COLUMNS_OF = {"query": QUERY_COLUMNS, "code": CODES}
POSITIVES = ("positive", "positives", "pos")  # may list several positives of a row's query
TEXT_ID = "code:"  # the start of a `url` that is the hash of a function
OWN_ID = "_id"  # a query's id in BEIR; see `Split.unranked`
GROUP = "soft_trainer_group"  # a copy of the column that the user has set as group_column
NEGATIVES = "negatives"  # functions, as texts or urls, that do not answer the row's query
NEGATIVE_NAMES = (NEGATIVES, "neg", "hard_negatives", "negative", "negative_1")  # the last one with any number
NEGATIVE = re.compile(r"neg|(hard_)?negatives?(_\d+)?")
SCORES = "scores"  # of a row's positives, and then of its negatives, as sentence-transformers writes them
SCORES_OF = (("positive_scores", "pos_scores"), ("negative_scores", "neg_scores"))  # of positives, of negatives
LABELS = ("label", "labels")  # columns that say whether a row's function answers its query
# The pairs of a query and a code column, besides CodeSearchNet's.
PAIRS = (
    ("query", "code"),
    *(("query", name) for name in POSITIVES),
    *(("query", name) for name in ("answer", "passage", "document", "context")),
    *(("anchor", name) for name in POSITIVES),
    ("question", "answer"),
    ("question", "code"),
    *(("question", name) for name in POSITIVES),
    ("text", "function"),
)
TOKENS_END = "_tokens"  # the end of the names of columns with token lists


def is_list_text(value: str) -> bool:
    """Returns True for the text of a list of strings, as pandas and JSON write it."""
    if not value.startswith(("['", '["')):
        return False
    try:
        return isinstance(ast.literal_eval(value), list)
    except (ValueError, SyntaxError):  # for example Ruby code
        return False
