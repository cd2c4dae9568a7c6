"""An agent that is named by its project's folder: that of its ``langgraph.json``, or the one that its files have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.app_environment import of_the_app
from groundwire.adapters.agents.changes import set_variable
from groundwire.adapters.agents.discovery import FoundAgent, find_agents
from groundwire.tools.files import read_json
from groundwire.tools.startup import env_file_variables

_FILE = "langgraph.json"


def agent_of_project(name: str) -> str:
    """The agent that ``name`` means, as ``file.py:name``, if it is a folder (``.``), ``.:graph`` or a langgraph.json.

    The project's dependencies come onto the path, its variables into the environment. Any other name stays as it is.
    Raises ``ValueError``.
    """
    place, _, wanted = (name, "", "") if Path(name).exists() else name.rpartition(":")
    file = Path(place) if place.endswith(_FILE) else Path(place, _FILE)
    if not place or not (file.is_file() or (Path(place).is_dir() and not wanted)):
        return name
    if not file.is_file():
        return _only_agent(Path(place), name)
    project, graphs = _read(file, name)
    if wanted not in graphs and (wanted or len(graphs) != 1):
        which = f"no graph {wanted!r}" if wanted else f"{len(graphs)} graphs"
        raise ValueError(f"agent {name!r}: {file} has {which}: write {place}:NAME with one of {', '.join(graphs)}")
    folder = file.parent.resolve()
    local = [folder / dependency for dependency in project.get("dependencies") or ["."]]
    roots = [path for place in local for path in (place / "src", place) if path.is_dir()]
    sys.path += [str(root) for root in roots if str(root) not in sys.path]
    variables = project.get("env") or {}
    if not isinstance(variables, Mapping):
        variables = env_file_variables(folder / str(variables), os.environ)
    for variable, value in of_the_app(variables).items():
        if os.environ.get(variable) in (None, "", "none"):  # a placeholder for a key is none
            set_variable(variable, str(value))
    path, _, attribute = graphs[wanted or next(iter(graphs))].rpartition(":")
    return f"{_module(folder / path, roots) if path.endswith('.py') else path}:{attribute}"


def _module(path: Path, roots: Sequence[Path]) -> str:
    """The name of the module in a file, if it is one of a package in ``roots``; else the path."""
    for root in roots:
        if path.is_relative_to(root):
            *packages, _ = path.relative_to(root).parts
            folders = [root.joinpath(*packages[: count + 1]) for count in range(len(packages))]
            if packages and all((package / "__init__.py").is_file() for package in folders):
                return ".".join((*packages, path.stem))
    return str(path)


def agents_of(folder: Path) -> list[FoundAgent]:
    """The agents in ``folder``: the graphs of its langgraph.json, else what its files have. Raises ``ValueError``."""
    file = folder / _FILE
    if not file.is_file():
        return find_agents(folder)
    graphs = _read(file, str(folder))[1]
    return [
        FoundAgent("." if len(graphs) == 1 else f".:{graph}", f"graph {graph} of {_FILE}", path)
        for graph, path in graphs.items()
    ]


def _only_agent(folder: Path, name: str) -> str:
    found = find_agents(folder)
    if len(found) != 1:
        has = f"has several agents: {', '.join(agent.name for agent in found)}" if found else "seems to have no agent"
        raise ValueError(
            f"agent {name!r}: the folder {has}; write the one to run as module:name or path/to/file.py:name"
        )
    return str(folder / found[0].name)


def _read(file: Path, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What a langgraph.json says, and the places of its graphs by their names. Raises ``ValueError``."""
    try:
        project = read_json(file, unique=True)
        graphs = project["graphs"].items()
        return project, {key: graph["path"] if isinstance(graph, Mapping) else graph for key, graph in graphs}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"agent {name!r}: {file} has no graphs that can be read: {type(error).__name__}: {error}"
        ) from error
