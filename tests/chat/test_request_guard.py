"""What the demo page's server refuses: names that are not this machine's, other sites' pages, files, large bodies."""

import asyncio
import http.client
import json
from urllib.parse import urlsplit

import pytest

gradio = pytest.importorskip("gradio", reason="the page needs gradio: make extras")

from stages.chat.request_guard import MAX_BODY_BYTES, RequestGuard  # noqa: E402

GUARD = RequestGuard(None, "demo.lan")
POST = {"host": "127.0.0.1:7860", "content-length": "10"}


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "LOCALHOST", "[::1]:7860", "192.168.1.5:7860",
                                  "demo.lan"])
def test_addresses_and_names_of_this_machine_are_served(host):
    assert GUARD.refuse("GET", "/", {"host": host}) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "[::1",
                                  "localhost.evil.example", "user@evil.example"])
def test_other_names_are_refused_whatever_the_method(host):
    for method in ("GET", "POST", "WEBSOCKET"):
        assert GUARD.refuse(method, "/", POST | {"host": host})[0] == 403


@pytest.mark.parametrize(("origin", "served"), [
    (None, True), ("http://127.0.0.1:7860", True), ("http://evil.example", False), ("null", False),
    ("http://127.0.0.1:9999", False), ("http://127.0.0.1:7860.evil.example", False)])
def test_only_the_page_itself_may_ask_and_vote(origin, served):
    headers = POST if origin is None else POST | {"origin": origin}
    assert (GUARD.refuse("POST", "/gradio_api/queue/join", headers) is None) == served
    assert GUARD.refuse("GET", "/", headers) is None


def test_files_and_large_bodies_are_refused():
    assert GUARD.refuse("POST", "/gradio_api/upload", POST)[0] == 403
    assert GUARD.refuse("POST", "/upload/", POST)[0] == 403
    for length in (str(MAX_BODY_BYTES + 1), "-1", "x", ""):
        assert GUARD.refuse("POST", "/gradio_api/queue/join", POST | {"content-length": length})[0] == 413
    assert GUARD.refuse("POST", "/gradio_api/queue/join", {"host": "localhost"})[0] == 413  # chunked: no length


def test_a_refused_request_never_reaches_the_page():
    sent, reached = [], []

    async def app(*_):
        reached.append(1)

    async def send(message):
        sent.append(message)

    guard = RequestGuard(app, "127.0.0.1")
    for kind in ("http", "websocket"):
        scope = {"type": kind, "method": "POST", "path": "/", "headers": [(b"host", b"evil.example")]}
        asyncio.run(guard(scope, None, send))
    assert not reached
    assert [message["type"] for message in sent] == [
        "http.response.start", "http.response.body", "websocket.close"]
    assert sent[0]["status"] == 403 and "not served as 'evil.example'" in json.loads(sent[1]["body"])["error"]
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert reached


def test_gradio_runs_behind_it():
    from stages.chat.page import serve_page

    with gradio.Blocks() as blocks:
        gradio.Markdown("page")
    try:
        address = urlsplit(serve_page(blocks, "127.0.0.1", None, wait=False)).netloc
        statuses = {}
        for host in (address, "evil.example"):
            connection = http.client.HTTPConnection(address, timeout=20)
            connection.request("GET", "/", headers={"Host": host})
            statuses[host] = connection.getresponse().status
            connection.close()
        connection = http.client.HTTPConnection(address, timeout=20)
        connection.request("POST", "/gradio_api/upload", b"x" * 10, {"Content-Type": "text/plain"})
        statuses["upload"] = connection.getresponse().status
        connection.close()
        assert statuses == {address: 200, "evil.example": 403, "upload": 403}
    finally:
        blocks.close()
