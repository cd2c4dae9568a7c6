"""Our servers answer requests that no valid client sends with a 4xx status, without a traceback in their log."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from chaos.mutations import gzip_bomb

from groundwire.tools.http.listening import listen
from groundwire.tools.http.server import HttpServer

JSON = {"Content-Type": "application/json"}


class _Server(HttpServer):
    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body == b"fail":
            raise KeyError("a fault of the server")
        return web.Response(text=str(len(body)))


async def _send(server: HttpServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 600)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nConnection: close\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_not_logged(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with _Server() as server:
        assert (await _send(server, data)).startswith(b"HTTP/1.0 400 ")
    assert not caplog.records


async def test_a_client_that_leaves_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with _Server() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.1)
    assert not caplog.records


async def test_a_fault_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with _Server() as server, aiohttp.request("POST", server.url, data=b"fail", headers=JSON) as reply:
        assert reply.status == 500
    assert "a fault of the server" in caplog.text


async def test_a_body_is_not_decompressed() -> None:
    bomb = gzip_bomb(megabytes=500)
    async with _Server() as server, aiohttp.ClientSession(headers=JSON) as session:
        headers = {"Content-Encoding": "gzip"}
        async with session.post(server.url, data=bomb, headers=headers) as reply:
            assert (reply.status, await reply.text()) == (200, str(len(bomb)))


async def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.tools.http.server._FIRST_REQUEST_S", 0.1)
    async with _Server() as server:
        for data in (b"", b"POST / HTTP/1.1\r\nHost:"):
            assert await _send(server, data) == b""
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: 4\r\nConnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        await asyncio.sleep(0.5)  # a request that takes long is no idle connection
        writer.write(b"body")
        assert (await asyncio.wait_for(reader.read(), 600)).endswith(b"4")
        writer.close()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_no_server_listens_at_another_port_than_the_given_one(port: int) -> None:
    with pytest.raises(OSError, match="65535"):
        listen("127.0.0.1", port)
