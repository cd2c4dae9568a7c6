"""``groundwire conformance``: what a gateway in front of a policy loses, masks wrongly or invents.

The exit code is 0 if nothing is wrong, 1 if something is, 2 if the gateway cannot be reached or no SDK is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated

import httpx
import typer

from groundwire.adapters.gateways.conversations import ExportedRow, Played, Policy, play, read_row
from groundwire.adapters.gateways.sdks import APIS
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file
from groundwire.tools.terminal import Version, counted, format_table, installed_version

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_COLUMNS = ("API", "Conversation", "Sampled", "Lost", "Masked wrongly", "Invented", "Prefix kept", "Note")
_WAIT_S = 10.0


@app.command()
def main(
    url: Annotated[
        str,
        typer.Argument(
            help="The gateway's OpenAI base URL; {conversation} in it, or in the key, becomes each conversation's name"
        ),
    ],
    upstream_port: Annotated[
        int | None,
        typer.Option(
            help="Serve a scripted policy at http://127.0.0.1:PORT/v1, the gateway's model server, and compare with "
            "its tokens; default: replies with themselves",
            metavar="PORT",
            min=1,
            max=65535,
        ),
    ] = None,
    export_command: Annotated[
        str | None,
        typer.Option(
            help="With --upstream-port: a shell command that prints what the gateway trains, JSON lines with "
            "prompt_ids, response_ids and loss_mask; default: the ids in its replies",
            metavar="COMMAND",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model in requests. Default: the first of the gateway's list", metavar="NAME")
    ] = None,
    api: Annotated[list[str] | None, typer.Option(help=f"Play this API only: {', '.join(APIS)}")] = None,
    api_key_env: Annotated[
        str, typer.Option(help="The environment variable with the gateway's key", metavar="NAME")
    ] = "OPENAI_API_KEY",
    version: Version = False,
) -> None:
    """Play scripted conversations with a gateway, through the SDKs of each API, and count tokens."""
    with exit_on_user_error():
        read_env_file(names=[api_key_env])
        if unknown := sorted({*(api or ())} - APIS.keys()):
            raise CommandError(f"--api {unknown[0]!r} is unknown: give {', '.join(APIS)}")
        if export_command and upstream_port is None:
            raise CommandError("--export-command needs --upstream-port: only tokens that are known can be compared")
        apis = list[str]()
        for name in dict.fromkeys(api or APIS):
            if installed_version(package := APIS[name].package):
                apis.append(name)
            else:
                say(f"{name} is not played: {package} is not installed (pip install {package})", err=True)
        if not apis:
            raise CommandError("no SDK is installed: pip install openai anthropic google-genai")
        results = asyncio.run(
            _run(url, os.environ.get(api_key_env) or "none", model, upstream_port, export_command, apis)
        )
        say(format_table(_COLUMNS, [_row(played) for played in results], "text"))
        wrong = sum(played.wrong for played in results)
        compared = [played for played in results if played.tokens is not None]
        say(f"{counted(len(results), 'conversation')}, {len(compared)} compared, {wrong} with something wrong")
        if not compared:
            raise CommandError(
                "the gateway returned no token ids: it must pass return_token_ids on to its server, or give them by "
                "--export-command",
                exit_code=1,
            )
    raise typer.Exit(bool(wrong))


async def _run(
    url: str, key: str, model: str | None, port: int | None, command: str | None, apis: Sequence[str]
) -> list[Played]:
    async def export() -> list[ExportedRow]:
        process = await asyncio.create_subprocess_shell(str(command), stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        if process.returncode:
            raise CommandError(f"--export-command ended with status {process.returncode}: {command}", exit_code=1)
        return [read_row(json.loads(line)) for line in output.splitlines() if line.strip()]

    policy = None if port is None else Policy()
    async with AsyncExitStack() as stack:
        if policy:
            server = ScriptedPolicyServer(policy.reply)
            server.port = port or 0
            await stack.enter_async_context(server)
        model = model or await _first_model(url.replace("{conversation}", "any"), key)
        return await play(url, key=key, model=model, policy=policy, export=export if command else None, apis=apis)


async def _first_model(url: str, key: str) -> str:
    """The first model of the gateway. Raises :class:`CommandError`."""
    try:
        async with httpx.AsyncClient(timeout=_WAIT_S, trust_env=False) as client:
            response = await client.get(f"{url.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"})
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise CommandError(f"{url} cannot be reached ({error}): start the gateway, or correct the address") from error
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise CommandError(
            f"{url}/models answered {response.status_code} and names no model: give --model, or correct the address, "
            "which usually ends in /v1"
        ) from error


def _row(played: Played) -> list[str]:
    tokens = played.tokens
    counts = [str(n) for n in (tokens.lost, tokens.masked_wrongly, tokens.invented)] if tokens else ["-"] * 3
    kept = f"{played.later - played.broken} of {played.later}" if played.later else "-"
    notes = [f"{text} ({times}x)" for text, times in played.problems.items()]
    if played.refused:
        notes.append(f"not served: {played.refused}")
    elif not tokens:
        notes.append("no token ids in replies")
    name = f"{played.name}, stream" if played.stream else played.name
    return [played.api, name, str(played.sampled or "-"), *counts, kept, "; ".join(notes)]


if __name__ == "__main__":
    app()
