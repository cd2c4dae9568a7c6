"""The commands of the published tutorials do what their readers expect, or name the equivalent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from spider_folder import make_spider
from typer.testing import CliRunner

from groundwire.tools.env_file import read_env_file
from groundwire.tools.errors import CommandError
from groundwire.train import run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SPIDER_DATA_DIR", "VERL_SPIDER_DATA_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def configured(*arguments: str) -> str:
    """What ``train.run ... --print-config`` prints, its notes first."""
    result = CliRunner().invoke(run.app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.output
    return result.stderr + result.stdout


def refused(*arguments: str) -> str:
    """The one-line error of ``train.run``."""
    result = CliRunner().invoke(run.app, [*arguments, "--print-config"])
    assert result.exit_code != 0, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_an_env_file_names_the_folder_with_spider(tmp_path: Path) -> None:
    make_spider(tmp_path / "data")
    Path(".env").write_text("# the tutorial's\nexport VERL_SPIDER_DATA_DIR='data'\n")
    assert configured().startswith("data: VERL_SPIDER_DATA_DIR data: train 1 tasks")


def test_the_environment_wins_over_an_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUNDWIRE_TEST_ONE", "mine")
    monkeypatch.setenv("GROUNDWIRE_TEST_TWO", "")
    monkeypatch.delenv("GROUNDWIRE_TEST_TWO")
    Path(".env").write_text("GROUNDWIRE_TEST_ONE=file\nGROUNDWIRE_TEST_TWO=file\n")
    read_env_file()
    assert [os.environ[f"GROUNDWIRE_TEST_{name}"] for name in ("ONE", "TWO")] == ["mine", "file"]
    Path(".env").write_bytes(b"KEY=\xff\n")
    with pytest.raises(CommandError, match="save it as UTF-8"):
        read_env_file()
