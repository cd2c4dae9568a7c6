"""The options of the GPU suite; wrong values are refused before a program starts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection

from dev.gpu.learning import VARIANTS
from groundwire.train.config.sft_settings import FORMATS

__all__ = ["read_options"]

_BACKENDS = ("langgraph", "openai-agents", "mcp")
_MODES = ("sync", "colocate_async", "separate_async")


def read_options(description: str, parts: Collection[str]) -> argparse.Namespace:
    """The options of the command line. Lists, which have commas there, are lists of names; ``seeds`` of numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.gpu", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="folder for runs, logs and results")
    add("--parts", type=_names(parts), default=",".join(parts), help="comma-separated; default: all")
    add("--model", help="as for train.run; default: the starter")
    add("--config", default="starter", help="verl preset of all runs; default: %(default)s")
    add("--limit", type=_positive, default=600.0, help="seconds for each program; default: %(default)g")
    add("--backends", type=_names(_BACKENDS), default=",".join(_BACKENDS), help="ci: default %(default)s")
    add("--full-ci", action="store_true", help="ci: --ci (20 steps) instead of --ci-fast")
    add(
        "--spider",
        metavar="FOLDER",
        help="spider, speed, scaling, learning: folder of real Spider; default: the bundled data",
    )
    add("--steps", type=_count, default=40, help="spider, async: training steps; default: %(default)s")
    add("--val-tasks", type=int, default=200, help="spider: validation tasks, 0 is all; default: 200")
    add(
        "--shape",
        type=_shapes,
        default="llama-1024x24",
        help="speed, scaling, uneven: TYPE-WIDTHxLAYERS, 135m, 0.5b or 1.5b; several, with commas; uneven: the first; "
        "default: %(default)s",
    )
    add("--batch", type=_count, default=64, help="speed, scaling: prompts of eight rollouts per step; default: 64")
    add("--reply", type=_count, default=256, help="speed, scaling: tokens of a reply; default: %(default)s")
    add("--speed-steps", type=_count, default=8, help="speed, scaling, uneven: steps, two to warm up; default: 8")
    add("--only-ours", action="store_true", help="speed: without verl's own agent loop")
    add("--trl", metavar="FOLDER", help="speed, peers: where TRL 1.16 is, beside which verl 0.9.1 cannot start")
    add("--external-store-address", metavar="URL", help="speed: a store with runners, instead of the run's own")
    add("--modes", type=_names(_MODES), default="sync,colocate_async", help="uneven, async: default %(default)s")
    add = parser.add_argument_group("learning, medical").add_argument
    add("--device", default="cuda", help="cpu for a trial; default: %(default)s")
    add("--agents", type=_names(FORMATS), default=",".join(FORMATS), help="of learning; default: %(default)s")
    add("--seeds", type=_seeds, default="0,1,2", help="of GRPO; default: %(default)s")
    add(
        "--variants",
        type=_names(VARIANTS),
        default=",".join(VARIANTS),
        help="of learning: further GRPO runs with the first agent and seed; default: %(default)s",
    )
    add("--sft-s", type=_positive, default=115.0, help="seconds of SFT per agent; default: %(default)g")
    add("--grpo-s", type=_positive, default=520.0, help="seconds of a GRPO run; default: %(default)g")
    add("--verl-s", type=_positive, default=1200.0, help="seconds of a run with verl; default: %(default)g")
    add("--sft-share", type=_share, default=2 / 3, help="of the training questions for SFT, by database; default: 2/3")
    add("--learning-rate", type=_positive, default=2e-5, help="of GRPO; default: %(default)g")
    add("--at-once", type=_count, default=3, help="GRPO runs and controls at once, and evaluations; default: 3")
    add("--samples", type=_count, default=1, help="per question; 8 for pass@8; default: %(default)s")
    add("--questions", type=int, default=0, help="validation questions; default: all; of traces: 400")
    add = parser.add_argument_group("traces, beside --seeds, --sft-s and --grpo-s (of the teacher)").add_argument
    add("--teacher", metavar="FOLDER", help="a trained model; default: the suite trains one")
    add("--traced", type=_count, default=2000, help="training questions that it answers; default: %(default)s")
    add("--student-sft-s", type=_positive, default=100.0, help="seconds of a student's SFT; default: %(default)g")
    add("--distill-steps", type=_count, default=30, help="steps of its distillation; default: %(default)s")
    add("--distill-rate", type=_positive, default=3e-5, help="their learning rate; default: %(default)g")
    add("--student-grpo-s", type=_positive, default=150.0, help="seconds of its GRPO; default: %(default)g")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of verl; for learning and medical: of the local trainer",
    )
    return parser.parse_args()


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is unknown; known: {', '.join(known)}")
        return names

    return read


def _shapes(text: str) -> list[str]:
    from dev.gpu.random_model import check_shape

    names = text.split(",")
    for name in names:
        try:
            check_shape(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 0,1,2") from None


def _positive(text: str) -> float:
    return _number(text, math.inf)


def _share(text: str) -> float:
    return _number(text, 1.0)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str, below: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < below:
        limits = "above 0" if below == math.inf else f"between 0 and {below:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {limits}")
    return value
