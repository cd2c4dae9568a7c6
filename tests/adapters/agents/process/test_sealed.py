"""A sealed rollout reaches its model, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_agents import Agents, Server, texts

from groundwire.adapters.agents.process.folders import NEW_NETWORK, enter, succeeds
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts.factory import make_backend

SEALED = """
    import json, os, socket, urllib.request
    made_at_import = os.environ["OPENAI_BASE_URL"]
    def ask(url, question):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": question}]}).encode()
        with urllib.request.urlopen(f"{url}/chat/completions", body) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    def agent(question, port):
        answers = [ask(url, question) for url in (made_at_import, os.environ["OPENAI_BASE_URL"])]
        for address in (("127.0.0.1", int(port)), ("10.1.2.3", 443)):
            try:
                socket.create_connection(address, 5)
            except OSError as error:
                answers.append(type(error).__name__)
        return " ".join(answers)
"""


async def test_a_sealed_rollout_reaches_its_model_and_nothing_else(agent: Agents, server: Server) -> None:
    if not succeeds(lambda: enter(NEW_NETWORK)):
        pytest.skip("the system does not allow network namespaces")
    source = SEALED.replace("question, port", "question").replace("port)", f"{server.url.rpartition(':')[2]})")
    answers = texts(await agent(source, "a", "b", sealed=True))
    assert answers == [f"re: {text} re: {text} ConnectionRefusedError OSError" for text in "ab"]
    assert sorted(set(server.paths)) == [f"/rollout/r{number}/attempt/a/v1/chat/completions" for number in range(2)]


def test_sealed_is_refused_where_the_system_does_not_allow_it(agent: Agents, tmp_path: Path) -> None:
    (tmp_path / "system.py").write_text(
        "import sys\ndef forbid():\n    sys.modules['__main__'].enter = lambda kind: False"
    )
    with pytest.raises(ValueError, match="sealed needs network namespaces, which this system does not allow"):
        agent.backend("def agent(question): ...", sealed=True, setup=f"{tmp_path / 'system.py'}:forbid")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"agent": "true", "backend": "command"},
        {"agent": "own_agents:answer", "backend": "custom", "rollout_process": "off"},
        {"agent": "own_agents:answer", "backend": "custom", "rollout_process": "spawn"},
        {"agent": "own_agents:answer", "backend": "custom", "train_model": "gpt"},
    ],
)
def test_what_has_no_forked_process_cannot_be_sealed(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="sealed closes the network of forked processes"):
        make_backend(resolve("fast", **settings, sealed=True))


@pytest.mark.parametrize("settings", [{}, {"agent": "own_agents:answer", "rollout_process": "off"}])
def test_a_folder_of_its_own_is_refused_where_rollouts_have_no_process(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="agent_folder is for rollouts in processes of their own"):
        make_backend(resolve("fast", **settings, agent_folder="empty"))
