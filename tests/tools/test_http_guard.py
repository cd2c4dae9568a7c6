"""A server refuses what a web page can send, and what comes without its token."""

from __future__ import annotations

import base64

import pytest
from multidict import CIMultiDict

from groundwire.tools.http.guard import Guard

TOKEN = "the-token-of-this-server"
JSON = {"Host": "127.0.0.1:4747", "Content-Type": "application/json", "Content-Length": "2"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def _basic(password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'x:{password}'.encode()).decode()}"}


def _status(
    headers: dict[str, str], *, method: str = "POST", path: str = "/rollouts", token: str | None = TOKEN
) -> int:
    guard = Guard(token=token, public=["/health", "/public/"], hosts=["Trainer.Example"], protobuf=["/v1/traces"])
    refusal = guard.refusal(method, path, CIMultiDict(headers))
    return 200 if refusal is None else refusal[0]


@pytest.mark.parametrize("host", ["127.0.0.1:4747", "localhost:1", "[::1]:80", "10.0.0.5", "trainer.example:1"])
def test_this_machines_names_are_accepted(host: str) -> None:
    assert _status({**JSON, "Host": host}, token=None) == 200


@pytest.mark.parametrize("host", ["evil.example:4747", "127.0.0.1.evil.example", "localhost.evil", "", "[", "@"])
def test_other_names_need_the_token(host: str) -> None:
    assert _status({**JSON, "Host": host}, token=None) == 403
    assert _status({**JSON, "Host": host}) == 403
    assert _status({**JSON, **BEARER, "Host": host}) == 200


@pytest.mark.parametrize(
    "page",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:4747"},  # another name is another site
        {"Origin": "http://127.0.0.1:3000"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_pages_of_other_sites_are_refused_even_with_the_token(page: dict[str, str], method: str) -> None:
    assert _status({**JSON, **BEARER, **page}, method=method) == 403


def test_the_servers_own_page_and_a_link_to_it_are_accepted() -> None:
    own = {"Origin": "http://127.0.0.1:4747", "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert _status({**JSON, **own}, token=None) == 200
    link = {"Host": "127.0.0.1:4747", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert _status(link, method="GET", token=None) == 200


@pytest.mark.parametrize(
    ("kind", "path", "status"),
    [
        ("application/json", "/rollouts", 200),
        ("Application/JSON; charset=utf-8", "/rollouts", 200),
        ("application/x-protobuf", "/v1/traces", 200),
        ("application/x-protobuf", "/rollouts", 415),
        ("text/plain", "/rollouts", 415),
        ("text/plain", "/v1/traces", 415),
        ("application/x-www-form-urlencoded", "/rollouts", 415),
        ("multipart/form-data; boundary=application/json", "/rollouts", 415),
        ("", "/rollouts", 415),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_changes_must_be_json_or_opentelemetrys_protobuf(kind: str, path: str, status: int, method: str) -> None:
    assert _status({**JSON, **BEARER, "Content-Type": kind}, method=method, path=path) == status


def test_a_body_without_a_length_has_a_type_and_a_request_without_a_body_needs_none() -> None:
    assert _status({**BEARER, "Host": "127.0.0.1", "Transfer-Encoding": "chunked"}) == 415
    assert _status({**BEARER, "Host": "127.0.0.1"}) == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (BEARER, 200),
        (_basic(TOKEN), 200),
        ({}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": "Bearer \udcff"}, 401),
        (_basic(""), 401),
        (_basic("none"), 401),
        ({"Authorization": "Basic !"}, 401),
        ({"Authorization": "Basic"}, 401),
    ],
)
def test_the_token_is_a_bearer_token_or_a_password(authorization: dict[str, str], status: int) -> None:
    assert _status({**JSON, **authorization}) == status
    assert _status({**JSON, **authorization}, method="GET") == status


def test_public_paths_need_no_token() -> None:
    for path, status in {"/health": 200, "/public/any": 200, "/healthy": 401, "/public": 401}.items():
        assert _status(JSON, path=path) == status


def test_a_refused_request_is_told_where_the_token_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(**options: str) -> str:
        return str(Guard(token=TOKEN, **options).refusal("GET", "/", CIMultiDict(Host="localhost")))

    monkeypatch.setenv("GROUNDWIRE_TOKEN", TOKEN)
    assert "which is in the environment variable GROUNDWIRE_TOKEN, or in the file of its --token-file" in reason()
    assert "which is in OTHER'" in reason(variable="OTHER").replace('"', "'")
    monkeypatch.delenv("GROUNDWIRE_TOKEN")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/someone/.local/state")
    assert "which is in ~/.local/state/groundwire/token, or" in reason()
    assert TOKEN not in reason()
