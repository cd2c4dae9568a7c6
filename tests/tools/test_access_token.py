"""Processes of one user find one token; across machines it must be given, and nothing listens there without one."""

from __future__ import annotations

import asyncio
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from external_processes import answers, free_port
from programs import Program, run, until

from groundwire.tools.http.access_token import TokenError, access_token, check_listen, given_token, token_for
from groundwire.train.job.prepare import check_store_settings
from groundwire.train.store.errors import StoreAddressError
from groundwire.train.store.health import check_store
from groundwire.train.store.lightning_store import LightningStore
from groundwire.train.store.server import bind, serve
from groundwire.train.store.sqlite import MEMORY

GIVEN = "a-token-of-several-machines"


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("GROUNDWIRE_TOKEN", raising=False)
    return tmp_path / "groundwire" / "token"


def test_the_users_token_is_made_once_and_only_the_user_can_read_it(own_file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = {made.result() for made in [pool.submit(access_token) for _ in range(32)]}
    assert tokens == {own_file.read_text().strip()}
    assert stat.S_IMODE(own_file.stat().st_mode) == 0o600
    assert [path.name for path in own_file.parent.iterdir()] == ["token"]


def test_a_token_that_others_can_read_is_refused(own_file: Path) -> None:
    access_token()
    own_file.chmod(0o644)
    with pytest.raises(TokenError, match="can be read by other users, so it is no secret: delete it"):
        access_token()


def test_the_file_wins_over_the_environment_and_that_over_the_users_token(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "given"
    file.write_text(f"{GIVEN}\n")
    assert given_token() is None
    monkeypatch.setenv("GROUNDWIRE_TOKEN", "given-by-the-environment")
    assert (access_token(), access_token(file)) == ("given-by-the-environment", GIVEN)
    assert not own_file.exists()


def test_the_users_token_is_not_sent_to_other_machines(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_for("http://127.0.0.1:4747") == token_for("http://localhost:1") == access_token()
    assert (
        token_for("http://10.0.0.5:4747") is token_for("http://127.0.0.1.example.com") is token_for("http://[") is None
    )
    monkeypatch.setenv("GROUNDWIRE_TOKEN", GIVEN)
    assert token_for("http://10.0.0.5:4747") == GIVEN


@pytest.mark.parametrize("token", ["short", "with a blank in the middle", "", "ümlaute-in-einem-token"])
def test_a_token_that_cannot_be_sent_or_can_be_guessed_is_refused(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(TokenError, match=r"must be 16 to 512 letters, .* openssl rand -hex 32$") as caught:
        given_token(file)
    assert not token or token not in str(caught.value)


def test_a_missing_token_file_is_named() -> None:
    with pytest.raises(TokenError, match="cannot read the token file /no/such/file: No such file or directory"):
        given_token("/no/such/file")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "", "example.com", "localhost.example.com"])
def test_nothing_listens_for_other_machines_without_a_token(host: str) -> None:
    with pytest.raises(TokenError, match="needs a token: set GROUNDWIRE_TOKEN or give --token-file FILE"):
        check_listen(host, None)
    check_listen(host, GIVEN)


def test_the_store_refuses_to_listen_for_other_machines_without_a_token(own_file: Path) -> None:
    done = run("-m", "train.store", "--memory", "--port", "0", "--host", "0.0.0.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: listening on 0.0.0.0 needs a token: set GROUNDWIRE_TOKEN or give --token-file FILE\n"
    )


def test_a_store_for_other_machines_serves_clients_with_its_token_only(own_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(GIVEN)
    port = free_port()
    options = ("--memory", "--host", "0.0.0.0", "--port", str(port), "--token-file", str(file))
    store = Program("-m", "train.store", *options)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}", GIVEN), store)
        with pytest.raises(StoreAddressError, match="refuses the token: set GROUNDWIRE_TOKEN, or give --token-file"):
            check_store_settings(f"http://127.0.0.1:{port}")
        check_store_settings(f"http://127.0.0.1:{port}", str(file))
        check_store(f"http://127.0.0.1:{port}", token=GIVEN)
    finally:
        store.send_signal(2)
        assert store.wait(600).returncode == 0


def test_a_token_in_an_address_is_refused_before_it_is_written_anywhere() -> None:
    with pytest.raises(
        StoreAddressError, match=r"contains a password: give http://127\.0\.0\.1:4747, and the token"
    ) as e:
        check_store_settings(f"http://x:{GIVEN}@127.0.0.1:4747")
    assert GIVEN not in str(e.value)


async def test_agent_lightnings_client_and_exporter_work_with_the_token_in_their_address() -> None:
    LightningStoreClient = pytest.importorskip("agentlightning.store.client_server").LightningStoreClient
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult

    def export(endpoint: str, ids: dict[str, str]) -> Any:
        span = TracerProvider(resource=Resource.create(ids)).get_tracer("test").start_span("work")
        span.end()
        return OTLPSpanExporter(endpoint=endpoint).export([span])  # type: ignore[list-item]

    async with serve(LightningStore(MEMORY), bind("127.0.0.1", 0), token=GIVEN) as url:
        theirs = LightningStoreClient(url.replace("://", f"://x:{GIVEN}@"), retry_delays=())
        attempted = await theirs.start_rollout({"n": 1})
        again = await theirs.start_attempt(attempted.rollout_id)  # a request without a body
        ids = {
            "agentlightning.rollout_id": attempted.rollout_id,
            "agentlightning.attempt_id": again.attempt.attempt_id,
        }
        result = await asyncio.to_thread(export, theirs.otlp_traces_endpoint(), ids)
        assert result == SpanExportResult.SUCCESS
        assert len(await theirs.query_spans(attempted.rollout_id)) == 1
        await theirs.close()
        without = LightningStoreClient(url, retry_delays=(), health_retry_delays=())
        with pytest.raises(aiohttp.ClientResponseError, match="401"):
            await without.query_rollouts()
        await without.close()
