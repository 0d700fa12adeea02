"""The search page needs its token, has strict headers, and shows hostile file names and texts safely."""

import http.client
import json
import shutil
import socket
import subprocess
import threading
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from trees import write_tree

from soft_trainer.errors import UserError
from soft_trainer.search import CodeIndex
from soft_trainer.search.serving.served_index import ServedIndex
from soft_trainer.search.serving.server import PAGE, PageServer, serve_page


@pytest.fixture
def server(tree):
    source = "def evil():\n    return '</script><img src=x onerror=alert(1)>'\n"
    write_tree(tree, {"<script>alert(1)</script>.py": source})
    server = PageServer(ServedIndex(CodeIndex.build(tree)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read().decode()


def data(server, path):
    return json.loads(get(server, f"/{server.token}/{path}")[2])


def test_the_page_and_its_data(server):
    status, headers, body = get(server, f"/{server.token}/")
    assert status == 200 and "<input" in body
    nonce = headers["Content-Security-Policy"].split("script-src 'nonce-")[1].split("'")[0]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'") and body.count(f'nonce="{nonce}"') == 2
    assert "Access-Control-Allow-Origin" not in headers
    assert "http://" not in body and "https://" not in body
    answer = data(server, "search?q=parse+date")
    assert answer["results"][0]["name"] == "parse_date" and answer["results"][0]["lines"]
    assert data(server, "search?q=date&path=*.go")["results"] == []
    tests = data(server, "search?q=total+price&tests=only")["results"]
    assert [result["path"] for result in tests] == ["tests/test_cart.py"]
    answer_to_stray = data(server, "search?q=xqzv+parse")
    assert answer_to_stray["results"][0]["weak"] and "only weak results" in answer_to_stray["notices"][0]
    pasted = data(server, f"search?q={'xqzv+' * 3000}parse+date")
    assert pasted["results"][0]["name"] == "parse_date"
    about = data(server, "about")
    assert "python" in about["languages"] and about["files"] == 7
    assert about["update"] is True
    assert answer["results"][0]["editor"] == f"vscode://file/{server.served.index.folder}/src/shop/dates.py:1"
    lines = data(server, "lines?path=README.md&start=-9&end=1")
    assert lines == {"start_line": 1, "text": "# Shop"}
    for wrong in ("path=.env&start=1&end=2", "path=README.md", "path=README.md&start=a&end=2"):
        status, _, body = get(server, f"/{server.token}/lines?{wrong}")
        assert status == 400 and "error" in json.loads(body)


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        *((path, None, 404) for path in ["/", "/search?q=a", "/wrong/", "/wrong/search?q=a", "/../etc/passwd"]),
        *(("/{}/", host, 403) for host in ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"]),
        *(("/{}/search?" + query, None, 200) for query in ["", "q=", "q=" + "a%20" * 3000, "x&y&z"]),
        ("/{}/search?q=" + quote("' OR 1=1 --"), None, 200),
        ("/{}/search?" + "&".join(f"a{n}=1" for n in range(12)), None, 400),
        ("/{}/search?q=x&language=cobol", None, 400),
        ("/{}/search?q=x&path=%5B", None, 400),
    ],
)
def test_odd_requests_are_answered_and_those_of_others_refused(server, path, host, status):
    found, _, body = get(server, path.replace("{}", server.token), host)
    assert found == status and (status != 404 or "use the whole address" in body)


def test_an_address_that_cannot_be_parsed_is_a_bad_request(server):
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_texts_reach_the_page_as_data(server):
    status, headers, body = get(server, f"/{server.token}/search?q=evil")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["results"][0]["path"] == "<script>alert(1)</script>.py"
    page = PAGE.read_text()
    assert not any(name in page for name in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("))


def shown_by(server, state):
    """Returns the page as a browser shows it."""
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=4000"]
    return subprocess.run([*words, server.url + state], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium")
def test_the_page_in_a_browser(server):
    shown = partial(shown_by, server)
    dom = shown("")
    assert ": 7 files.<br>" in dom and 'id="query" rows="1"' in dom
    assert 'id="query" rows="3"' in shown("#q=Traceback%0A++File+%22a.py%22%2C+line+3%0AValueError")
    dom = shown("#q=parse+date&path=*.py")
    assert '<p class="hint" id="start" hidden="">' in dom
    assert dom.index("src/shop/dates.py:1") < dom.index("open in the editor") and "server.go" not in dom
    assert 'href="vscode://file/' in dom and "<script>alert" not in dom
    assert '<span class="comment">Parse</span>' in dom.replace("<mark>", "").replace("</mark>", "")
    # the second chunk of a long function starts inside its docstring, where `for` is not a keyword
    lines = "".join(f"    Wanted words for line {n}.\n" for n in range(90))
    write_tree(
        Path(server.served.index.folder), {"long.py": f'def long():\n    """Say.\n\n{lines}    """\n    pass\n'}
    )
    server.served.index.update()
    dom = shown("#q=wanted+words&path=long.py")
    assert dom.count("<li") == 2 and '<span class="keyword">for</span>' not in dom
    assert "results like src/shop/dates.py:1" in shown("#like=src/shop/dates.py:1")


def test_a_port_out_of_range_is_named(tree):
    with pytest.raises(UserError, match=r"port=80000: .*0-65535; choose another"):
        serve_page(ServedIndex(CodeIndex.build(tree)), port=80000)
