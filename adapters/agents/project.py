"""An agent that is named by its project's folder, which has a ``langgraph.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from groundwire.tools.startup import read_env_file, set_variables

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
    try:
        project = json.loads(file.read_text(encoding="utf-8"))
        graphs = {
            key: graph["path"] if isinstance(graph, Mapping) else graph for key, graph in project["graphs"].items()
        }
    except FileNotFoundError:
        raise ValueError(
            f"agent {name!r} is a folder without a {_FILE}: write the agent as module:name or path/to/file.py:name"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"agent {name!r}: {file} has no graphs that can be read: {type(error).__name__}: {error}"
        ) from error
    if wanted not in graphs and (wanted or len(graphs) != 1):
        which = f"no graph {wanted!r}" if wanted else f"{len(graphs)} graphs"
        raise ValueError(f"agent {name!r}: {file} has {which}: write {place}:NAME with one of {', '.join(graphs)}")
    folder = file.parent.resolve()
    local = [folder / dependency for dependency in project.get("dependencies") or ["."]]
    roots = [path for place in local for path in (place / "src", place) if path.is_dir()]
    sys.path += [str(root) for root in roots if str(root) not in sys.path]
    variables = project.get("env") or {}
    if isinstance(variables, Mapping):
        set_variables({name: str(value) for name, value in variables.items()})
    else:
        read_env_file(folder / variables)
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
