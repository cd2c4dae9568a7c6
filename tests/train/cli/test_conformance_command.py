"""``groundwire conformance``: its table, its exit codes and what it asks for."""

from __future__ import annotations

import pytest
from external_processes import free_port
from typer.testing import CliRunner

from groundwire.train.api.serving import serve
from groundwire.train.conformance import app


def conformance(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--api", "chat"])
    return result.exit_code, result.output


@pytest.fixture
def upstream() -> list[str]:
    """The scripted policy, called without a gateway in between."""
    port = str(free_port())
    return [f"http://127.0.0.1:{port}/v1", "--upstream-port", port]


def test_nothing_is_wrong_with_the_scripted_policy_itself(upstream: list[str]) -> None:
    code, output = conformance(*upstream)
    assert (code, "14 conversations, 14 compared, 0 with something wrong" in output) == (0, True)


def test_a_model_that_we_serve_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve("starter") as server:
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        code, output = conformance(server.base_url)
    assert (code, "14 compared, 0 with something wrong" in output) == (0, True), output


def test_what_an_export_leaves_out_is_lost(upstream: list[str]) -> None:
    code, output = conformance(*upstream, "--export-command", "true")
    assert (code, "14 with something wrong" in output) == (1, True)


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [("echo '{}'", 2, "prompt_ids, response_ids and loss_mask"), ("exit 3", 1, "ended with status 3")],
)
def test_an_export_that_gives_no_rows_is_an_error(upstream: list[str], command: str, code: int, message: str) -> None:
    found, output = conformance(*upstream, "--export-command", command)
    assert (found, message in output) == (code, True)


def test_a_gateway_that_cannot_be_reached_or_is_none_is_an_error() -> None:
    code, output = conformance(f"http://127.0.0.1:{free_port()}/v1")
    assert (code, "cannot be reached" in output) == (2, True)


def test_an_unknown_api_is_an_error() -> None:
    assert conformance("http://127.0.0.1:9/v1", "--api", "smoke signals")[0] == 2
