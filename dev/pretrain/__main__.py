"""``python -m dev.pretrain --out DIR``: make the starter policy from random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from groundwire.domains import get
from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import Version, progress, spinner
from groundwire.train.policy import STARTER

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="The folder for the checkpoint", file_okay=False)],
    seed: Annotated[int, typer.Option(help="Seed of the weights and the dialogues")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads; the number changes the rounding", min=1)] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    version: Version = False,
) -> None:
    """Make the starter policy from random weights."""
    with exit_on_user_error():
        with spinner("starting"), fast_import():
            import torch

            from dev.pretrain.training import STEPS, accuracy, pretrain
            from groundwire.train.policy.pretrained.model_files import save_policy
        out.mkdir(parents=True, exist_ok=True)  # an unusable folder is an error now, not after training
        torch.set_num_threads(threads)
        with progress("Pretraining", STEPS) as on_end:
            model, tokenizer = pretrain(seed=seed, device=device, on_step=lambda loss: on_end(f"loss {loss:.2f}"))
        save_policy(model, tokenizer, out)
        card = STARTER / "README.md"
        if card.is_file() and card.parent.resolve() != out.resolve():
            shutil.copy(card, out)
        tasks = get("spider").load().validation
        typer.echo(f"{out}: {model.num_parameters():,} parameters, {len(tokenizer):,} token ids")
        for temperature in (0.0, 1.0):
            with spinner("measuring its first queries"):
                scores = accuracy(model, tokenizer, tasks, temperature=temperature)
            line = ", ".join(f"{name} {score:.1%}" for name, score in scores.items())
            typer.echo(f"first query at temperature {temperature:g}: {line}")


if __name__ == "__main__":
    app()
