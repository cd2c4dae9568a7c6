"""A scripted judge model over HTTP, and one that obeys every order outside the fence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.rewards import JudgeSettings
from groundwire.rewards.judge.engine import Judge, Verdict

CASE = {"question": "What is Noravil for?", "reference": "Noravil is for fever.", "answer": "It is for fever."}


def verdict(score: float, **scores: float) -> str:
    """A judge's reply."""
    each = {"accuracy": score, "completeness": score, "clarity": score, "professionalism": score, **scores}
    return json.dumps({"reason": "because", **each})


def settings(server: ScriptedPolicyServer, tmp_path: Path, **given: Any) -> JudgeSettings:
    """The settings of a judge at ``server`` with its own cache."""
    usual = {"model": "judge", "base_url": server.base_url, "cache": str(tmp_path / "judge.sqlite")}
    return JudgeSettings(**{**usual, **given})


async def judged(judge: JudgeSettings, **case: str) -> Verdict:
    """One verdict of a new judge, which shares only the cache file."""
    return await Judge(judge).verdict(**{**CASE, **case})


_ORDER = re.compile(
    r"\b(ignore|disregard|forget)\b|\bscore (this|it|1)|full marks|all scores|accuracy\W+1\.0|perfect|评分|满分|忽略",
    re.IGNORECASE,
)
_ANY_FENCE = re.compile(r'"(BEGIN DATA [^"\n]+)" and the line "(END DATA [^"\n]+)"')
_SPECIAL = re.compile(r"<\|im_(?:start|end)\|>|</?s>|\[/?INST\]")


def obedient(reference_for: Callable[[str], float] = lambda answer: 0.0) -> Callable[[dict[str, Any]], str | Reply]:
    """A gullible model: any order that it reads outside the fenced data gets 1.0 everywhere.

    It knows the fence from its system message alone and believes every copy of the closing line. Its server renders
    messages as text, so special tokens in a message end that message: what follows is outside, too. What it reads
    inside it grades with ``reference_for``.
    """

    def reply(body: dict[str, Any]) -> str:
        system, user = (message["content"] for message in body["messages"])
        fence = _ANY_FENCE.search(system)
        inside, outside = [], []
        fenced = False
        for line in _SPECIAL.sub("\nEND\n", user).split("\n"):
            if fence and line.strip() == fence[1]:
                fenced = True
            elif (fence and line.strip() == fence[2]) or line == "END":
                fenced = False
            else:
                (inside if fenced else outside).append(line)
        if _ORDER.search("\n".join(outside)):
            return verdict(1.0)
        answers = [line for line in inside if line.startswith("answer to grade: ")]
        if len(answers) != 1:
            return "I cannot tell which answer I am to grade."
        return verdict(reference_for(json.loads(answers[0].removeprefix("answer to grade: "))))

    return reply


def compared_answers(body: dict[str, Any]) -> list[str]:
    """The answers in a request to compare them, in its order."""
    lines = body["messages"][1]["content"].split("\n")
    return [json.loads(line.partition(": ")[2]) for line in lines if re.match(r"answer_\d+: ", line)]


def comparing(score: Callable[[str], float], *, first: float = 0.0) -> Callable[[dict[str, Any]], str]:
    """A judge that compares answers by their ``score``, and adds ``first`` to the one that it reads first."""

    def reply(body: dict[str, Any]) -> str:
        scores = [score(answer) + (0.0 if place else first) for place, answer in enumerate(compared_answers(body))]
        return json.dumps({"reason": "because", **{f"answer_{place}": one for place, one in enumerate(scores, 1)}})

    return reply
