"""An agent finds the variables of its ``.env`` file, placeholders for the keys it lacks, and no proxy on its way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import requests

from groundwire.adapters import Endpoint, Question, agent_backend
from groundwire.adapters.agents.app_environment import DEFAULTS, missing_variables, provider_urls
from groundwire.adapters.agents.changes import given_back
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer

AGENT = """
import os
from dotenv import load_dotenv
load_dotenv({override})
AT_IMPORT = {{name: os.environ.get(name) for name in ("TAVILY_API_KEY", "GROQ_API_KEY", "OPENAI_BASE_URL")}}
def agent(question): return str(AT_IMPORT)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in (*DEFAULTS, *provider_urls(""), "NO_PROXY", "no_proxy", "TAVILY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with given_back():
        yield


@pytest.mark.parametrize("by", ["file", "module", "inner"])
def test_the_env_file_above_the_agent_is_read_and_placeholders_hide_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    package = f"env_of_{by}"
    folder = tmp_path / "app" / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "env_agent.py").write_text("import os\nAT_IMPORT = dict(os.environ)\ndef agent(question): return ''\n")
    (tmp_path / "app" / ".env").write_text("TAVILY_API_KEY=tv\nGROQ_API_KEY=gsk\nMISTRAL_API_KEY=of-the-file\n")
    monkeypatch.setenv("MISTRAL_API_KEY", "of-the-shell")
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    if by == "module":
        (folder / "__init__.py").write_text((folder / "env_agent.py").read_text())
    name = {
        "file": f"{folder}/env_agent.py:agent",
        "module": f"{package}:agent",
        "inner": f"{package}.env_agent:agent",
    }[by]
    agent_backend(name)
    module = {"file": "env_agent", "module": package, "inner": f"{package}.env_agent"}[by]
    seen = sys.modules.pop(module).AT_IMPORT
    assert (seen["TAVILY_API_KEY"], seen["GROQ_API_KEY"], seen["MISTRAL_API_KEY"]) == ("tv", "gsk", "of-the-shell")
    assert (seen["OPENAI_API_KEY"], seen["AWS_ACCESS_KEY_ID"]) == ("none", "none")
    assert "HF_TOKEN" not in seen


@pytest.mark.parametrize("override", ["", "override=True"])
def test_load_dotenv_of_the_author_leaves_the_urls_of_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    (tmp_path / "own.py").write_text(AGENT.format(override=override))
    (tmp_path / ".env").write_text("OPENAI_BASE_URL=https://api.example.com/v1\nGROQ_API_KEY=gsk\n")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/r/1/v1")
    agent_backend(f"{tmp_path}/own.py:agent")
    seen = sys.modules.pop("own").AT_IMPORT
    assert (seen["OPENAI_BASE_URL"], seen["GROQ_API_KEY"]) == ("http://127.0.0.1:9/r/1/v1", "gsk")


def test_a_placeholder_hides_no_key_of_the_app(tmp_path: Path) -> None:
    assert missing_variables({}) == DEFAULTS
    assert not {"GOOGLE_API_KEY", "GEMINI_API_KEY"} & missing_variables({"GEMINI_API_KEY": "x"}).keys()
    assert not [name for name in missing_variables({"AWS_PROFILE": "x"}) if name.startswith("AWS")]
    (tmp_path / ".aws").mkdir()
    assert not [name for name in missing_variables({}) if name.startswith("AWS")]


async def test_calls_reach_the_policy_past_a_proxy_of_clients_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    url = "https://api.example.com/v1/chat/completions"
    client, session = httpx.Client(), requests.Session()
    session.proxies = {"http": "http://127.0.0.1:9", "https": "http://127.0.0.1:9"}

    def agent(question: str) -> str:
        replies = [
            client.post(url, json=body),
            session.post(url, json=body),
            requests.post(url, json=body, timeout=600),
        ]
        return " ".join(reply.json()["choices"][0]["message"]["content"] for reply in replies)

    async with ScriptedPolicyServer(replies=["fine"] * 3) as policy:
        endpoint = Endpoint(base_url=policy.base_url, model="m")
        answer = await agent_backend(agent).run(Question(id="1", text="", database=""), endpoint)
    assert answer.text == "fine fine fine"
    assert "127.0.0.1" in os.environ["NO_PROXY"]
