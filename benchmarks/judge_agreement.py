"""How well a judge that compares answers (``judge:compare``) agrees with execution match, on Spider.

``python -m benchmarks.judge_agreement [--judge-model NAME --judge-base-url URL] [--judge NAME=VALUE] [--pairs 100]
[--data-dir DIR] [--json FILE]``: each pair is a right answer to a question, a rewrite of its gold, and a wrong one, a
near miss of the gold or another query of its database, both tried on the database. Without a judge a scripted one
answers over HTTP, with ``--noise`` and ``--first``: the deviation of its errors, and what the first place adds, where
right and wrong differ by 1.

``--schemes`` compares ways to rank eight answers by that judge: lists in two orders, all pairs, neighbours, a sorted
tournament.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

from benchmarks._results import record
from benchmarks._rewrites import rewrite
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.domains.spider.loader import domain
from groundwire.rewards import JudgeAbstainedError, JudgeSettings, RewardError
from groundwire.rewards.judge.cache import JudgeCache
from groundwire.rewards.judge.compare import NAME, compare
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.secrets import say
from groundwire.tools.startup import read_env_file
from groundwire.tools.variants.mutations import mutations
from groundwire.tools.variants.tables import read_schema
from groundwire.train.cli.options import parse_judge

_ANSWER = re.compile(r"^answer_\d+: (.*)$", re.MULTILINE)
_GROUPS, _SIZE = 40, 8
_POINT = 0.05
"""Of a verdict's score, for a difference of 1: noise and preferences seldom leave the range of 0 to 1."""
Ask = Callable[[Sequence[str]], Awaitable[list[int]]]
"""How often each of some answers wins, less how often it loses."""


