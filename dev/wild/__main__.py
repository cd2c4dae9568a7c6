"""Runs public agents as their authors wrote them against a scripted model, and writes docs/wild.md: ``make wild``.

Each agent of ``agents.toml`` runs with ``--dev`` in the folder of its project and in its environment, which ``make
environments`` makes. The calls that the run recorded are compared with those that the model's server got. Nothing is
fetched: an agent whose project or environment is not there is not run. Results of agents that are not named stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dev.environments import ROOT, write_table
from dev.wild.model import reply
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer, text_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
_PAGE, _RESULTS, _LOGS = ROOT / "docs" / "wild.md", ROOT / "docs" / "wild.json", ROOT / "build" / "wild"
_START, _END = "<!-- agents -->\n", "<!-- end of agents -->"
_PROBE = "Say hello."
_LIMIT_S = 600
_ROLLOUT = re.compile(r"^\W*(\S+): (\w+), reward (\S+)", re.MULTILINE)
_PLACE = re.compile(r"\b(OWN|ENV|NOTEBOOK)\b")
_CALL = re.compile(r"^call \d+.*", re.MULTILINE)
_REFUSED = "(failed with status 4"  # by the proxy: it does not reach the server


def main() -> int:
    """Run the agents; the exit status is the number of those that ran and are not right."""
    agents = {agent["name"]: agent for agent in tomllib.loads((_HERE / "agents.toml").read_text())["agent"]}
    parser = argparse.ArgumentParser(prog="make wild", description=__doc__)
    parser.add_argument("projects", type=Path, help="the folder with the checkouts of the projects")
    parser.add_argument("names", nargs="*", metavar="AGENT", help=f"of {', '.join(agents)}; default: all")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".environments", help="the folder of make environments"
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="agents that run at the same time")
    options = parser.parse_intermixed_args()
    if unknown := sorted(set(options.names) - agents.keys()):
        parser.error(f"no agent {unknown[0]!r}; known: {', '.join(agents)}")
    _LOGS.mkdir(parents=True, exist_ok=True)
    projects, environments = options.projects.resolve(), options.environments.absolute()
    names = options.names or list(agents)
    wrong = 0
    with ThreadPoolExecutor(options.at_once) as threads:
        for result in threads.map(lambda name: asyncio.run(_run(agents[name], projects, environments)), names):
            results = {**_results(), result["name"]: result}
            wrong += result["outcome"] != "works"
            print(
                f"{result['name']}: {_counts(result)} calls, {result['outcome']}, {result['seconds']:.0f} s", flush=True
            )
            _RESULTS.write_text(
                json.dumps({name: results[name] for name in agents if name in results}, indent=2) + "\n"
            )
    write_table(_PAGE, _START, _END, table(agents, _results()))
    return wrong


def _results() -> dict[str, Any]:
    return json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}


async def _run(agent: dict[str, Any], projects: Path, environments: Path) -> dict[str, Any]:
    """The result of one agent."""
    started = time.monotonic()
    folder = projects / agent["project"] / agent.get("folder", ".") if "project" in agent else _HERE / "own"
    python = environments / agent.get("environment", "") / "bin" / "python"
    needed = (folder, python) if "environment" in agent else (folder,)
    result = {"name": agent["name"], "recorded": 0, "server": 0, "rollouts": "", "seconds": 0.0}
    if missing := next(
        (_short(path, projects, environments) for path in needed if not path.exists()), ""
    ) or _missing_program(agent):
        return {**result, "outcome": f"not run: there is no {missing}"}
    with tempfile.TemporaryDirectory() as own:
        async with ScriptedPolicyServer((), model="competent") as server:
            server.replies = partial(reply, url=f"{server.base_url}/models")
            command = [sys.executable, "-m", "groundwire.train.cli.app", "run", "--dev", "--model", "competent"]
            command += ["--base-url", server.base_url, "--domain", str(_HERE / "tasks" / f"{agent['tasks']}.jsonl")]
            command += ["--reward", f"{_HERE / 'reward.py'}:contains", "--output-dir", own]
            options = shlex.split(agent["options"])
            if "command" not in options:
                command += ["--runner-python", str(python)]
            if "notebook" in agent:
                await asyncio.to_thread(_write_module, folder / agent["notebook"], Path(own, "notebook.py"))
            places = {"OWN": str(_HERE / "own"), "ENV": str(python.parents[1]), "NOTEBOOK": f"{own}/notebook.py"}
            command += [_PLACE.sub(lambda match: places[match[0]], option) for option in options]
            output, code = await _output(command, folder, {**_variables(agent), "HOME": own})
            calls = [body for body in server.requests if text_of(body["messages"][-1]) != _PROBE]
    log = _LOGS / f"{agent['name']}.txt"
    await asyncio.to_thread(log.write_text, f"{shlex.join(command)}\n\n{output}")
    rollouts = _ROLLOUT.findall(output)
    succeeded = sum(status == "succeeded" for _, status, _ in rollouts)
    lines = _CALL.findall(output)
    refused = sum(_REFUSED in line for line in lines)
    result["version"] = await asyncio.to_thread(_version, python, folder, agent)
    result |= {
        "recorded": len(lines) - refused,
        "refused": refused,
        "server": len(calls),
        "rollouts": f"{succeeded} of {len(rollouts)}",
    }
    result["outcome"] = _outcome(result, succeeded == len(rollouts), code, output)
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _short(path: Path, *folders: Path) -> str:
    """A path without the folder of the projects or of the environments."""
    return next((str(path.relative_to(folder)) for folder in folders if path.is_relative_to(folder)), str(path))


def _write_module(notebook: Path, module: Path) -> None:
    """The code of a notebook, as nbconvert writes it."""
    cells = [cell["source"] for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    module.write_text("\n\n".join("".join(line for line in cell if line[0] not in "!%") for cell in cells))


def _version(python: Path, folder: Path, agent: dict[str, Any]) -> str:
    """The framework's package and its version: the first package of the environment, or one of Node's."""
    if "environment" not in agent:
        files = (parent / "node_modules" / agent["package"] / "package.json" for parent in (folder, *folder.parents))
        return f"{agent['package']} {json.loads(next(filter(Path.exists, files)).read_text())['version']}"
    environments = tomllib.loads((ROOT / "dev" / "environments.toml").read_text())
    name = re.split(r"\W*[<\[]", environments[agent["environment"]]["packages"][0])[0]
    code = f"from importlib.metadata import version; print({name!r}, version({name!r}))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True, text=True).stdout.strip()


def _missing_program(agent: dict[str, Any]) -> str:
    return next((name for name in agent.get("programs", ()) if shutil.which(name) is None), "")


def _variables(agent: dict[str, Any]) -> dict[str, str]:
    """The environment of the command: no key of a provider, and the clone's code in place of the wheel's."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))}
    paths = [str(ROOT / "src"), *agent.get("path", ())]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **agent.get("variables", {})}


