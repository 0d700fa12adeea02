"""Trees that are not trusted are listed safely: links, pipes, secrets and slow patterns."""

import codecs
import os
import random
import re
import socket
import time

import pytest
from refusals import refused
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.listing import list_tree
from soft_trainer.source.source_files import MAX_DEPTH, MAX_FILE_BYTES, read_text


def skipped(folder):
    return list_tree(str(folder)).skipped


def test_secrets(tmp_path):
    names = [
        "id_rsa",
        "server.PEM",
        ".env.local",
        "prod.env",
        ".envrc",
        "a.key",
        ".npmrc",
        "tls.crt",
        "x.p12",
        ".netrc",
        ".env-production",
        "credentials.json",
        "secrets.yml",
        ".docker/config.json",
        "terraform.tfstate.backup",
        ".env_staging",
        "application_default_credentials.json",
        "client_secret_12.apps.json",
    ]
    harmless = [".env.example", ".env-sample", "id_rsa.pub", "config.json"]
    tree = write_tree(tmp_path / "tree", dict.fromkeys([*names, *harmless], "secret"))
    assert skipped(tree) == dict.fromkeys(names, "secret")


def test_an_ignore_file_may_begin_with_a_mark_and_end_lines_as_windows_does(tmp_path):
    files = {".gitignore": b"\xef\xbb\xbfbuild/\r\n*.log\r\n", "build/a.py": "x", "b.log": "x", "c.py": "x"}
    tree = write_tree(tmp_path / "tree", files)
    assert set(list_tree(str(tree)).files) == {".gitignore", "c.py"}


def test_a_tree_that_cannot_be_read_is_named(tmp_path):
    with refused("missing: the folder cannot be read (No such file or directory)"):
        list_tree(str(tmp_path / "missing"))


def test_links_and_special_files_are_not_opened(tmp_path):
    outside = write_tree(tmp_path / "outside", {"passwd": "root"})
    folder = write_tree(tmp_path / "tree", {"a.py": "x = 1"})
    (folder / "link.py").symlink_to(outside / "passwd")
    (folder / "out").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.py")
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(folder)  # a socket's path has a limit
        server.bind("socket.py")
        os.chdir(before)
        listing = list_tree(str(folder))
    assert set(listing.files) == {"a.py"}
    assert listing.skipped == dict.fromkeys(["link.py", "loop", "out"], "link")  # git lists no special file
    # a link or a pipe may replace a file after the listing
    assert read_text(str(folder), "link.py") == "link"
    assert read_text(str(folder), "pipe.py") == "not a regular file"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x00\x01", "binary"),
        (b"x" * 50_000, "minified"),
        (b"x" * (MAX_FILE_BYTES + 1), f"over {MAX_FILE_BYTES:,} bytes"),
        (b"key = '''\n-----BEGIN RSA PRIVATE KEY-----\nabc'''\n", "secret"),
    ],
)
def test_files_are_skipped_for_their_content(tmp_path, content, reason):
    (tmp_path / "a.py").write_bytes(content)
    assert read_text(str(tmp_path), "a.py") == reason


# names and contents of files, and the text that is read
ENCODED = {
    "bom.py": ("x = 'é'".encode("utf-8-sig"), "x = 'é'"),
    "a.cs": ("class A { }\r\n".encode("utf-16"), "class A { }\n"),
    "big.cs": (codecs.BOM_UTF16_BE + "// é\n".encode("utf-16-be"), "// é\n"),
    "wide.txt": ("x\ny".encode("utf-32"), "x\ny"),
    "none.py": (b"# caf\xe9\n", None),
}


@pytest.mark.parametrize("name", ENCODED)
def test_a_byte_order_mark_is_obeyed(tmp_path, name):
    content, text = ENCODED[name]
    (tmp_path / name).write_bytes(content)
    read = read_text(str(tmp_path), name, strict=True)
    if text is None:
        assert read == "not UTF-8" and read_text(str(tmp_path), name) == content
    else:
        assert read.decode() == text


def test_files_that_cannot_be_decoded_or_parsed_whole_are_searched(tmp_path, command):
    files = {
        "binary.dat": b"\xff\xfe\0",
        "old.py": b"def old_name(): '\xe9'",
        "broken.kt": "class A {\n  fun suspend(a: Int) {\n  }\n}\n",
    }
    tree = write_tree(tmp_path / "tree", files)
    code, out, _ = command("index", tree, "--skipped")
    assert code == 0 and "in which syntax errors may hide functions: 1; --skipped" in out
    assert "binary.dat  binary\n" in out and "broken.kt  indexed, but syntax errors may hide functions\n" in out
    assert CodeIndex.build(tree).search("old_name")[0].path == "old.py"


HEADER = "-----BEGIN RSA PRIVATE KEY-----"
KEY = "MIIEvQIBADANBgkqhkiG9w0BAQ"


