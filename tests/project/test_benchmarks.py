"""The table of benchmarks names modules that exist, and its figures become one file."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from benchmarks.__main__ import BENCHMARKS
from programs import ROOT, run


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_a_module_with_a_main_function_and_recorded_figures(name: str) -> None:
    spec = importlib.util.find_spec(BENCHMARKS[name])
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    assert "main" in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert "record(" in text


def test_an_unknown_benchmark_is_refused_and_the_known_ones_are_listed() -> None:
    result = run("-m", "benchmarks", "nope")
    assert result.returncode == 2
    assert f"no benchmark 'nope'; known: {', '.join(BENCHMARKS)}" in result.stderr


def test_figures_of_all_benchmarks_go_to_one_file(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'src'}", "SPIDER_DATA_DIR": str(tmp_path)}
    done = run("-m", "benchmarks", "execution_match", "--json", str(file), environment=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert (results["failed"], results["figures"]) == (0, [])  # without Spider there is nothing to measure
    assert results["machine"]["python"]