async def _output(command: list[str], folder: Path, variables: dict[str, str]) -> tuple[str, int | None]:
    pipe, same = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    program = await asyncio.create_subprocess_exec(*command, cwd=folder, env=variables, stdout=pipe, stderr=same)
    try:
        output, _ = await asyncio.wait_for(program.communicate(), _LIMIT_S)
    except asyncio.TimeoutError:
        program.terminate()
        return f"error: not ended after {_LIMIT_S} s", None
    return output.decode(errors="replace"), program.returncode


def _outcome(result: dict[str, Any], all_succeeded: bool, code: int | None, output: str) -> str:
    errors = [line for line in output.splitlines() if re.match("error: |.*No such option", line)]
    if not result["server"]:
        return errors[-1].strip("│ ") if errors else "no call"
    if result["recorded"] != result["server"]:
        return "not every call is recorded"
    if not all_succeeded:
        return "a rollout fails"
    _, _, verdict = output.partition("verdict: training cannot work\n")
    return "works" if code == 0 else [*errors, *verdict.splitlines(), f"exit code {code}"][0]


def _counts(result: dict[str, Any]) -> str:
    refused = f" and {result['refused']} refused" if result.get("refused") else ""
    return f"{result['recorded']}{refused} / {result['server']}"


def table(agents: dict[str, Any], results: dict[str, Any]) -> str:
    """The agents that were run, and what is wrong with those that do not work."""
    known = [(agents[name], results[name]) for name in agents if name in results]
    works = [result for _, result in known if result["outcome"] == "works"]
    rollouts = sum(int(result["rollouts"].split()[0]) for result in works)
    lines = [
        f"{len(works)} of {len(known)} work: their {rollouts} rollouts succeeded, and all of the "
        f"{sum(result['server'] for result in works)} calls that the server got were recorded.\n",
        *(_wrong(agent, result) for agent, result in known if result["outcome"] != "works"),
        *(_row(agent, result) for agent, result in known),
    ]
    return "\n".join(lines)


def _wrong(agent: dict[str, Any], result: dict[str, Any]) -> str:
    reason = ". ".join(filter(None, (result["outcome"].partition("; ")[0], agent.get("remark"))))
    return f"**{agent['title']}** (calls recorded / of the server: {_counts(result)}): {' '.join(reason.split())}.\n"


def _row(agent: dict[str, Any], result: dict[str, Any]) -> str:
    place = (
        "/".join(agent[name] for name in ("project", "folder") if name in agent) or f"{agent['title']} (dev/wild/own)"
    )
    variables = "".join(f"{name}={value} " for name, value in agent.get("variables", {}).items())
    options = variables + " ".join(agent["options"].split())
    return f"- {place}: `{options}`"


if __name__ == "__main__":
    sys.exit(main())