def main() -> None:
    """Print the figures of one judge, or of the schemes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judge_agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--judge-model")
    parser.add_argument("--judge-base-url")
    parser.add_argument("--judge", action="append")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--data-dir")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--schemes", action="store_true")
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--first", type=float, default=1.0)
    options = parser.parse_args()
    if options.schemes:
        asyncio.run(_schemes(options))
        return
    read_env_file()
    given = parse_judge(judge_model=options.judge_model, judge_base_url=options.judge_base_url, judge=options.judge)
    figures = asyncio.run(_agreement(given, options))
    for name, value in figures.items():
        say(f"{name:<46}{value!s:>10}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    record(f"agreement of {figures['judge']} with execution match", figures["right wins"], unit="of the pairs")


# -- agreement


def pairs(data_dir: str | None, count: int) -> list[tuple[str, str, str]]:
    """A question, a right and a wrong answer to it: ``count`` of them, evenly spaced in the validation tasks."""
    tasks, rng = domain.load(data_dir).validation, random.Random(0)
    made = []
    for task in tasks[:: max(1, len(tasks) // (2 * count))]:
        gold, database = task["query"], task["db_path"]
        others = [other["query"] for other in tasks if other["db_path"] == database and other["query"] != gold]
        wrongs = [*mutations(gold, read_schema(database).columns_by_table()), *rng.sample(others, min(3, len(others)))]
        rng.shuffle(wrongs)
        right = next((text for text in (rewrite(gold, rng), gold) if _value(text, gold, database) == 1), None)
        wrong = next((text for text in wrongs if _value(text, gold, database) == 0), None)
        if right is not None and wrong is not None and len(made) < count:
            made.append((task["question"], right, wrong))
    return made


def _value(answer: str, gold: str, database: str) -> float | None:
    try:
        return execution_match(answer, gold, database).score
    except RewardError:
        return None


async def _agreement(given: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    asked = pairs(options.data_dir, options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        cache = {"cache": f"{folder}/judge.sqlite"}  # or the calls of an earlier run would be counted
        if "model" in given:
            return await _measure(JudgeSettings(**{**cache, **given}), asked)
        quality = {answer: float(answer == right) for _, right, wrong in asked for answer in (right, wrong)}
        async with ScriptedPolicyServer(replies=_scripted(quality, options)) as server:
            return await _measure(JudgeSettings(model="scripted", base_url=server.base_url, **cache), asked)


async def _measure(judge: JudgeSettings, asked: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    slots, before = asyncio.Semaphore(4), JudgeCache(judge.cache).spent()[0]

    async def one(question: str, right: str, wrong: str) -> str:
        async with slots:
            try:
                value, _ = await compare({"question": question}, [right, wrong], judge=judge)
            except JudgeAbstainedError as error:
                errors[str(error)[:120]] += 1
                return "abstained"
            if not value[f"metric/{NAME}.contradicted"]:
                return {1.0: "right wins", 0.5: "tie", 0.0: "wrong wins"}[value["judge:compare"]]
            scores = await Judge.of(judge)._compared(question, [right, wrong], 0)  # it is in the cache
            return "first place wins" if scores[right] > scores[wrong] else "last place wins"

    errors = Counter[str]()
    ends = Counter[str](await asyncio.gather(*itertools.starmap(one, asked)))
    decided = ends["right wins"] + ends["wrong wins"]
    judged = len(asked) - ends["abstained"]
    for error, number in errors.most_common(3):
        say(f"abstained {number} times: {error}")
    return {
        "judge": judge.model,
        "pairs": len(asked),
        "calls": JudgeCache(judge.cache).spent()[0] - before,
        "abstained": ends["abstained"],
        "right wins": _share(ends["right wins"], len(asked)),
        "wrong wins": _share(ends["wrong wins"], len(asked)),
        "ties in both orders": _share(ends["tie"], len(asked)),
        "ties: the first place wins in both orders": _share(ends["first place wins"], len(asked)),
        "ties: the last place wins in both orders": _share(ends["last place wins"], len(asked)),
        "right wins, of the pairs with a winner": _share(ends["right wins"], decided),
        "right wins, ties as a half, of those judged": _share(ends["right wins"] + (judged - decided) / 2, judged),
    }


def _share(part: float, of: int) -> float | None:
    return round(part / of, 3) if of else None


def _scripted(quality: Mapping[str, float], options: argparse.Namespace) -> Callable[[dict[str, Any]], str]:
    """A judge that knows the quality of each answer, errs by ``noise`` in each request, and likes the first place."""

    def reply(body: dict[str, Any]) -> str:
        answers = [json.loads(text) for text in _ANSWER.findall(body["messages"][1]["content"])]
        rng = random.Random(json.dumps(answers))
        scores = {
            f"answer_{place}": 0.5
            + _POINT * (quality[answer] + rng.gauss(0, options.noise) + options.first * (place == 1))
            for place, answer in enumerate(answers, 1)
        }
        return json.dumps({"reason": "", **{name: min(1.0, max(0.0, round(at, 3))) for name, at in scores.items()}})

    return reply


# -- schemes


async def _schemes(options: argparse.Namespace) -> None:
    """The correlation of ranks with the true qualities, pairs in the wrong order, and calls, over groups of eight."""
    rng = random.Random(0)
    groups = [[rng.gauss(0, 1) for _ in range(_SIZE)] for _ in range(_GROUPS)]
    quality = {f"{group}/{place}": value for group, values in enumerate(groups) for place, value in enumerate(values)}
    schemes = {
        "one list, two orders": (_list, 1),
        "two lists, two orders each": (_list, 2),
        "each with 4 neighbours, two orders": (_neighbours, 1),
        "all pairs, two orders": (_all_pairs, 1),
        "sorted tournament, two orders": (_tournament, 1),
    }
    say(f"noise {options.noise:g}, the first place {options.first:+g}; {_GROUPS} groups of {_SIZE}, deviation 1")
    say(f"{'scheme':<38}{'calls':>8}{'correlation':>13}{'wrong order':>13}")
    async with ScriptedPolicyServer(replies=_scripted(quality, options)) as server:
        for name, (scheme, samples) in schemes.items():
            with tempfile.TemporaryDirectory() as folder:
                judge = JudgeSettings(
                    model="m",
                    base_url=server.base_url,
                    cache=f"{folder}/judge.sqlite",
                    samples=samples,
                    temperature=float(samples > 1),
                )
                before, correlations, inverted = len(server.requests), [], []
                for group, values in enumerate(groups):
                    answers = [f"{group}/{place}" for place in range(_SIZE)]

                    async def ask(some: Sequence[str], judge: JudgeSettings = judge) -> list[int]:
                        standings = await Judge.of(judge).compare(question="?", answers=sorted(some))
                        return [standings[answer][0] for answer in some]

                    points = await scheme(ask, answers)
                    correlations.append(correlation(points, values) if len(set(points)) > 1 else 0.0)
                    inverted += [
                        (points[one] - points[other]) * (values[one] - values[other]) < 0
                        for one, other in itertools.combinations(range(_SIZE), 2)
                    ]
                calls = (len(server.requests) - before) / _GROUPS
            say(f"{name:<38}{calls:>8.1f}{fmean(correlations):>13.3f}{fmean(inverted):>13.3f}")
            record(f"correlation, {name}", fmean(correlations), unit=f"{calls:.1f} calls")


async def _list(ask: Ask, answers: Sequence[str]) -> list[float]:
    return [float(wins) for wins in await ask(answers)]


async def _of_pairs(ask: Ask, answers: Sequence[str], chosen: Sequence[tuple[str, str]]) -> list[float]:
    points = Counter(dict.fromkeys(answers, 0))
    for pair, wins in zip(chosen, await asyncio.gather(*map(ask, chosen)), strict=True):
        points.update(dict(zip(pair, wins, strict=True)))
    return [float(points[answer]) for answer in answers]


async def _all_pairs(ask: Ask, answers: Sequence[str]) -> list[float]:
    return await _of_pairs(ask, answers, list(itertools.combinations(answers, 2)))


async def _neighbours(ask: Ask, answers: Sequence[str]) -> list[float]:
    near = [(answers[place], answers[(place + far) % _SIZE]) for place in range(_SIZE) for far in (1, 2)]
    return await _of_pairs(ask, answers, near)


async def _tournament(ask: Ask, answers: Sequence[str]) -> list[float]:
    """Insert one answer after the other into those that are sorted; ties share a place."""
    places: list[list[str]] = []
    for answer in answers:
        low, high = 0, len(places)
        while low < high:
            middle = (low + high) // 2
            wins, _ = await ask([answer, places[middle][0]])
            if wins == 0:
                places[middle].append(answer)
                break
            low, high = (middle + 1, high) if wins > 0 else (low, middle)
        else:
            places.insert(low, [answer])
    return [float(next(place for place, tied in enumerate(places) if answer in tied)) for answer in answers]


if __name__ == "__main__":
    main()
