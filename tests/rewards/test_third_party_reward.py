"""A third party's reward is one function and one entry point: the package of CONTRIBUTING.md, installed."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from programs import ROOT, run

PAGE = ROOT / "CONTRIBUTING.md"


def _shown() -> tuple[str, str]:
    """The entry point and the module in CONTRIBUTING.md."""
    section = PAGE.read_text(encoding="utf-8").partition("## A backend, a reward or a domain")[2].partition("\n## ")[0]
    [project] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    [module] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return project, module


def _wheel(folder: Path) -> Path:
    """The two files as a wheel, built without a build tool."""
    project, module = _shown()
    [entry_points] = re.findall(r"\[project\.entry-points\.(\w+)\]\n(\w+) = \"([\w.:]+)\"", project)
    info = "concise-1.0.dist-info"
    files = {
        "my_package/plugin.py": module,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: concise\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[{}]\n{} = {}\n".format(*entry_points),
    }
    digests = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    lines = [f"{name},sha256={base64.urlsafe_b64encode(d).rstrip(b'=').decode()}," for name, d in digests.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    wheel = folder / "concise-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the package installed."""
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(_wheel(folder))], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}


def test_an_installed_reward_scores_by_its_name_alone_and_in_a_sum(environment: dict[str, str]) -> None:
    code = """
import asyncio
from groundwire import rewards
for name in ("short_answer", "0.5*executes+0.5*short_answer"):
    print([rewards.total(asyncio.run(rewards.get(name)({}, answer, []))) for answer in ("short", "long " * 20)])
"""
    done = run("-c", code, environment=environment)
    assert done.stdout.splitlines() == ["[1.0, 0.0]", "[0.5, 0.0]"], done.stderr


def test_a_run_finds_the_reward_only_where_it_is_installed(environment: dict[str, str]) -> None:
    command = ("-m", "train.run", "--reward", "0.9*spider_exec_match+0.1*short_answer", "--print-config")
    done = run(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    assert '"reward": "0.9*spider_exec_match+0.1*short_answer"' in done.stdout
    done = run(*command, environment=dict(os.environ))
    assert done.returncode == 2
    assert "error: unknown reward 'short_answer'; known: bird_" in done.stderr
    assert ", executes, " in done.stderr
