"""An install adds the one package ``groundwire``; a user's own folders of the same names live beside it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import ROOT, run

FOLDERS = ("adapters", "domains", "rewards", "tools", "train")


def _build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(shared_folder: Callable[..., Path]) -> Path:
    return next(shared_folder("wheel", lambda folder: _build("wheel", folder)).glob("*.whl"))


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, shared_folder: Callable[..., Path], wheel: Path) -> Path:
    """The Python of an environment in which groundwire is installed; its dependencies are those of this one."""

    def fill(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        python = folder / "venv" / "bin" / "python"
        package = wheel if request.param == "wheel" else _build("wheel:editable", folder)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(package)]
        subprocess.run(install, check=True, capture_output=True)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # A path in a .pth file is not searched for .pth files: the editable install in this environment stays out.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    return shared_folder(f"installed_{request.param}", fill) / "venv" / "bin" / "python"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The folder of a user whose agent has modules of the same names as the folders of this repository."""
    for name in ("tools", "rewards"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    for name in ("train", "adapters", "domains"):
        (tmp_path / f"{name}.py").write_text(
            "OWNER = 'user'\n\nif __name__ == '__main__':\n    print('train.py ran')\n"
        )
    (tmp_path / "my_app.py").write_text(
        "import adapters, domains, rewards, tools, train\n"
        "assert {adapters.OWNER, domains.OWNER, rewards.OWNER, tools.OWNER, train.OWNER} == {'user'}\n"
        "async def answer(question, endpoint): ...\n"
    )
    return tmp_path


def _run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], check=False, cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_wheel_holds_one_package_with_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"groundwire"}
    for file in (
        "py.typed",
        "train/policy/starter/model.safetensors",
        "domains/spider/bundled/generated_train.parquet",
        "domains/medical/bundled/medical.sqlite",
    ):
        assert f"groundwire/{file}" in names
    assert any(name.endswith(".sqlite") for name in names)
    assert not [name for name in names if re.search(r"/generate/|/pretrain/|^groundwire/dev/", name)]


def test_a_users_own_folders_of_the_same_names_are_left_alone(python: Path, app: Path) -> None:
    arguments = ("run", "--backend", "custom", "--agent", "my_app:answer", "--trainer", "local", "--print-config")
    assert "my_app:answer" in _run(python.with_name("groundwire"), *arguments, folder=app).stdout
    assert "groundwire 0." in _run(python, "-m", "groundwire.train.run", "--version", folder=app).stdout
    assert _run(python, "-m", "train", folder=app).stdout == "train.py ran\n"
    _run(python, "-c", "from groundwire.tools.plugins import hookimpl; import my_app", folder=app)


def test_the_repositorys_folders_are_no_modules_of_their_own(python: Path, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; print([name for name in {FOLDERS} if find_spec(name)])"
    assert _run(python, "-c", code, folder=tmp_path).stdout == "[]\n"
    assert "--database" in _run(python.with_name("groundwire"), "mcp-sql", "--help", folder=tmp_path).stdout


def test_the_printed_command_of_a_runner_runs_where_the_package_is_installed(python: Path, app: Path) -> None:
    code = "from groundwire.train.config.run_config import RunConfig; import sys; print(RunConfig(backend='custom', "
    code += "agent='my_app:answer', n_runners=0, external_store_address='http://127.0.0.1:9').runner_command())"
    name, *options = shlex.split(_run(python, "-c", code, folder=app).stdout)
    command = [python.with_name(name), *options, "--store-wait-s", "0"]
    done = subprocess.run(command, check=False, cwd=app, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: no store answers at http://127.0.0.1:9"), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("train.run", "--dev", "--trainer", "local", "--agent-option", "max_turns=1", "max_tokens=8"),
        ("train.store", "--help"),
        ("train.report", "--help"),
        ("tools.mcp_sql", "--help"),
        ("domains.spider.prepare", "--help"),
    ],
    ids=lambda command: command[0],
)
def test_in_a_clone_no_definition_is_loaded_twice(command: tuple[str, ...], tmp_path: Path) -> None:
    program, folders = tmp_path / "program.py", tuple(f"{ROOT / name}{os.sep}" for name in FOLDERS)
    program.write_text(f"""
import os, runpy, sys
from pathlib import Path

def report():
    loaded = {{}}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or file.startswith(sys.prefix) or name == "__mp_main__":
            continue
        if os.path.realpath(file).startswith({folders!r}):
            loaded.setdefault(os.path.realpath(file), []).append(name)
    Path({str(tmp_path / "twice")!r}).write_text("\\n".join(file for file, names in loaded.items() if len(names) > 1))

os.chdir({str(ROOT)!r})
sys.path[0] = {str(ROOT)!r}
sys.argv[1:] = {list(command[1:])!r}
try:
    runpy.run_module({command[0]!r}, run_name="__main__", alter_sys=True)
finally:
    report()
""")
    done = run(str(program), environment={**os.environ, "SPIDER_DATA_DIR": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    twice = (tmp_path / "twice").read_text().split()
    assert twice  # the package's own, which Python imports first
    for file in twice:
        assert Path(file).name == "__init__.py"
        defined = [
            node for node in ast.parse(Path(file).read_text()).body if not isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = [ast.unparse(node.targets[0]) for node in defined if isinstance(node, ast.Assign)]
        assert names in ([], ["__all__"]), f"{file} defines {names}"
        assert not [node for node in defined if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def test_the_base_and_the_runner_are_imported_without_modules_of_unix() -> None:
    """As on Windows, which lacks these, and in an agent's environment, which lacks the trainer's packages."""
    program = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys("fcntl resource termios pwd grp pty torch transformers litellm".split()))
import groundwire.train.runner, groundwire.train.cli.app, groundwire.train.init
from groundwire import adapters, domains, rewards, tools
for package in (adapters, domains, rewards, tools):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and "python_programs" not in module.name:
            importlib.import_module(module.name)
"""
    done = run("-c", program, environment={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr[-2000:]


def test_workflows_pin_their_actions_to_commits() -> None:
    used = re.findall(r"uses: (.*)", "".join(file.read_text() for file in (ROOT / ".github" / "workflows").iterdir()))
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_init_installs_the_base_from_where_the_program_was_installed_from(python: Path, tmp_path: Path) -> None:
    program = "from groundwire.train.init import _installed_from; print(_installed_from())"
    command = [str(python), "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env={}, text=True, capture_output=True, check=True)
    assert done.stdout.startswith("groundwire @ file://")
