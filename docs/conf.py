"""Settings of the documentation site: `sphinx-build -W -b html -c docs . SITE`, in the root of the repository.

The source is the whole repository, so that pages may link to recipes, benchmarks and examples as files do on disk.
"""

import soft_trainer

project = "soft_trainer"
version = release = soft_trainer.__version__
root_doc = "docs/index"
include_patterns = [
    *("docs/*.md", "benchmarks/*.md", "recipes/*.md", "recipes/*/*.md", "recipes/*/*/*.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
]
exclude_patterns = ["**/.venv/**", "outputs/**"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
default_role = "code"  # of `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them
napoleon_google_docstring = True
napoleon_use_rtype = False
suppress_warnings = ["myst.header"]  # pages begin at any level of heading where they are parts of others

html_theme = "furo"
html_title = "soft_trainer"
