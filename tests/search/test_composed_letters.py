"""A letter with an accent is found however it was typed or stored; paths and texts stay as they are on disk."""

import unicodedata

import pytest
from git_repositories import committed

from soft_trainer.search import CodeIndex

FILES = {
    "größe/maß.py": "import datetime\n\n\ndef höhe_der_fläche(breite):\n    return breite * 2\n",
    "größe/ガイド.md": "# Überblick\n\nDer Übergang der パスワード heißt Schlüssel.\n",
    "src/Café.java": "class Café {\n    int zählen(int größe) {\n        return größe;\n    }\n}\n",
    "src/année.rb": "class Année\n  def été(x)\n    x\n  end\nend\n",
}
FILTERS = [
    {"query": "höhe_der_fläche"},
    {"query": "maß"},
    {"query": "ガイド"},
    {"query": "Übergang Schlüssel パスワード"},
    {"query": "Café.zählen"},
    {"query": "größe", "name": "zählen"},
    {"query": "x", "name": "Année.été"},
    {"query": "Überblick", "path": "größe/**"},
    {"query": "Überblick", "path": "ガイド.md"},
    {"query": "what computes the höhe of a fläche?"},
]


def in_form(form, value):
    if isinstance(value, dict):
        return {in_form(form, key): in_form(form, one) for key, one in value.items()}
    return unicodedata.normalize(form, value)


@pytest.fixture(params=["NFC", "NFD"])
def index(tmp_path, request):
    files = in_form(request.param, FILES)
    tree = tmp_path / "tree"
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    index = CodeIndex.build(committed(tree))
    index.files = files
    return index


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_both_forms_of_a_query_find_both_forms_of_a_file(index, filters):
    found = [index.search(**in_form(form, filters)) for form in ("NFC", "NFD")]
    assert found[0] == found[1] != []
    for result in found[0]:
        lines = index.files[result.path].split("\n")
        assert result.text == "\n".join(lines[result.start_line - 1 : result.end_line])


def test_a_file_is_read_by_its_path_in_both_forms(index):
    for path, text in index.files.items():
        for form in ("NFC", "NFD"):
            assert index.text_of(in_form(form, path)) == text
            assert index.similar(in_form(form, path), 1) is not None


def test_patterns_for_the_index_match_both_forms(index):
    for form in ("NFC", "NFD"):
        again = CodeIndex.build(index.folder, f"{index.folder} {form}", exclude=in_form(form, "größe/**"))
        assert set(again.files_by_language()) == {"java", "ruby"}
