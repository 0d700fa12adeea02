"""Settings of the documentation site: `sphinx-build -W -b html -c docs . SITE`, in the root of the repository.

The source is the whole repository, so that pages may link to recipes, benchmarks and examples as files do on disk.
"""

import inspect
import pydoc
import re
import sys
from pathlib import Path

import soft_trainer

sys.path.append(str(Path(__file__).parent))
import options_reference as reference  # noqa: E402

project = "soft_trainer"
version = release = soft_trainer.__version__
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "benchmarks/*.md", "recipes/*.md", "recipes/*/*.md", "recipes/*/*/*.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
]
exclude_patterns = ["**/.venv/**", "outputs/**", "benchmarks/base_card.md"]  # a card with gaps

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]  # of options
default_role = "code"  # of `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
napoleon_google_docstring = True
napoleon_use_rtype = False
suppress_warnings = ["myst.header"]  # pages begin at any level of heading where they are parts of others

html_theme = "furo"
html_extra_path = ["site"]  # an index.html at the root, which leads to the landing page
html_title = "soft_trainer"


# The sidebar. The landing page itself shows tasks, on GitHub too, where the directive would be a block of code.
SIDEBAR = {
    "Guides": """
Why and how much <../README>
Training <training>
Data <data>
Encoders <encoders>
Estimators and losses <estimators>
Evaluation <evaluation>
Search <search>
Hub <hub>
Integrations <integrations>
Scaling <scaling>
Beyond one machine <beyond_one_machine>
sentence-transformers <sentence_transformers>
Studies <studies>
""",
    "Reference": """
options
api
../recipes/README
../recipes/encoders/README
../recipes/paper/README
../recipes/paper/codebert/README
../recipes/paper/graphcodebert/README
../recipes/paper/unixcoder/README
../CHANGELOG
../CONTRIBUTING
../SECURITY
""",
    "Measurements": """
../benchmarks/RESULTS
../benchmarks/base_study
../benchmarks/gpu
../benchmarks/position_study
../benchmarks/recipe_study
../benchmarks/merge_study
../benchmarks/scores_study
../benchmarks/search_study
../benchmarks/static_study
../benchmarks/vocabulary_study
../benchmarks/teacher_study
../benchmarks/theory
""",
}


def insert_sidebar(app, page: str, source: list[str]) -> None:
    """Adds the sidebar's tables of contents to the landing page."""
    if page == root_doc:
        for caption, pages in SIDEBAR.items():
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n:hidden:\n{pages}```\n"


def insert_signatures(app, page: str, source: list[str]) -> None:
    """Adds the documentation of every name in the tables of the API page, which reads as a list on its own."""
    if page == "docs/api":
        parts = []
        for name in re.findall(r"^\| `(soft_trainer\.[\w.]+)` \|", source[0], re.MULTILINE):
            thing = pydoc.locate(name)
            if inspect.isclass(thing):
                parts.append(f".. autoclass:: {name}\n   :members:\n")
            elif callable(thing):
                parts.append(f".. autofunction:: {name}\n")
        source[0] += "\n## In full\n\n```{eval-rst}\n" + "\n".join(parts) + "```\n"


def shorten_signature(app, what, name, thing, options, signature, returns):
    """Shows the package's own options in the signature of the training arguments, and none of `transformers`."""
    if name != "soft_trainer.SoftInfoNCETrainingArguments":
        return None
    parameters = inspect.signature(thing).parameters
    names = [field.name for field, _ in reference.option_fields(thing)]
    shown = [str(parameters[name].replace(annotation=inspect.Parameter.empty)) for name in names]
    return "(" + ", ".join([*shown, "**kwargs"]) + ")", returns


def setup(app) -> None:
    app.connect("source-read", insert_sidebar)
    app.connect("source-read", insert_signatures)
    app.connect("autodoc-process-signature", shorten_signature)
