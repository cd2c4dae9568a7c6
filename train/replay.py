"""``groundwire replay``: run rollouts of a run again, with every LLM call answered from the record.

It is the regression test of an agent against its own history: the exit code is 1 if a rollout goes another way.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Version, progress, spinner
from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir, RunDirError
from groundwire.train.cli.complete import RunDirectory
from groundwire.train.cli.options import REPLAY_OPTIONS, BaseUrl, SettingsCommand, given_settings, takes_settings

_COUNT = 20
_EXAMPLES = 3
_SAMPLES = 16
_CUT = 160
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=SettingsCommand)
@takes_settings(REPLAY_OPTIONS, model="the run's own", seed="the run's")
def main(
    settings: dict[str, Any],
    run_dir: RunDirectory = LAST_RUN,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="This rollout: its id, or its beginning", metavar="ID")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed or were not right")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"All; default: {_COUNT}, spread over the run")] = False,
    start: Annotated[
        int | None,
        typer.Option(
            "--from", help="With --rollout: sample this call and what follows; its number in why", metavar="CALL"
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="With --from: how many times", metavar="N")] = _SAMPLES,
    reply: Annotated[
        str | None, typer.Option("--reply", help="With --from: answer that call so", metavar="TEXT")
    ] = None,
    edit: Annotated[bool, typer.Option("--edit", help="As --reply, with the recorded reply in $EDITOR")] = False,
    base_url: BaseUrl = None,
    version: Version = False,
) -> None:
    """Run an agent again on a run's rollouts with every call answered from the record, and name what differs.

    No model is loaded. The exit code is 1 if a rollout differs. Settings change what is tried: another reward or agent.
    With --from a model samples that call and what follows: the share of successes is the value of that turn.
    """
    with exit_on_user_error():
        if (rollout is not None) + failed + every > 1:
            raise CommandError("give one of --rollout, --failed and --all")
        given = given_settings(settings, [], names=REPLAY_OPTIONS)
        if start is None:
            model = {"--model": settings["model"], "--base-url": base_url, "--reply": reply, "--edit": edit or None}
            if needless := [name for name, value in model.items() if value is not None]:
                raise CommandError(f"{needless[0]} needs --from CALL: else every call is answered from the record")
        elif rollout is None:
            raise CommandError("--from is about one rollout: give its id with --rollout ID")
        elif samples < 1:
            raise CommandError(f"--samples {samples}: at least 1 is sampled")
        elif reply is not None and edit:
            raise CommandError("give one of --reply and --edit")
        read_env_file(names=["OPENAI_API_KEY"])
        setup_logging()
        if start is not None:
            model = {"given": given, "base_url": base_url}
            say("\n".join(_sampled(run_dir, str(rollout), start, samples, reply, edit=edit, **model)))
            return
        with spinner("starting"):
            from groundwire.train.api.replay import choose_rollouts, replay, replay_job, replay_notes

            run = RunDir.open(run_dir)
            chosen, total = choose_rollouts(run, rollout_id=rollout, failed=failed, count=0 if every else _COUNT)
            job = replay_job(run, given)
        started, ended = time.monotonic(), list[Any]()
        with progress("Replaying", len(chosen)) as on_end:
            for batch in replay(job, run, chosen, on_end=on_end):
                ended += batch
        differing = [each for each in ended if each.difference is not None]
        lines = _lines(ended, total, time.monotonic() - started)
        notes = replay_notes(job, run, differs=bool(differing))
        say("\n".join([*lines, *(f"note: {note}" for note in notes)]))
    if differing:
        raise typer.Exit(1)


def _sampled(
    run_dir: str, rollout_id: str, number: int, samples: int, reply: str | None, *, edit: bool, **model: Any
) -> list[str]:
    """What follows from a call, in lines. ``model`` are arguments of :func:`.branches.branch_job`."""
    with spinner("starting"):
        from groundwire.train.api.replay import Branch, Replayer, branch_job, find_call
        from groundwire.train.api.turns import by_text, in_words, message_text
        from groundwire.train.evaluation.diagnosis import trained_calls
        from groundwire.train.evaluation.metrics import RIGHT

        run = RunDir.open(run_dir)
        recorded, call = find_call(run, rollout_id, number)
        replayer = Replayer(branch_job(run, **model), run)
    with replayer:
        [whole] = replayer.run([Branch(recorded)])
        message = whole.reply(call)
        if edit:
            reply = _edited(replayer.written(call, message))
        with progress("Sampling", samples) as on_end:
            ended = replayer.run([Branch(recorded, call, n) for n in range(samples)], reply=reply, on_end=on_end)
    head = f"call {number}{f' ({call.agent})' if call.agent else ''} of {recorded.rollout_id}"
    by = f"{replayer.model} at temperature {replayer.temperature(recorded):g}, seed {replayer.job.config.seed}"
    then = "succeeded" if (recorded.outcome.reward or 0.0) > RIGHT else "did not succeed"
    was = message_text(message)
    lines = [f"{head}: {samples} continuations by {by}", f"recorded reply, which {then}: {_cut(was)}"]
    judged = [(each, each.is_success) for each in ended if each.is_success is not None]
    left_out = in_words(Counter(each.problem for each in ended if each.is_success is None))
    if not judged:
        raise RunDirError(f"{head}: no continuation has a reward: {left_out}")
    value = by_text(("", is_success) for _, is_success in judged)[0][1]
    choices = [place for place, other in enumerate(recorded.calls, 1) if other.reply_key == call.reply_key]
    if len(choices) > 1:
        others = "all are sampled" if reply is None else "the others are as recorded"
        lines.append(f"calls {', '.join(map(str, choices))} are choices of one request: {others}")
    if reply is None:
        lines.append(f"from here on {value} succeed; by the reply that was sampled:")
        texts = [message_text(each.reply(call)) for each, _ in judged]
    else:
        lines.append(f"with the reply {_cut(reply)} {value} succeed; by the answer:")
        texts = [each.again.outcome.answer for each, _ in judged]
    for text, of_text in by_text(zip(texts, [is_success for _, is_success in judged], strict=True)):
        lines.append(f"    {of_text}: {_cut(text)}{' (as recorded)' if reply is None and text == was else ''}")
    if left_out:
        lines.append(f"left out: {left_out}")
    if not any(call is trained for trained in trained_calls(recorded, run.config().get("agent_match"))):
        lines.append(f"the run did not train call {number}")
    if whole.difference is not None:
        lines.append(f"the agent does not go as recorded: {whole.difference.sentence}")
    return lines


def _edited(text: str) -> str:
    """What the user's editor makes of a text."""
    editor = shlex.split(os.environ.get("EDITOR", ""))
    if not editor or not shutil.which(editor[0]):
        raise CommandError("--edit needs an editor: set EDITOR to one, or give the reply with --reply TEXT")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "reply.txt"
        file.write_text(text, encoding="utf-8")
        if subprocess.run([*editor, str(file)], check=False).returncode:  # noqa: S603 (the user's own choice)
            raise CommandError(f"{editor[0]} ended with an error, so nothing is sampled")
        return file.read_text(encoding="utf-8").rstrip("\n")


def _cut(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _CUT else f"{line[:_CUT]}…")


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
