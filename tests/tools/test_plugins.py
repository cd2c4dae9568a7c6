"""A broken plugin is named in a one-line error by every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import ROOT, run

from groundwire.tools.plugins import PluginError, Registry


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a plugin whose module cannot be imported."""
    info = tmp_path / "fancy-1.0.dist-info"
    info.mkdir()
    (tmp_path / "fancy_rewards.py").write_text("raise RuntimeError('no licence')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[groundwire]\nfancy = fancy_rewards\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("groundwire.train.run", "--trainer", "local"), 1),
        (("groundwire.train.evaluate",), 1),
        (("groundwire.train.runner", "--external-store-address", "http://127.0.0.1:9"), 1),
        (("groundwire.train.audit",), 2),  # exit code 1 of the audit means an unfit reward
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(
    command: tuple[str, ...], status: int, environment: dict[str, str]
) -> None:
    done = run("-m", *command, environment=environment)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == (
        "error: plugin 'fancy' (fancy_rewards) of the package fancy cannot be loaded: RuntimeError: no licence; repair "
        "the package, or uninstall it\n"
    )


def test_a_name_whose_module_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_domain.py").write_text("1 / 0")
    (tmp_path / "broken_builtin.py").write_text(
        "from groundwire.tools.plugins import hookimpl\n\n\n"
        "@hookimpl\ndef register_domains(register):\n    register('mine', 'broken_domain:domain')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[object] = Registry("domain", hook="register_domains", builtin="broken_builtin")
    with pytest.raises(
        PluginError, match=r"domain 'mine' \(broken_domain:domain\) cannot be loaded: ZeroDivisionError"
    ):
        registry.get("mine")


def test_a_name_of_two_packages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = "    register('mine', 'one:domain')\n    register('mine', 'other:domain')\n"
    (tmp_path / "twice_builtin.py").write_text(
        f"from groundwire.tools.plugins import hookimpl\n\n\n@hookimpl\ndef register_domains(register):\n{twice}"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[object] = Registry("domain", hook="register_domains", builtin="twice_builtin")
    with pytest.raises(PluginError, match="the domain 'mine' is registered twice, as 'one:domain' and 'other:domain'"):
        registry.names()
