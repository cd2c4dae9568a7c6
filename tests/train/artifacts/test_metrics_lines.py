"""The keys of the lines of metrics are declared once, and nothing writes another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import ROOT

from groundwire.train.artifacts.metrics_lines import MetricsLine
from groundwire.train.artifacts.run_dir import RunDir


def test_the_docs_have_every_key() -> None:
    section = (ROOT / "docs" / "why.md").read_text().partition("## Keys of a line")[2].partition("\n\nverl's")[0]
    keys = re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", section.partition("\n- ")[2]))
    assert sorted(keys) == sorted(MetricsLine.model_fields)


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
