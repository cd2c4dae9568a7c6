"""The agents in a folder: those of its ``langgraph.json``, or what the text of its Python files has, of which none is
imported. An agent can be named by its project's folder.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groundwire.adapters.agents.app_environment import of_the_app
from groundwire.adapters.agents.changes import set_variable
from groundwire.adapters.agents.drivers import TEXT_NAMES
from groundwire.tools.files import read_json
from groundwire.tools.startup import env_file_variables

_log = logging.getLogger(__name__)

_FRAMEWORKS = {
    **dict.fromkeys(("langgraph", "langchain.agents", "langgraph_supervisor", "langgraph_swarm"), "LangGraph"),
    **{"deepagents": "LangGraph", "agents": "the OpenAI Agents SDK", "pydantic_ai": "Pydantic AI", "agno": "Agno"},
    **{"google.adk": "Google ADK", "strands": "Strands", "crewai": "CrewAI", "autogen_agentchat": "AutoGen"},
    **{"agent_framework": "Agent Framework", "camel": "CAMEL", "dspy": "DSPy", "haystack": "Haystack"},
    **{"smolagents": "smolagents", "llama_index": "LlamaIndex", "workflows": "LlamaIndex"},
}
"""The frameworks' names, by their packages."""
_SKIPPED = {"node_modules", "site-packages", "tests", "test", "build", "dist", "__pycache__", "runs"}
_MOST_FILES = 2000
_MAKES_AGENT = re.compile(
    r"\w*Agent|Crew|\w*Team|\w*GroupChat|Swarm|\w*Workflow|Pipeline|ReAct|ChainOfThought|compile|create_\w*agent"
    r"|create_supervisor|create_swarm"
)
"""_Names of the classes and functions of frameworks that make an agent."""
_OF_CLASSES = ("crewai.project.CrewBase", "dspy.Module", "agentlightning.LitAgent")
"""Decorators and bases of classes that are agents, beside those that make agents themselves."""
_CLIENTS = ("openai", "anthropic", "litellm", "ollama", "google.genai", "groq", "mistralai", "boto3", "instructor")
_TASK_NAMES = ("question", "task", *TEXT_NAMES)
_ANSWERS = {"answer", "completion", "prediction", "response", "output"}  # parameters of rewards
_OBJECT, _MAKER, _FUNCTION = range(3)
_FILE = "langgraph.json"


class FoundAgent(NamedTuple):
    """An agent that a folder seems to have."""

    name: str
    """As ``--agent`` takes it."""
    what: str
    """What it is, for the user: its framework, or that it is a function."""
    place: str
    """``FILE:LINE``."""


_Names = dict[str, str]
"""The full names of a module's imports, and of the functions and classes that made its variables."""


def find_agents(folder: Path) -> list[FoundAgent]:
    """The agents in ``folder``, the likeliest kind only: objects of a framework that are no part of another one, else
    functions and classes that make such an object, else functions of a question whose module calls a model.
    """
    found: list[tuple[int, str, FoundAgent]] = []
    parts: set[str] = set()
    for path in _python_files(folder):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            _log.warning("%s cannot be read, so no agent is looked for there: %s", path, error)
            continue
        for kind, name, what, node in _agents_of(tree, parts):
            place = f"{path.relative_to(folder)}"
            found.append((kind, name, FoundAgent(f"{place}:{name}", what, f"{place}:{node.lineno}")))
    whole = [entry for entry in found if entry[1] not in parts] or found
    best = min((kind for kind, _, _ in whole), default=None)
    return [agent for kind, _, agent in whole if kind == best]


def _python_files(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and name[0] != "." and not Path(place, name, "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith("test_") and (count := count + 1) <= _MOST_FILES:
                yield Path(place, name)


def _agents_of(tree: ast.Module, parts: set[str]) -> Iterator[tuple[int, str, str, ast.stmt]]:
    """The kind, the name and the framework of each agent of a module, and its statement. The names that agents are made
    of come into ``parts``.
    """
    known = _imports_of(tree)
    calls_a_model = any(_is_of(name, (*_CLIENTS, *_FRAMEWORKS)) for name in known.values())
    for statement in tree.body:
        if isinstance(statement, ast.Expr | ast.Assign):
            parts |= _added(statement.value, known)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            made_by = _maker(statement.value, known)
            known |= dict.fromkeys(names, made_by)
            if _makes_agent(made_by):
                parts |= _names_in(statement.value)
                yield from ((_OBJECT, name, f"agent of {_framework(made_by)}", statement) for name in names)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            made = _made_in(statement, known)
            if made:
                parts |= _names_in(statement) - {statement.name}
            names = [argument.arg for argument in statement.args.args]
            asks = calls_a_model and names[:1] and names[0] in _TASK_NAMES and _ANSWERS.isdisjoint(names)
            required = len(statement.args.posonlyargs) + len(names) > len(statement.args.defaults)
            if made and not required and None not in statement.args.kw_defaults:
                yield _MAKER, statement.name, f"function that makes an agent of {_framework(made)}", statement
            elif asks and not statement.decorator_list:
                yield _FUNCTION, statement.name, f"function of the {names[0]}", statement
        elif isinstance(statement, ast.ClassDef):
            marks = [_full_name(node, known) for node in (*statement.decorator_list, *statement.bases)]
            mark = next((mark for mark in marks if mark in _OF_CLASSES or _makes_agent(mark)), None)
            if mark:
                known[statement.name] = mark  # a call of the class makes an agent, too
                yield _MAKER, statement.name, f"class of {_framework(mark)}", statement


def _made_in(function: ast.FunctionDef | ast.AsyncFunctionDef, known: _Names) -> str:
    """The full name of what makes an agent in a function; empty without one. What the function returns is noted."""
    own, nodes = {**known}, list(ast.walk(function))
    for node in nodes:  # a graph that is built in steps
        if isinstance(node, ast.Assign) and (made_by := _maker(node.value, own)):
            own |= {target.id: made_by for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Return) and node.value and _makes_agent(name := _full_name(node.value, own)):
            known[function.name] = name  # a call of the function makes an agent, too
    return next((name for node in reversed(nodes) if _makes_agent(name := _maker(node, own))), "")


def _imports_of(tree: ast.Module) -> _Names:
    names = _Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _added(node: ast.AST, known: _Names) -> set[str]:
    """The names that a framework's object gets in methods such as ``builder.add_node("ask", agent)``."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    adding = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("add_")]
    to_own = [call for call in adding if _is_of(_full_name(call.func, known), (*_FRAMEWORKS,))]
    return {name for call in to_own for argument in call.args for name in _names_in(argument)}


def _full_name(node: ast.AST, known: _Names) -> str:
    """The full name of what an expression such as ``a.b.c`` means; empty if it is not known."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        else:
            node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        return ""
    root = known.get(node.id)
    return ".".join((root, *reversed(attributes))) if root else ""


def _maker(node: ast.AST, known: _Names) -> str:
    """The full name of what is called last in an expression; empty if it is no call of an imported package."""
    return _full_name(node, known) if isinstance(node, ast.Call) else ""


def _makes_agent(name: str) -> bool:
    return _is_of(name, (*_FRAMEWORKS,)) and bool(_MAKES_AGENT.fullmatch(name.rpartition(".")[2]))


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


def _framework(name: str) -> str:
    return next(
        (framework for package, framework in _FRAMEWORKS.items() if _is_of(name, (package,))), "Agent Lightning"
    )


def _names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


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
