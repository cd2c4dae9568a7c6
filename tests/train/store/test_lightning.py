"""Agent Lightning is imported for its own agents only: its import takes seconds and hundreds of megabytes."""

from __future__ import annotations

from pathlib import Path

from programs import run


def test_trainer_runner_and_stores_do_not_import_agent_lightning(tmp_path: Path) -> None:
    script = tmp_path / "imported.py"
    script.write_text("import sys, fork_server\nprint(*(fork_server.MODULES_OF_A_RUN or sys.modules))")
    imported = run(str(script)).stdout.split()  # in a process that has imported all that a run needs
    parts = {"train.local.trainer", "train.rollouts.runner.pool", "train.store.lightning_store"}
    assert {f"groundwire.{part}" for part in parts} <= set(imported)
    assert not {"agentlightning", "litellm"} & set(imported)
