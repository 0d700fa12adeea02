"""The search page: its address, its headers, and trees that try to break out of it."""

import http.client
import json
import threading
from urllib.parse import quote

import pytest
from trees import write_tree

from soft_trainer.search import CodeIndex
from soft_trainer.search.server import PAGE, PageServer


@pytest.fixture
def server(tree):
    write_tree(
        tree, {"<script>alert(1)</script>.py": "def evil():\n    return '</script><img src=x onerror=alert(1)>'\n"}
    )
    server = PageServer(CodeIndex.build(tree))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read().decode()


def test_the_page_and_its_data(server):
    status, headers, body = get(server, f"/{server.token}/")
    assert status == 200 and "<input" in body
    nonce = headers["Content-Security-Policy"].split("script-src 'nonce-")[1].split("'")[0]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'") and body.count(f'nonce="{nonce}"') == 2
    assert "Access-Control-Allow-Origin" not in headers
    assert "http://" not in body and "https://" not in body
    answer = json.loads(get(server, f"/{server.token}/search?q=parse+date")[2])
    assert answer["results"][0]["name"] == "parse_date" and answer["results"][0]["lines"]
    assert json.loads(get(server, f"/{server.token}/search?q=date&path=*.go")[2])["results"] == []
    assert "python" in json.loads(get(server, f"/{server.token}/about")[2])["languages"]


@pytest.mark.parametrize("path", ["/", "/search?q=a", "/wrong/", "/wrong/search?q=a", "/../etc/passwd"])
def test_without_the_token_there_is_nothing(server, path):
    assert get(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"])
def test_another_host_is_refused(server, host):
    assert get(server, f"/{server.token}/", host)[0] == 403


def test_texts_reach_the_page_as_data(server):
    status, headers, body = get(server, f"/{server.token}/search?q=evil")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["results"][0]["path"] == "<script>alert(1)</script>.py"
    page = PAGE.read_text()
    assert not any(name in page for name in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("))
    assert len(page.splitlines()) <= 300


@pytest.mark.parametrize(
    "query", ["", "q=", "q=" + "a%20" * 3000, "q=" + quote("' OR 1=1 --"), "path=%5B&q=a", "x&y&z"]
)
def test_odd_requests_are_answered(server, query):
    assert get(server, f"/{server.token}/search?{query}")[0] == 200
