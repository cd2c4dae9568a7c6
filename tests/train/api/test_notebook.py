"""The functions in a notebook: what they complete, how errors look, what results show."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bandits import Choose, train

from groundwire.tools.errors import UserError
from groundwire.train import fit, look, report, sft, why
from groundwire.train.api.functions import complete_settings
from groundwire.train.api.results import training_result
from groundwire.train.config.run_config import RunConfig

CELLS = """
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("from groundwire.train import fit, sft")
for written in ("fit(tasks_per", "sft(later"):
    with provisionalcompleter():
        print(sorted({found.text for found in shell.Completer.completions(written, len(written))}))
shell.run_cell("fit(tasks='spider', step=2)")
"""


def test_a_notebook_completes_settings_and_shows_an_error_as_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    # A new interpreter: there IPython is imported first.
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("['tasks_per_step=']", "['later_turns=']"),
        "error: unknown setting 'step'; did you mean steps? docs/settings.md lists all settings",
    ]


def test_the_signature_of_a_completed_function_has_every_setting_once() -> None:
    def function(agent: Any = None, *, quiet: bool = False, **settings: Any) -> None: ...

    complete_settings([function], RunConfig)
    names = inspect.signature(function).parameters
    assert names.keys() == {"agent", "quiet", *RunConfig.model_fields}
    assert not [name for name, one in names.items() if one.kind is one.VAR_KEYWORD]


@pytest.mark.parametrize("function", [fit, look])
def test_tasks_without_sql_need_a_model_and_the_models_are_named(function: Any) -> None:
    tasks = [{"question": f"Say {number}", "expected": str(number)} for number in range(10)]
    with pytest.raises(UserError, match=r"the starter, the usual one, writes SQL only. Give model='smollm2'"):
        function(lambda question: question, tasks, lambda task, answer: 1.0, quiet=True)


def test_results_show_themselves_in_a_notebook(tmp_path: Path, tiny_policy: Any) -> None:
    async def agent(choose: Choose) -> str:
        return await choose("which?", "01")

    run = train(tmp_path, tiny_policy, agent, reward=float)
    run.write_config({"steps": 1})
    run.merge_rollouts()
    shown = training_result(run)._repr_html_()
    assert "before, " in shown
    assert '<img width="560" alt="Reward and accuracy" src="data:image/png;base64,' in shown
    page = report(run.path)
    assert page.path == run.path / "report.html"
    assert "&lt;script" in page._repr_html_()
    explained = why(run.path)
    assert "36 rollouts, 32 of them for training" in explained
    assert explained._repr_html_().startswith("<pre>36 rollouts")


def test_a_model_is_fine_tuned_by_a_function(tmp_path: Path) -> None:
    turn = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (tmp_path / "chats.jsonl").write_text(3 * turn)
    folder = sft(model="starter", chats=tmp_path / "chats.jsonl", output_dir=tmp_path, epochs=1, quiet=True)
    assert (folder / "config.json").is_file()
