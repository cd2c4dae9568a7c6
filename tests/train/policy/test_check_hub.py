"""A model name that is neither on the hub nor in its cache is refused before a run, even without a network."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.pretrained.locate import check_hub


class _Hub(BaseHTTPRequestHandler):
    """A hub with one model, which answers 503 for another."""

    def do_GET(self) -> None:
        known = self.path == "/api/models/owner/name"
        status = 200 if known else 503 if "busy" in self.path else 404
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(json.dumps({"id": "owner/name"} if known else {}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    yield url
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_passes(hub: str) -> None:
    check_hub("owner/name")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("rnus/model", "no model rnus/model: no such folder, and the hub has no such model"),
        ("runs/model", "no model runs/model: runs is a folder here without model, and the hub has no such model"),
        ("owner/busy", "no model owner/busy: no such folder, and it is not in the hub's cache"),
        ("no name/at all", "and no model on the hub can have this name"),
    ],
)
def test_an_unknown_model_is_refused_in_one_line(hub: str, model: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        check_hub(model)
    assert "\n" not in str(raised.value)


def test_without_a_network_the_cache_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="and the hub cannot be asked"):
        check_hub("owner/kept")
    folder = tmp_path / "models--owner--kept"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    check_hub("owner/kept")


def test_an_error_of_any_http_client_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ConnectError(Exception):
        """As of httpx2, which huggingface_hub has since version 2: neither an OSError nor an error of httpx."""

    def fail(*_: object, **__: object) -> None:
        raise ConnectError("no route\nto the hub")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(ConfigError, match=re.escape("and the hub cannot be asked (no route)")):
        check_hub("owner/kept")