@pytest.mark.parametrize(
    "text",
    [
        f'{{"type": "service_account", "private_key": "{HEADER}\\n{KEY}\\n"}}',
        f"key: |\n  {HEADER}\n  {KEY}\n",
        f'KEY = """{HEADER}\n{KEY}\n"""',
        f'KEY = ("{HEADER}\\n"\n    "{KEY}")',
        f'KEY = ["{HEADER}", "{KEY}"]',
        f"# {HEADER}\n# {KEY}\n",
        f"KEY={HEADER} {KEY}",
        f" {HEADER}\n Proc-Type: 4,ENCRYPTED\n",
        f"{HEADER}\nabc",
    ],
)
def test_a_key_is_a_secret_however_it_is_written(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert read_text(str(tmp_path), "a.py") == "secret"


@pytest.mark.parametrize(
    "text",
    [
        'KEYS = re.compile(rb"^-----BEGIN [A-Z ]*PRIVATE KEY", re.M)',
        f'if text.startswith("{HEADER}"):\n    something_that_is_long()',
        f'text = "{HEADER}\\n" + base64EncodedPrivateKey + "\\n"',
        f'text = f"{HEADER}\\n{{body}}\\n"',
        f'KEYS = r"{HEADER}[A-Za-z0-9+/=\\n]+"',
        f'HEADERS = ["{HEADER}", "-----BEGIN CERTIFICATE-----"]',
        f'text = "{HEADER}\\n...\\n"',
    ],
)
def test_a_program_that_looks_for_keys_is_not_a_secret(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert read_text(str(tmp_path), "a.py") == text.encode()


@pytest.mark.parametrize(
    ("line", "generated"),
    [
        ("# Code generated by protoc. DO NOT EDIT.", True),
        ("# line 1 of a file generated by Ragel", True),
        ("# This file was automatically generated from models/a.py.", True),
        ("// Auto-generated!", True),
        ('"""Handles auto-generated keys of a table."""', False),
        ("# machine generated speech is read here", False),
    ],
)
def test_generated_files_are_known_by_their_first_lines(tmp_path, line, generated):
    (tmp_path / "a.py").write_text(f"{line}\n")
    assert read_text(str(tmp_path), "a.py") == f"{line}\n".encode()
    mined = read_text(str(tmp_path), "a.py", strict=True)
    assert (mined == "generated") is generated


def test_names_that_are_no_text_and_deep_folders_are_counted(tmp_path):
    tree = write_tree(tmp_path / "tree", {"d/" * (MAX_DEPTH + 5) + "a.py": "x = 1"})
    with open(os.path.join(os.fsencode(tree), b"\xff.py"), "w") as file:
        file.write("x = 1")
    assert sorted(skipped(tree).values()) == ["a name that is not UTF-8", "too deep"]


def test_lock_files_and_data_are_skipped_and_counted(tmp_path):
    kinds = {
        "Cargo.lock": "lock file", "locale/eu.po": "translation", "a.min.js": "minified", "a.csv": "data",
        "x/__snapshots__/a.snap": "snapshot", "large.json": "data", "vendor/": "vendored",
    }  # fmt: skip
    tree = write_tree(tmp_path / "tree", dict.fromkeys(set(kinds) - {"vendor/"}, "x\n" * 60_000))
    write_tree(tree, {"a.py": "x = 1", "small.json": "{}", "vendor/a.go": "x", "vendor/ours/b.go": "x"})
    assert skipped(tree) == kinds
    assert set(list_tree(str(tree)).files) == {"a.py", "small.json"}


@pytest.mark.parametrize(
    ("exclude", "include", "added", "removed"),
    [
        (["src"], [], set(), {"src/server.go", "src/shop/cart.py", "src/shop/dates.py"}),
        (["*.go", "README.md"], [], set(), {"src/server.go", "README.md"}),
        ([], ["build/**"], {"build/out.py"}, set()),
        ([], ["build/{out,other}.py"], {"build/out.py"}, set()),
        ([], ["/build/*.py"], {"build/out.py"}, set()),
        ([], ["build/*.go"], set(), set()),
        ([], ["*.log"], {"debug.log"}, set()),
        (["**/dates.py"], ["src/**"], set(), {"src/shop/dates.py"}),
        ([], [".env"], set(), set()),
    ],
)
def test_patterns_exclude_and_include(tree, exclude, include, added, removed):
    plain = list_tree(str(tree))
    chosen = list_tree(str(tree), exclude, include)
    assert set(chosen.files) == set(plain.files) - removed | added


def plain_filter(pattern):
    """Compiles a path pattern in the simplest form, which may backtrack exponentially."""
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(wild.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
    if "/" not in pattern:
        expression = f"(?:.*/)?{expression}"
    return re.compile(rf"{expression}(?:/.*)?")


def test_a_path_filter_matches_in_little_time_what_a_plain_one_does():
    rng = random.Random(0)
    paths = ["/".join(rng.choices(["a", "b", "ab", "a.py", "bab"], k=rng.randint(1, 5))) for _ in range(100)]
    for _ in range(300):
        parts = rng.choices(["a", "b", "*", "**", "*b", "a*", "?", "*a*b", "a?*"], k=rng.randint(1, 5))
        pattern = "/".join(parts) + rng.choice(["", "", ".py", "**"])
        expected = plain_filter(pattern)
        assert {p for p in paths if path_filter(pattern).fullmatch(p)} == {p for p in paths if expected.fullmatch(p)}
    assert path_filter("app/[id]/*.ts").fullmatch("app/[id]/a.ts") and path_filter("./src/").fullmatch("src/a/b")
    assert path_filter("/a.py").fullmatch("a.py") and not path_filter("/a.py").fullmatch("b/a.py")
    either = path_filter("{src,lib}/*.{ts,tsx}")
    assert either.fullmatch("src/a.ts") and either.fullmatch("lib/a.tsx") and not either.fullmatch("lib/a.js")
    assert path_filter("{{name}}/*.py").fullmatch("{{name}}/a.py")
    started = time.process_time()
    for pattern in ("**/" * 14 + "x", "**/a" * 14 + "x", "*a" * 20 + "x", "**a" * 20 + "x", "a*b**" * 9 + "x"):
        assert not path_filter(pattern).fullmatch("a/" * 60 + "ab" * 60)
    assert time.process_time() - started < 0.5


def test_the_index_remembers_its_patterns(command, tree):
    command("index", tree, "--exclude", "src/**", "--exclude", "*.md", "--include", "*.log")
    assert command("search", "--folder", tree, "parse_date failed")[1].startswith("debug.log")
    assert "excluded: 3" in command("index", tree)[1]
    assert "excluded" not in command("index", tree, "--exclude", "")[1]
    assert command("search", "--folder", tree, "parse_date")[1].startswith("src/shop/dates.py")


def test_the_shortcut_for_ordinary_names_changes_nothing(tmp_path):
    stems = [
        "plain",
        "Two_words3",
        "id_rsa",
        "id_ed25519_old",
        "x.min",
        ".env",
        "credentials",
        "a b",
        "a\u00e9",
        "secrets",
    ]
    for stem in stems:
        for ending in ("py", "js", "lock", "pem", "py\n", "svg", "md", "po"):
            (tmp_path / f"{stem}.{ending}").touch()
    plain = list_tree(str(tmp_path))
    other = list_tree(str(tmp_path), exclude=["nothing"])  # with a pattern, the shortcut is not used
    assert (plain.files, plain.skipped) == (other.files, other.skipped)
    assert "plain.py" in plain.files and plain.skipped["id_rsa.py"] == "secret"


PARAGRAPH = "A paragraph of prose is one long line in many books and manuals. " * 8 + "\n\n"


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("book/chapter.asc", "= Branches\n\n" + PARAGRAPH * 60, ""),  # AsciiDoc
        ("book/chapter.asciidoc", PARAGRAPH * 60, ""),
        ("book/chapter.org", PARAGRAPH * 60, ""),
        ("LICENCE", PARAGRAPH * 60, ""),
        ("keys/ann.asc", f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{KEY}\n", "secret"),
        ("keys/public.asc", f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{KEY}\n", ""),
        ("Electrical/Analog.mo", "model Resistor\n  Real r;\nend Resistor;\n", ""),  # Modelica
        ("locale/de.mo", b"\xde\x12\x04\x95\0\0\0\0", "binary"),
        ("Lib/venv/__init__.py", "def create(folder):\n    return folder\n", ""),
        ("web/all.js", "f();" * 50_000, "minified"),
        ("web/all.css", "a{b:c}" * 5_000, "minified"),
    ],
)
def test_what_a_file_is_decides_and_not_its_name(tmp_path, path, text, reason):
    tree = write_tree(tmp_path / "tree", {path: text, "a.py": "x = 1"})
    expected = {path: reason} if reason else {}
    assert CodeIndex.build(tree).skipped() == expected


def test_a_virtual_environment_is_known_by_its_file(tmp_path):
    files = {"env/pyvenv.cfg": "home = /usr", "env/bin/run.py": "x", "venv/a.py": "x", "a.py": "x"}
    assert skipped(write_tree(tmp_path / "tree", files)) == {"env/": "vendored"}


def test_an_include_pattern_wins_over_all_but_secrets(tmp_path):
    files = {
        "web/all.js": "f();" * 50_000,
        "web/b.min.js": "function find_cart() {}" * 5_000,
        "web/key.js": f"const key = `{HEADER}\n{KEY}`;\n",
        "web/.env": "TOKEN=1",
        "data.csv": "a,b\n",
    }
    tree = write_tree(tmp_path / "tree", files)
    index = CodeIndex.build(tree)
    assert set(index.skipped()) == set(files)
    index = CodeIndex.build(tree, include=["web/*", "*.csv"])
    assert index.skipped() == {"web/key.js": "secret", "web/.env": "secret"}
    assert index.search("find_cart")[0].path == "web/b.min.js"
