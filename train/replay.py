"""``groundwire replay``: run rollouts of a run again, with every LLM call answered from the record.

It is the regression test of an agent against its own history: the exit code is 1 if a rollout goes another way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, progress, spinner
from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir
from groundwire.train.cli.complete import RunDirectory
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings

_COUNT = 20
_EXAMPLES = 3
_SETTINGS = (
    *("backend", "agent", "agent_input", "agent_output", "agent_context", "agent_config", "domain", "reward"),
    *("agent_columns", "agent_options", "judge", "data_dir", "n_runners", "rollout_process", "runner_python"),
)
_OPTIONS = {name: name for name in _SETTINGS if name != "judge"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=SettingsCommand)
@takes_settings(_OPTIONS)
def main(
    settings: dict[str, Any],
    run_dir: RunDirectory = LAST_RUN,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="This rollout: its id, or its beginning", metavar="ID")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed or were not right")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"All; default: {_COUNT}, spread over the run")] = False,
    version: Version = False,
) -> None:
    """Run an agent again on a run's rollouts with every call answered from the record, and name what differs.

    No model is loaded. The exit code is 1 if a rollout differs. Settings change what is tried: another reward or agent.
    """
    with exit_on_user_error():
        if (rollout is not None) + failed + every > 1:
            raise CommandError("give one of --rollout, --failed and --all")
        read_env_file()
        setup_logging()
        with spinner("starting"):
            from groundwire.train.api.replay import choose_rollouts, replay, replay_job

            run = RunDir.open(run_dir)
            chosen, total = choose_rollouts(run, rollout_id=rollout, failed=failed, count=0 if every else _COUNT)
            job = replay_job(run, given_settings(settings, [], names=_OPTIONS))
        started, ended = time.monotonic(), list[Any]()
        with progress("Replaying", len(chosen)) as on_end:
            for batch in replay(job, run, chosen, on_end=on_end):
                ended += batch
        differing = [each for each in ended if each.difference is not None]
        say("\n".join(_lines(ended, total, time.monotonic() - started)))
    if differing:
        raise typer.Exit(1)


def _lines(ended: list[Any], total: int, seconds: float) -> list[str]:
    from groundwire.train.evaluation.replayed import CAUSES

    by_kind = defaultdict[str, list[Any]](list)
    for each in ended:
        by_kind[each.difference.kind if each.difference else ""].append(each)
    same = len(by_kind.pop("", []))
    calls = sum(len(each.recorded.calls) for each in ended)
    lines = [
        f"replayed {len(ended):,} of {total:,} rollouts, with {calls:,} recorded calls, in {seconds:.1f} s: "
        f"{same:,} as recorded, {len(ended) - same:,} not"
    ]
    for kind, differing in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        lines.append(f"{CAUSES[kind]}: {len(differing):,}")
        lines += [f"    {each.recorded.rollout_id}: {each.difference.sentence}" for each in differing[:_EXAMPLES]]
    return lines


if __name__ == "__main__":
    app()
