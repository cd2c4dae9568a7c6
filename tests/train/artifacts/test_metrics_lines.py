"""The keys of the lines of metrics are declared once, and nothing writes another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import ROOT

from groundwire.train.artifacts.metrics_lines import MetricsLine
from groundwire.train.artifacts.run_dir import RunDir


def test_the_table_of_the_docs_is_the_declaration() -> None:
    table = (ROOT / "docs" / "why.md").read_text().partition("## Keys of a line")[2].partition("## Warnings")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert len(rows) == len(MetricsLine.model_fields)
    assert dict(rows) == {name: field.description for name, field in MetricsLine.model_fields.items()}


def test_a_key_that_is_not_declared_is_not_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(ValueError, match=r"tokens_per_second: no key of a MetricsLine; declare it in"):
        run.append_metrics({"step": 1, "tokens_per_second": 3.0})
    with pytest.raises(ValueError, match="no key of a MetricsLine"):
        run.write_metrics([{"step": 1, "reward_mean": 0.5}])
    with pytest.raises(ValueError, match="failed_timeout: no key of a MetricsLine"):
        run.append_rollout_metrics({"step": 1, "partition": "train", "failed_timeout": 3})
    run.append_rollout_metrics({"step": 1, "partition": "train", "dropped": 3})
    assert not run.metrics()
