"""A model that cannot serve the agent is refused before its weights are read."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, function_tool
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from sqlite_folder import make_folder

from groundwire import domains
from groundwire.adapters.agents.backend import agent_backend
from groundwire.rewards.spider.execution_match import spider_exec_match
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.job.model_checks import check_model
from groundwire.train.job.prepare import prepare
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.locate import read_context_length
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.factory import make_backend
from groundwire.train.verl.hydra_config import compose_for_run

VIEW = AgentView.of(domains.get("spider"), spider_exec_match)
SPIDER = VIEW.domain.load(None)
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The starter without weights."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(STARTER / name, tmp_path)
    return tmp_path


def _notes(model: Path, **settings: Any) -> list[str]:
    config = resolve("fast", **{"model": str(model), "backend": "langgraph", **settings})
    data = VIEW.domain.load(None)
    return check_model(config, model, make_backend(config), VIEW, [*data.train, *data.validation])


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("backend", ["openai-agents", "mcp"])
def test_an_agent_with_tools_needs_a_template_with_tools(model: Path, backend: str) -> None:
    assert _notes(model, backend=backend) == []
    (model / "chat_template.jinja").write_text(PLAIN)
    with pytest.raises(ConfigError, match=rf"the chat template of {re.escape(str(model))} has no tools"):
        _notes(model, backend=backend)
    assert _notes(model, backend="langgraph") == []


@tool
def look(table: str) -> str:
    """Look at a table."""
    return table


def ask(state: MessagesState) -> dict[str, Any]:
    return {"messages": []}


def _graph(with_tools: bool) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("use", ToolNode([look]) if with_tools else ask)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "use")
    graph.add_edge("use", END)
    return graph.compile()


HELPER = Agent(name="helper")


@pytest.mark.parametrize(
    ("agent", "uses_tools"),
    [
        (Agent(name="with a tool", tools=[function_tool(lambda table: table, name_override="look")]), True),
        (Agent(name="with a handoff", handoffs=[HELPER]), True),
        (HELPER, False),
        (_graph(True), True),
        (_graph(False), False),
        (lambda task: task["question"], False),
    ],
    ids=["tool", "handoff", "plain", "graph with tools", "plain graph", "function"],
)
def test_an_agent_of_the_users_is_known_to_have_tools(model: Path, agent: Any, uses_tools: bool) -> None:
    (model / "chat_template.jinja").write_text(PLAIN)
    config = resolve("fast", model=str(model), backend="custom", agent="app:agent")
    if uses_tools:
        with pytest.raises(ConfigError, match="has no tools"):
            check_model(config, model, agent_backend(agent), VIEW, [])
    assert check_model(config, model, agent_backend(agent, train_model="small"), VIEW, []) == []
    if not uses_tools:
        assert check_model(config, model, agent_backend(agent), VIEW, []) == []


def test_tools_may_be_in_another_of_several_templates(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools }}"}]
    _set(model / "tokenizer_config.json", chat_template=templates)
    assert _notes(model, backend="openai-agents") == []


def test_a_model_without_a_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template: use an instruct model"):
        _notes(model)
    config = resolve("fast", model=str(model), backend="custom", agent="app:agent")
    [note] = check_model(config, model, agent_backend(lambda task: task["question"]), VIEW, [])
    assert "only completions of plain prompts work" in note  # an agent of the user's may have only these


@pytest.mark.parametrize("backend", ["langgraph", "openai-agents"])
def test_a_broken_template_is_refused_before_the_start(model: Path, backend: str) -> None:
    (model / "chat_template.jinja").write_text("{% fxr message in messages %}{{ tools }}")
    with pytest.raises(ConfigError, match=r"cannot write one message of a user: Encountered unknown tag 'fxr'"):
        _notes(model, backend=backend)
    (model / "chat_template.jinja").write_text("{{ messages[0].role == 'system' or raise_exception('no system') }}")
    assert _notes(model, backend="langgraph") == []  # agents send a system message


def test_prompts_that_are_all_too_long_are_refused_and_some_are_a_note(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"to \d+ tokens, and it has 60; raise max_model_len, or lower"):
        _notes(model, max_model_len=60)
    (note,) = _notes(model, max_model_len=120)
    assert re.match(r"prompts: [\d,]+ of [\d,]+ tasks have a prompt of 120 tokens or more \(at most \d+\)", note)
    _set(model / "config.json", max_position_embeddings=60)
    with pytest.raises(ConfigError, match="and it has 60; use a model with a longer context"):
        _notes(model)


def test_schemas_that_are_cut_are_one_note(model: Path, recwarn: pytest.WarningsRecorder) -> None:
    databases = len({task["db_id"] for part in (SPIDER.train, SPIDER.validation) for task in part})
    [note] = _notes(model, agent_options={"table_info_truncate": 333})
    found = re.match(r"schemas: the prompts leave out tables of (\d+) of (\d+) databases", note)
    assert found
    assert 0 < int(found[1]) < int(found[2]) == databases
    assert not recwarn.list


def test_a_schema_of_which_a_part_cannot_be_read_is_a_note(model: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "data")
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript("CREATE TABLE t (a); CREATE VIEW v AS SELECT a FROM t; DROP TABLE t")
    view = AgentView.of(domains.get("sqlite"), spider_exec_match)
    config = resolve("fast", model=str(model), backend="langgraph")
    [note] = check_model(config, model, make_backend(config), view, view.domain.load(str(folder)).train)
    assert note.startswith("schemas: parts of 1 of ")
    assert note.endswith("shop.sqlite: cannot be used: v (no such table: main.t)")


def test_the_prompts_are_those_of_the_run(model: Path) -> None:
    long = {"system": "{table_info}" + "word " * 200}
    with pytest.raises(ConfigError, match="the prompts are longer than the model's context"):
        _notes(model, prompts=long, max_model_len=200)


def test_verl_is_given_no_more_than_the_model_has(model: Path) -> None:
    config = resolve("starter", trainer="verl", model=str(model), max_model_len=5000)
    with pytest.raises(ConfigError, match=r"max_model_len is 5000, but .* has 4096 positions: give at most 4096"):
        compose_for_run(config, domains.get("spider").load(None), "RUN_DIR")
    assert read_context_length(model) == 4096
    _set(model / "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0})  # its length before scaling
    assert read_context_length(model) is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(model: Path, name: str) -> None:
    (model / name).write_text("[1")
    with pytest.raises(ConfigError, match=re.escape(name)):
        _notes(model)


def test_a_run_is_checked_before_the_weights_are_read(model: Path) -> None:
    config = resolve("fast", model=str(model), backend="langgraph", max_model_len=60)
    with pytest.raises(ConfigError, match="the prompts are longer"):  # not: the weights cannot be read
        prepare(config)
