"""``groundwire learn``: train a model on what agents have done, and say whether it is better.

The exit code is 0 for better, 3 for equal or worse, 4 for not enough data; 2 for wrong input, 1 if a stage failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.startup import fast_import, read_env_file, setup_logging
from groundwire.tools.terminal import Debug, Mask, Version, console, spinner
from groundwire.train.cli.options import SettingsCommand, given_settings, takes_settings
from groundwire.train.config.overrides import parse_overrides

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXIT_CODES = {"better": 0, "equal": 3, "worse": 3, "not enough data": 4}


@app.command(cls=SettingsCommand)
@takes_settings()
def main(
    settings: dict[str, Any],
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Files or folders of exported traces, and settings; sft.KEY=VALUE: of the fine-tuning"),
    ] = None,
    trained_agent: Annotated[
        str, typer.Option(help="Regular expression: learn only calls of these agents of the traces", metavar="REGEX")
    ] = "",
    trained_model: Annotated[
        str, typer.Option(help="Regular expression: learn only calls of these models of the traces", metavar="REGEX")
    ] = "",
    rl: Annotated[bool, typer.Option("--rl/--no-rl", help="Whether GRPO follows")] = True,
    mask: Mask = True,
    resume: Annotated[Path | None, typer.Option(help="Continue in this folder", metavar="DIR")] = None,
    debug: Debug = False,
    version: Version = False,
) -> None:
    """Fine-tune a model on accepted traces, train it with the agent, and test it on held-out tasks.

    Exit code 0: better; 3: equal or worse; 4: not enough data to tell.
    """
    pairs = [text for text in files or [] if "=" in text and not Path(text).exists()]
    traces = [text for text in files or [] if text not in pairs]
    sft = [text.removeprefix("sft.") for text in pairs if text.startswith("sft.")]
    with exit_on_user_error(debug):
        read_env_file()
        given = given_settings(settings, [text for text in pairs if not text.startswith("sft.")])
        setup_logging(debug)
        with spinner("starting"), fast_import():
            from groundwire.train.learn.pipeline import LearnRequest, learn_from
        request = None
        if traces or given or not resume:
            request = LearnRequest(
                files=traces,
                given=given,
                sft=parse_overrides(sft),
                trained_agent=trained_agent,
                trained_model=trained_model,
                rl=rl,
                mask=mask,
            )
        result = learn_from(request, resume=resume, output=console())
        raise typer.Exit(EXIT_CODES[result.verdict])


if __name__ == "__main__":
    app()
