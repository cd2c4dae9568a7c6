"""An agent's process gets what programs need of our environment, and no key that is not named or in the app's .env."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from process_agents import Agents, texts

from groundwire.adapters import AgentError, Endpoint, Question
from groundwire.adapters.agents.app_environment import DEFAULTS, agent_environment, provider_urls
from groundwire.adapters.agents.command import CommandBackend
from groundwire.adapters.agents.process.backend import ProcessBackend
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.rollouts.factory import make_backend

KEYS = (
    *("GROUNDWIRE_TOKEN", "GROUNDWIRE_JUDGE_API_KEY", "GROUNDWIRE_MONGO_URI", "MCP_SQL_TOKEN", "WANDB_API_KEY"),
    *("SWANLAB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "TAVILY_API_KEY", "DATABASE_URL"),
    *("SSH_AUTH_SOCK", "OTEL_EXPORTER_OTLP_HEADERS", "anything_else"),
)
PROGRAM = "import json, os; print(json.dumps(dict(os.environ)))"
AGENT = f"""
    import json, os, subprocess, sys
    AT_IMPORT = dict(os.environ)
    def agent(question):
        started = subprocess.run([sys.executable, "-c", {PROGRAM!r}], capture_output=True, text=True).stdout
        return json.dumps([AT_IMPORT, dict(os.environ), json.loads(started)])
