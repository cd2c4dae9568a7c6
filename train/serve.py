"""``groundwire serve``: a trained model as an OpenAI-compatible endpoint."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Annotated

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.http.access_token import token_place
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file, setup_logging
from groundwire.tools.terminal import Debug, TokenFile, Version
from groundwire.train.api.serving import serve

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A run (its newest checkpoint), a checkpoint, or any --model of a run",
            metavar="RUN_DIR|CHECKPOINT|MODEL",
        ),
    ],
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address; any but this machine's own needs a token")] = ("127.0.0.1"),
    served_model_name: Annotated[
        str | None, typer.Option(help="Accept requests for this model only; default: for any", metavar="NAME")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and reply together; default: the run's, else 4096", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps or xpu")] = "cpu",
    tool_format: Annotated[
        str | None,
        typer.Option(help="How the model writes tool calls. Default: as its chat template does", metavar="NAME"),
    ] = None,
    token_file: TokenFile = None,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Serve a model until stopped."""
    with exit_on_user_error(debug):
        read_env_file()
        setup_logging(debug)
        with serve(
            checkpoint,
            host=host,
            port=port,
            served_model_name=served_model_name,
            max_model_len=max_model_len,
            device=device,
            tool_format=tool_format,
            token_file=token_file,
        ) as server:
            say(f"model: {server.folder}")
            say(f"serve: {server.base_url}")
            say(f"key:   in {token_place(token_file)}")
            with suppress(KeyboardInterrupt):  # the usual end
                threading.Event().wait()


if __name__ == "__main__":
    app()
