"""``groundwire export``: the rollouts of a run, or exported traces, in the formats of others."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from groundwire.adapters.tracing.calls import to_json
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.terminal import Mask, Version, counted
from groundwire.train.artifacts.run_dir import RunDir, run_dirs
from groundwire.train.artifacts.tracking import check_otlp_package
from groundwire.train.policy.chat.tool_formats import FORMATS
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.store.rollout import Rollout
from groundwire.train.traces.export import to_atif, to_chats
from groundwire.train.traces.messages import Message
from groundwire.train.traces.read import Traces, read_traces
from groundwire.train.traces.record import TracedCall, make_rollout

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CALL = ("rollout_id", "agent", "model", "prompt_ids", "response_ids", "logprobs", "finish_reason", "error", "status")
_TURN = re.compile(
    r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\s*|\Z)"
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>\n\n(?P<llama_text>.*?)(?:<\|eot_id\|>|\Z)",
    re.DOTALL,
)
_MARKS = {"<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}


@app.command()
def main(
    source: Annotated[
        str, typer.Argument(help="A run, or a file or folder of traces", metavar="RUN", autocompletion=run_dirs)
    ],
    output: Annotated[Path, typer.Option(help="The file to write: JSON lines", metavar="FILE")],
    form: Annotated[
        Literal["atif", "openai", "otlp"], typer.Option("--format", help="Trajectories, chats, or spans")
    ] = "atif",
    mask: Mask = True,
    version: Version = False,
) -> None:
    """Write the rollouts of a run, or traces of another format, for other tools.

    A run keeps token ids and no messages. They are read in its prompts as the chat template wrote them, so tool
    definitions are part of the system prompt.
    """
    with exit_on_user_error():
        if output.exists():
            raise CommandError(f"{output} exists: give another --output")
        if form == "otlp":
            check_otlp_package("--format otlp")
        left_out = Counter[str]()
        is_run = (Path(source) / "config.json").is_file()
        rollouts = _of_run(RunDir.open(source), left_out) if is_run else read_traces(source, mask=mask)
        with open(output, "w", encoding="utf-8") as file:
            lines = (_write_spans if form == "otlp" else _write_lines)(rollouts, file, form)
        left_out += rollouts.unread if isinstance(rollouts, Traces) else Counter()
        say(f"{output}: {counted(lines, 'line')}")
        for reason, count in left_out.most_common():
            say(f"left out: {count:,} {reason}")


def _write_lines(rollouts: Iterable[Rollout], file: TextIO, form: str) -> int:
    lines = 0
    for rollout in rollouts:
        for value in to_chats(rollout) if form == "openai" else [to_atif(rollout)]:
            if value is not None:
                file.write(json.dumps(value, ensure_ascii=False) + "\n")
                lines += 1
    return lines


def _write_spans(rollouts: Iterable[Rollout], file: TextIO, _: str) -> int:
    """The spans that ``--otlp`` sends, a line of OTLP's JSON for each."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    from groundwire.train.rollouts.otlp import OtlpExport

    class Writer(SpanExporter):
        lines = 0

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            value = MessageToDict(encode_spans(spans))
            scopes = (scope for part in value["resourceSpans"] for scope in part["scopeSpans"])
            for span in (span for scope in scopes for span in scope["spans"]):
                ids = (name for name in ("traceId", "spanId", "parentSpanId") if name in span)
                span.update({name: base64.b64decode(span[name]).hex() for name in ids})
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
            self.lines += 1
            return SpanExportResult.SUCCESS

    writer = Writer()
    export = OtlpExport(SimpleSpanProcessor(writer), run="", domain="")
    for rollout in rollouts:
        export.export(rollout)
    export.close()
    return writer.lines


def _of_run(run: RunDir, left_out: Counter[str]) -> Iterator[Rollout]:
    """The rollouts of a run with the messages that can be known."""
    decoder, unreadable = token_decoder(run), list[str]()
    if not decoder:
        raise CommandError(f"{run.path} has no tokenizer to read its token ids with: its model is gone")
    for batch in run.rollout_batches(None, unreadable):
        for rollout in batch:
            if not rollout.calls:
                left_out["rollouts without an LLM call"] += 1
            elif (exported := _with_messages(rollout, decoder, left_out)) is not None:
                yield exported
    for message in unreadable:
        say(f"warning: {message}", err=True)


def _with_messages(rollout: Rollout, decoder: TokenDecoder, left_out: Counter[str]) -> Rollout | None:
    """The rollout with the messages that its token ids were made of; None if no call's can be read."""
    shown = {text for tool_format in FORMATS.values() for text in tool_format.special} | _MARKS
    hidden = {token for token in decoder.special if decoder.token(token) not in shown}
    calls = []
    for place, call in enumerate(rollout.calls):
        prompt = decoder.text([token for token in call.prompt_ids if token not in hidden])
        text = decoder.text([token for token in call.response_ids if token not in decoder.special])
        messages = list(_turns(prompt))
        if not messages or not text:
            left_out["calls whose prompts are neither ChatML nor Llama 3's"] += 1
            continue
        fields = {name: getattr(call, name) for name in _CALL}
        reply = to_json(_message("assistant", text))
        history = messages, len(messages)
        calls.append(TracedCall(history=history, sequence=place, attempt_id="", reply_json=reply, **fields))
    outcome = rollout.outcome
    scores = {**outcome.reward_components, **({} if outcome.reward is None else {"reward": outcome.reward})}
    exported = make_rollout(calls, rollout_id=rollout.rollout_id, source="groundwire", scores=scores)
    return replace(exported, task=rollout.task, mode=rollout.mode, outcome=outcome) if calls else None


def _turns(prompt: str) -> Iterator[Message]:
    for match in _TURN.finditer(prompt):
        role, text = match["role"] or match["llama"], match["text"] or match["llama_text"] or ""
        if match.end() < len(prompt) or text.strip():  # the reply's own beginning is no message
            yield _message({"ipython": "tool"}.get(role, role), text)


def _message(role: str, text: str) -> Message:
    """A message whose tool calls are read where an assistant wrote them; their ids depend on the text alone."""
    parsed = (tool_format.parse(text, _AnyName()) for tool_format in FORMATS.values())
    content, calls = next((pair for pair in parsed if pair[1]), (text, [])) if role == "assistant" else (text, [])
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
    named = [{**call, "id": f"call_{digest}_{number}"} for number, call in enumerate(calls)]
    return {"role": role, "content": content, **({"tool_calls": named} if named else {})}


class _AnyName(dict[str, Any]):
    """Every name is that of a tool: what was offered is in the prompt's text."""

    def __contains__(self, _: object) -> bool:
        return True


if __name__ == "__main__":
    app()