"""


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DEFAULTS, *provider_urls("")):
        monkeypatch.delenv(name, raising=False)
    for name in KEYS:
        monkeypatch.setenv(name, f"secret of {name}")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    monkeypatch.setenv("SSL_CERT_FILE", "/certificates")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _check(environment: dict[str, str], *allowed: str) -> None:
    assert {name for name, value in environment.items() if "secret of" in value} == set(allowed)
    for name in ("PATH", "LC_TIME", "SSL_CERT_FILE", "CUDA_VISIBLE_DEVICES"):
        assert environment[name] == os.environ[name]


@pytest.mark.parametrize("fork", [True, False])
async def test_an_agent_and_what_it_starts_get_no_key_in_either_way(agent: Agents, tmp_path: Path, fork: bool) -> None:
    (tmp_path / ".env").write_text(
        "TAVILY_API_KEY=of-the-app\nTAKEN=${GROUNDWIRE_TOKEN}\nOWN=of-the-app\nLD_PRELOAD=/evil.so\nPYTHONSTARTUP=evil.py\nHF_TOKEN=x\n"
    )
    environments = json.loads(texts(await agent(AGENT, "a", fork=fork))[0])
    for environment in environments:
        _check(environment)
        assert (environment["TAVILY_API_KEY"], environment["OWN"]) == ("of-the-app", "of-the-app")
        assert (environment["OPENAI_API_KEY"], environment["HF_TOKEN"]) == ("none", "hf_none")
        assert not {"LD_PRELOAD", "PYTHONSTARTUP"} & environment.keys()


async def test_a_named_variable_reaches_the_agent_and_the_keys_of_its_own_providers_with_train_model(
    agent: Agents,
) -> None:
    (answer,) = await agent(AGENT, "a", env=["DATABASE_URL", "TAVILY_API_KEY"])
    for environment in json.loads(texts([answer])[0]):
        _check(environment, "DATABASE_URL", "TAVILY_API_KEY")
    (answer,) = await agent(AGENT + "\n", "a", spec={"train_model": "policy"})
    for environment in json.loads(texts([answer])[0]):
        _check(environment, "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")


async def test_a_program_gets_no_key_but_those_that_are_named_or_in_the_env_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(
        "OWN=of-the-app\nPATH=/evil\nGROUNDWIRE_JUDGE_API_KEY=secret of the file\n"
        "TAKEN=${GROUNDWIRE_TOKEN}${OPENAI_API_KEY}\nMADE=${OWN}:${HOME}\n"
    )
    command = shlex.join([sys.executable, "-c", PROGRAM])
    question, endpoint = Question(id="1", text="a", database=""), Endpoint(base_url="", model="m")
    backend = CommandBackend(agent=command, agent_env=["DATABASE_URL"])
    environment = json.loads((await backend.run(question, endpoint)).text)
    _check(environment, "DATABASE_URL")
    assert environment["OWN"] == "of-the-app"
    assert (environment["TAKEN"], environment["MADE"]) == ("", f"of-the-app:{Path.home()}")
    assert backend.environment_note.startswith("its processes do not get TAVILY_API_KEY (what")
    with pytest.raises(AgentError, match=r"KeyError: 'SSH_AUTH_SOCK'.*agents do not get SSH_AUTH_SOCK of this"):
        await CommandBackend(
            agent=shlex.join([sys.executable, "-c", "import os; os.environ['SSH_AUTH_SOCK']"]),
        ).run(question, endpoint)


def test_a_failure_names_the_hidden_variables_that_it_may_be_about(tmp_path: Path) -> None:
    (tmp_path / "at_import.py").write_text("import os\nKEY = os.environ['TAVILY_API_KEY']\ndef agent(q): return q\n")
    with pytest.raises(ValueError, match=r"agents do not get TAVILY_API_KEY of this .*--agent-env NAME"):
        ProcessBackend({"agent": f"{tmp_path}/at_import.py:agent"})


async def test_a_rollout_that_lacks_a_key_says_which_are_hidden(agent: Agents) -> None:
    named = "import os\ndef agent(question):\n    return os.environ['DATABASE_URL']"
    (failure,) = await agent(named, "a")
    assert "KeyError: 'DATABASE_URL' (before any LLM call); agents do not get DATABASE_URL of this" in str(failure)
    unnamed = "def agent(question):\n    raise RuntimeError('No API key provided')"
    (failure,) = await agent(unnamed, "a")
    assert "TAVILY_API_KEY" in str(failure)
    assert "GROUNDWIRE" not in str(failure)
    other = "def agent(question):\n    raise RuntimeError('an apple')"
    (failure,) = await agent(other, "a")
    assert "agents do not get" not in str(failure)


@pytest.mark.parametrize("fork", [True, False])
async def test_what_an_agent_asks_for_in_vain_is_said_once(
    agent: Agents, caplog: pytest.LogCaptureFixture, fork: bool
) -> None:
    source = """
        import os
        URL = os.getenv("DATABASE_URL", "default")
        def agent(question):
            if "anything_else" not in os.environ and os.environ.get("OPENAI_API_KEY") == "none":
                return URL
            raise RuntimeError("never")
    """
    assert texts(await agent(source, "a", "b", fork=fork)) == ["default", "default"]
    (backend,) = agent.backends.values()
    assert backend.environment_note.startswith("it asked for DATABASE_URL of this environment, which agents do not get")
    assert [message.partition(" of ")[0] for message in caplog.messages] == ["agent: it asked for anything_else"]


def test_only_variables_that_are_set_and_not_ours_can_be_named() -> None:
    with pytest.raises(ValueError, match="agent_env names NOT_SET, which is not set"):
        agent_environment(["NOT_SET"])
    with pytest.raises(ValueError, match="agent_env names GROUNDWIRE_TOKEN, which is for groundwire itself"):
        agent_environment(["GROUNDWIRE_TOKEN"])


@pytest.mark.parametrize("settings", [{"rollout_process": "off", "agent": "json:dumps"}, {}])
def test_names_without_a_process_of_the_agent_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="agent_env is for rollouts in processes of their own"):
        make_backend(AgentSettings(**settings, agent_env="DATABASE_URL"))


def test_an_agent_in_our_process_is_said_to_see_its_environment(tmp_path: Path) -> None:
    (tmp_path / "in_our_process.py").write_text("def agent(question): return ''\n")
    settings: dict[str, Any] = {"backend": "custom", "agent": f"{tmp_path}/in_our_process.py:agent"}
    backend = make_backend(AgentSettings(**settings, rollout_process="off"))
    assert backend.environment_note.startswith("it runs in this process, where it can read ")
    assert not make_backend(AgentSettings(**settings)).environment_note
