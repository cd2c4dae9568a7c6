"""Lets strategies make answers, and scores those that are known to be wrong."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from statistics import fmean
from typing import Any, NamedTuple

from groundwire.rewards._columns import names_read
from groundwire.rewards._functions import map_concurrently, score
from groundwire.rewards._sql import has_gold_query
from groundwire.rewards._types import Reward, RewardError, declared_range
from groundwire.rewards.attack.forms import GoldFile, plain
from groundwire.rewards.attack.result import (
    GOLD_FAILS,
    GOLD_UNPAID,
    NO_ROWS,
    REWARD_FAILS,
    AttackExample,
    AttackResult,
    Finding,
    StrategyResult,
)
from groundwire.rewards.attack.sql import query_steps
from groundwire.rewards.attack.strategies import (
    AGAIN,
    AUDITED,
    SQL_AUDITED,
    STRATEGIES,
    AttackAnswer,
    Context,
    Strategy,
    step,
)
from groundwire.rewards.attack.truth import GoldTruth, Truth
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT, AgentStep, AnswerKind

_PILOT, _AUDITED_PILOT, _CALLS_OF_PILOT, _NO_LIMIT = 6, 2, 25, 1e9
"""Tasks that are tried first, for the form of right answers, chance and state; calls for each, about; seconds."""
_WRONGS, _EXAMPLES, _MOST_TEXTS, _LONGEST_TEXT = 6, 3, 40, 300
_NEIGHBOURS, _COMPARED = 300, 18_000  # golds that one is compared with, and those of all tasks, at most
_TOLERANCE = 1e-9
_MOST_BROKEN = 0.25
"""The share of answers for which a judge or a service may fail."""
_LEAST_SHARE, _LEAST_TASKS, _FEW_TASKS = 0.05, 3, 10
"""A strategy counts if its answer is known to be wrong for so many of the attacked tasks; of few, for one."""
_NO_TEXTS = ("id", "db_path", "database", "db_id")
_NONSENSE = "The zorblax quembles 7919 vints."
_LEARNING_CALLS = 0.9  # share of the budget until which an attacker learns; the rest scores what it has found
_LESSON, _LESSONS = 200, 300
"""Characters of a mechanical answer that a learnt attacker may learn, and such answers, at most."""
Answers = Sequence[tuple[int, str]]
"""Answers to tasks, which are indices."""
Pays = Callable[[Answers], Coroutine[Any, Any, list[float]]]
Learn = Callable[[Sequence[int], Answers, Pays], Awaitable[list[Strategy]]]
"""Finds strategies for tasks by trying: it gets answers to learn from, none with the gold of its task, and what scores
answers (:meth:`Attack.pays`).
"""
_Steps = tuple[AgentStep, ...]
_MakeSteps = Callable[[Mapping[str, Any], str], _Steps]
_STEPS: tuple[_MakeSteps, ...] = (
    lambda task, answer: (),
    lambda task, answer: (step(answer, answer), step("", answer, kind="llm")),
)
"""Steps of an honest agent whose answer is no query; the first ones with which a right answer scores are used."""
_Plan = tuple[Strategy, AttackAnswer, int]


class _Scored(NamedTuple):
    strategy: Strategy
    attempt: AttackAnswer
    task: int
    steps: _Steps
    value: float


async def attack(
    tasks: Sequence[Mapping[str, Any]],
    reward: Reward,
    *,
    golds: Sequence[Any],
    answers: AnswerKind = TEXT,
    truth: Truth | None = None,
    strategies: Sequence[Strategy] = STRATEGIES,
    name: str = "",
    source: str = "",
    limit: int = 60,
    max_calls: int | None = None,
    max_seconds: float = 540.0,
    seed: int = 0,
    on_plan: Callable[[str], None] = lambda _: None,
    learn: Learn | None = None,
    audits: bool = False,
    on_end: Callable[..., None] = lambda by: None,
) -> AttackResult:
    """Attack ``reward`` on at most ``limit`` of ``tasks``, each with an ``id``.

    ``golds`` are the values of the tasks' gold columns, None without one; ``truth`` None is :class:`.GoldTruth`.
    ``name`` and ``source`` go into the result. At most ``max_calls`` answers are scored, for about ``max_seconds``;
    ``on_plan`` gets lines about both before the bulk of them. Raises :class:`rewards.RewardError` if no right
    answer scores more than the least, as there is nothing to attack then, and what a user's ``truth`` raises.
    ``learn`` has half of the calls, and a time of its own. With ``audits`` all tasks are tried, for any time, with the
    few answers of :data:`.AUDITED`, and the result has ``findings``; ``on_end`` gets the tasks that are done, in parts.
    """
    started = time.monotonic()
    file = GoldFile(tasks, golds, is_sql=answers is SQL)
    if audits:
        names = SQL_AUDITED if answers is SQL else AUDITED
        limit, max_seconds, strategies = len(tasks), _NO_LIMIT, [row for row in STRATEGIES if row.name in names]
    run = Attack(file, reward, truth or GoldTruth(file), random.Random(seed), max_calls)
    chosen = run.choose(limit)
    few = _AUDITED_PILOT if audits else _PILOT
    few = few if max_calls is None else max(1, min(few, max_calls // (2 * _CALLS_OF_PILOT)))
    seconds_of_call = await run.pilot(chosen[:few], on_plan)
    await map_concurrently(run.score_right, sorted(chosen[few:]))
    if not audits and not any(run.best(index) > run.floor(index) + _TOLERANCE for index in chosen):
        raise RewardError(run.nothing_to_attack(len(chosen)))
    planned = [plan for index in sorted(chosen) for plan in await run.plan(index, strategies, audited=audits)]
    most = int(max(1.0, max_seconds - (time.monotonic() - started)) / max(seconds_of_call, 1e-6))
    budget = len(planned) if max_calls is None else (max_calls - run.calls) // (1 if learn is None else 2)
    kept = run.thin(planned, min(most, len(planned), budget))
    expected = f"{max(1, len(kept) * seconds_of_call):,.0f} s at {seconds_of_call * 1000:,.3g} ms"
    on_plan(f"{len(kept):,} further calls of the reward, on {len(chosen):,} tasks, about {expected}")
    if len(kept) < len(planned):
        run.notes.append(f"only {len(kept):,} of {len(planned):,} wrong answers were tried, for the time or the budget")
    scored = await run.score_all(kept, started + max_seconds * 1.2, lambda: on_end(by=len(chosen) / len(kept)))
    if run.errors and not audits:  # which has a finding for each
        (_, answer), error = next(iter(run.errors.items()))
        run.notes.append(
            f"the reward raised an error for {run.failed:,} answers, first {error[:120]} for {answer[:40]!r}"
        )
    if not audits and (lost := run.broken.total()) > run.calls * _MOST_BROKEN:
        [(error, _)] = run.broken.most_common(1)
        raise RewardError(
            f"what the reward pays is not known: it failed for {lost:,} of {run.calls:,} answers: {error}"
        )
    if learn is not None:
        usable = [index for index in chosen if run.best(index) > run.floor(index) + _TOLERANCE]
        found = await learn(usable, run.lessons(scored, usable), run.pays)
        further = [plan for index in usable for plan in await run.plan(index, found)]
        left = len(further) if max_calls is None else max(0, max_calls - run.calls)
        scored += await run.score_all(run.thin(further, left))
    return AttackResult(
        reward=name,
        source=source,
        truth=run.truth.how,
        tasks=len(chosen),
        calls=run.calls,
        seconds=round(time.monotonic() - started, 1),
        failed=run.failed,
        unknown=round(run.unknown / max(1, run.unknown + len(planned)), 4),
        strategies=run.results(scored, len(chosen), by_variant=audits),
        notes=run.notes,
        findings=await asyncio.to_thread(list[Finding], run.findings(scored)) if audits else [],
    )


class Attack:
    """The state of one attack. Tasks are indices of ``file``."""

    def __init__(
        self, file: GoldFile, reward: Reward, truth: Truth, rng: random.Random, max_calls: int | None = None
    ) -> None:
        self.file, self.reward, self.truth, self.rng, self.max_calls = file, reward, truth, rng, max_calls
        self.by_gold = GoldTruth(file)
        self.calls = self.unknown = self.failed = 0
        self.notes, self.errors = list[str](), dict[tuple[int, str], str]()
        self.broken = Counter[str]()
        """Errors that say nothing of the answer, such as those of a judge."""
        is_sql = all(gold.form == "sql" for gold in file.golds) and all(map(has_gold_query, file.tasks))
        self._ways_of_steps: tuple[_MakeSteps, ...] = (query_steps,) if is_sql else _STEPS
        self._seed, self._gold_texts = rng.random(), dict.fromkeys(gold.text for gold in file.golds if gold.text)
        self._range = declared_range(reward)
        self._right, self._floors = dict[int, float](), dict[int, float]()
        self._again: list[_Scored] = []
        self._form, self._make_steps = "as it is", self._ways_of_steps[0]
        texts = [text for text in names_read(reward) if text.strip() and len(text) <= _LONGEST_TEXT]
        self._texts = sorted(texts, key=lambda text: (text.isidentifier(), text))[:_MOST_TEXTS]

    def choose(self, limit: int) -> list[int]:
        """The tasks to attack: those first in which case or order decide, up to a third."""
        indices = self.rng.sample(range(len(self.file.golds)), len(self.file.golds))
        special = [i for i in indices if self.file.case_matters(i) or self.file.order_matters(i)][: max(1, limit // 3)]
        chosen = list(dict.fromkeys([*special, *indices]))[:limit]
        return self.rng.sample(chosen, len(chosen))

    async def steps(self, index: int, answer: str) -> _Steps:
        """The steps of an honest agent with this answer."""
        make, task = self._make_steps, self.file.tasks[index]
        return await asyncio.to_thread(make, task, answer) if make is query_steps else make(task, answer)

    async def call(self, index: int, answer: str, steps: _Steps | None = None) -> float | None:
        """The score of an answer; None if the reward raised an error, or the budget of calls is used."""
        if self.max_calls is not None and self.calls >= self.max_calls:
            return None
        self.calls += 1
        steps = await self.steps(index, answer) if steps is None else steps
        scored = await score(self.reward, dict(self.file.tasks[index]), answer, [*steps])
        if scored.value is None:
            self.failed += 1
            self.errors[index, answer] = scored.error
            self.broken.update([scored.error] if scored.is_broken else [])
        else:
            self.errors.pop((index, answer), None)  # with other steps
            self._floors[index] = min(self.floor(index), scored.value)
        return scored.value

    def floor(self, index: int) -> float:
        """The least score of a task."""
        return self._floors.get(index, self._range[0])

    def best(self, index: int) -> float:
        """The score of a right answer; without a gold, the greatest that the reward declares."""
        has_gold = self.file.golds[index].form != "none"
        return self._right.get(index, self.floor(index)) if has_gold else self._range[1]

    async def score_right(self, job: int | tuple[int, str, str]) -> float | None:
        """Score a task's right answer in the form that scores best, or a given form of it."""
        index, answers = (job, self.file.golds[job].answers) if isinstance(job, int) else (job[0], {})
        text = job[2] if not isinstance(job, int) else answers.get(self._form, self.file.golds[index].text)
        if (value := await self.call(index, text)) is not None:
            self._right[index] = max(self._right.get(index, value), value)
        return value

    def wrong_golds(self, index: int) -> list[str]:
        """Golds of other tasks that are wrong for this one, the most similar first."""
        gold = self.file.golds[index]
        others = [text for text in self._gold_texts if text != gold.text]
        most = min(_NEIGHBOURS, max(_WRONGS, _COMPARED // len(self.file.golds)), len(others))
        others = random.Random(f"{self._seed} {index}").sample(others, most)
        if gold.form != "sql":
            others = [text for text in others if self.by_gold.verdict(index, text) is False]
        others.sort(key=lambda text: -SequenceMatcher(None, gold.text[:100], text[:100]).quick_ratio())
        invented = f"{gold.value * 3 + 17:g}" if gold.form == "number" else _NONSENSE
        return [*others[: _WRONGS - 1], *others[_WRONGS - 1 :][-1:]] or [invented]

    async def pilot(self, indices: Sequence[int], on_plan: Callable[[str], None]) -> float:
        """Find out how right answers score on a few tasks; the seconds that a call takes, beside others."""
        wrongs = {index: self.wrong_golds(index)[-1] for index in indices}

        async def again(index: int) -> float | None:
            return await self.call(index, wrongs[index], ())

        started = time.monotonic()
        before = {indices[0]: await again(indices[0])}
        first = time.monotonic() - started
        on_plan(
            f"a call takes {first:.3g} s; about {_CALLS_OF_PILOT * len(indices)} calls to see how right answers score"
        )
        before |= dict(zip(indices[1:], await map_concurrently(again, indices[1:]), strict=True))
        started, calls = time.monotonic(), self.calls
        for make_steps in self._ways_of_steps:
            self._make_steps = make_steps
            jobs = [(index, *form) for index in indices for form in self.file.golds[index].answers.items()]
            values = defaultdict[str, list[float]](list)
            for (_, form, _), value in zip(jobs, await map_concurrently(self.score_right, jobs), strict=True):
                values[form] += [] if value is None else [value]
            if any(self.best(index) > self.floor(index) + _TOLERANCE for index in indices):
                break
        self._form = max(values, key=lambda form: fmean(values[form] or [self._range[0]]))
        seconds = (time.monotonic() - started) / max(1, self.calls - calls)
        await self._look_at_changes_that_do_not_matter(indices)
        twice = [await map_concurrently(self.score_right, indices) for _ in range(2)]
        if differs := sum(first != second for first, second in zip(*twice, strict=True)):
            self.notes.append(f"the reward is random: two scores of one answer differ for {differs} of {len(indices)}")
        for index, after in zip(indices, await map_concurrently(again, indices), strict=True):
            earlier = before[index]
            if after is not None and earlier is not None and await self.is_wrong(index, AttackAnswer(wrongs[index])):
                value = self.floor(index) + max(0.0, after - earlier)
                self._again.append(_Scored(AGAIN, AttackAnswer(wrongs[index]), index, (), value))
        return seconds

    async def _look_at_changes_that_do_not_matter(self, indices: Sequence[int]) -> None:
        """Note which changes of a right answer, that should keep its score, lose most of it."""
        lost, tried = Counter[str](), Counter[str]()
        golds = {index: self.file.golds[index] for index in indices}
        rights = {index: gold.answers.get(self._form, gold.text) for index, gold in golds.items()}
        jobs = [(index, *change) for index in indices for change in golds[index].changed(rights[index]).items()]
        values = await map_concurrently(lambda job: self.call(job[0], job[2]), jobs)
        for (index, name, _), value in zip(jobs, values, strict=True):
            tried[name] += 1
            lost[name] += value is None or value < (self.floor(index) + self.best(index)) / 2
        if refused := [name for name in lost if lost[name] > tried[name] / 2]:
            self.notes.append(f"strict: a right answer loses its score with {', '.join(refused)}")

    async def is_wrong(self, index: int, attempt: AttackAnswer) -> bool:
        """Whether the answer is known to be wrong."""
        verdict = await self.truth(self.file.tasks[index], attempt.answer, attempt.steps or ())
        if verdict is None and isinstance(self.truth, GoldTruth):
            blind = self.file.golds[index].form == "none" and _NONSENSE in attempt.answer
            return attempt.wrong is True or blind
        return verdict is False

    async def plan(self, index: int, strategies: Sequence[Strategy], *, audited: bool = False) -> list[_Plan]:
        """The attempts at one task that are known to be wrong; the ``audited`` ones, where queries count untried."""
        task, gold = self.file.tasks[index], self.file.golds[index]
        texts = [value for name, value in task.items() if isinstance(value, str) and name not in _NO_TEXTS]
        context = Context(
            task=task,
            index=index,
            file=self.file,
            gold=gold,
            wrongs=self.wrong_golds(index),
            code_texts=self._texts,
            columns=[text for text in texts if not gold.text or plain(gold.text) not in plain(text)],
            rng=self.rng,
        )
        plans: list[_Plan] = []
        for strategy in strategies:
            for attempt in await asyncio.to_thread(list[AttackAnswer], strategy.answers(context)):
                if audited and attempt.variant not in AUDITED[strategy.name]:
                    continue
                if (audited and gold.form == "sql") or await self.is_wrong(index, attempt):
                    plans.append((strategy, attempt, index))
                else:
                    self.unknown += 1
        return plans

    def thin(self, plans: list[_Plan], most: int) -> list[_Plan]:
        """At most ``most`` of the attempts: each variant on the fewest tasks that count, then on more."""
        if most >= len(plans):
            return plans
        seen, rounds = Counter[tuple[str, str]](), []
        for plan in plans:
            key = (plan[0].name, plan[1].variant)
            rounds.append((seen[key] // _LEAST_TASKS, self.rng.random(), plan))
            seen[key] += 1
        # Whole variants: one on fewer tasks does not count.
        first = [plan for *_, plan in sorted(rounds, key=lambda row: (row[0], row[2][0].name, row[2][1].variant))]
        return first[: max(0, most)]

    async def score_all(
        self, plans: Sequence[_Plan], deadline: float = math.inf, on_end: Callable[[], None] = lambda: None
    ) -> list[_Scored]:
        """The scores of attempts; those after the deadline are left out. ``on_end`` is called after each."""
        known: dict[tuple[int, str, str], asyncio.Task[float | None]] = {}
        late = 0

        async def one(plan: _Plan) -> _Scored | None:
            nonlocal late
            strategy, attempt, index = plan
            steps = await self.steps(index, attempt.answer) if attempt.steps is None else attempt.steps
            key = (index, attempt.answer, repr(steps))
            if time.monotonic() > deadline and key not in known:
                late += 1
                return None
            if key not in known:
                known[key] = asyncio.ensure_future(self.call(index, attempt.answer, steps))
            value = await known[key]
            return _Scored(strategy, attempt, index, steps, self.floor(index) if value is None else value)

        scored = await map_concurrently(one, plans, on_end=on_end)
        self.notes += [f"{late:,} answers were not scored: the time was over"] if late else []
        return [row for row in scored if row is not None]

    def pay(self, row: _Scored) -> float:
        """What a wrong answer earns of what the right one earns, 0 to 1."""
        floor, best = self.floor(row.task), self.best(row.task)
        return min(1.0, max(0.0, (row.value - floor) / (best - floor)))

    async def pays(self, answers: Answers) -> list[float]:
        """What answers earn, 0 unless known to be wrong. Raises :class:`RewardError` near the end of the calls."""
        if self.max_calls is not None and self.calls + len(answers) > _LEARNING_CALLS * self.max_calls:
            raise RewardError("the budget of calls is spent")

        async def one(answer: tuple[int, str]) -> float:
            index, attempt = answer[0], AttackAnswer(answer[1])
            value = await self.call(index, attempt.answer) if await self.is_wrong(index, attempt) else None
            return 0.0 if value is None else self.pay(_Scored(AGAIN, attempt, index, (), value))

        return await map_concurrently(one, answers)

    def lessons(self, scored: Sequence[_Scored], indices: Sequence[int]) -> list[tuple[int, str]]:
        """Short answers of strategies: the best-paid, and as many others. What has parts of a task's gold is a lesson
        for the next task.
        """
        following = dict(zip(indices, [*indices[1:], *indices[:1]], strict=True))
        short = [row for row in scored if row.task in following and len(row.attempt.answer) <= _LESSON]
        paid = sorted((row for row in short if self.pay(row) > 0), key=self.pay, reverse=True)[:_LESSONS]
        lessons = []
        for row in (*paid, *self.rng.sample(short, min(_LESSONS, len(short)))):
            gold, answer = self.file.golds[row.task], row.attempt.answer
            texts = [*gold.answers.values(), *(gold.value if gold.form == "list" else ())]
            own = gold.form in ("sql", "code") or any(plain(text) in plain(answer) for text in texts)
            lessons.append((following[row.task] if own else row.task, answer))
        return lessons

    def findings(self, scored: Sequence[_Scored]) -> Iterator[Finding]:
        """What is wrong with the scores of golds and other answers. Runs gold queries."""
        fails = dict[int, bool]()
        for index, (task, gold) in enumerate(zip(self.file.tasks, self.file.golds, strict=True)):
            text, right = gold.answers.get(self._form, gold.text), self._right.get(index)
            fails[index] = gold.form != "none" and right is None
            kind = GOLD_FAILS if fails[index] else GOLD_UNPAID if right is not None and right <= 0 else ""
            if not kind and gold.form == "sql" and self._make_steps is query_steps:
                kind = NO_ROWS if query_steps(task, text)[0]["output"] == "[]" else ""
            if kind:
                yield Finding(str(task["id"]), kind, "gold", text, right, right, self.errors.get((index, text), ""))
        for strategy, attempt, index, _, value in sorted((*self._again, *scored), key=lambda row: row.task):
            error, best = self.errors.get((index, attempt.answer), ""), self.best(index)
            wins = best > 0 and value >= best - _TOLERANCE
            kind = REWARD_FAILS if error else AUDITED[strategy.name][attempt.variant] if wins else ""
            if kind and not fails[index]:
                told = (str(self.file.tasks[index]["id"]), kind, attempt.variant or strategy.name, attempt.answer)
                yield Finding(*told, None if error else value, best, error)

    def results(self, scored: Sequence[_Scored], tasks: int, *, by_variant: bool = False) -> list[StrategyResult]:
        """The strategies, each with its best-paid variant, or with every one; the best-paid first."""
        rows: dict[tuple[str, str], dict[str, list[_Scored]]] = defaultdict(lambda: defaultdict(list))
        for row in (*self._again, *scored):
            if self.best(row.task) > self.floor(row.task) + _TOLERANCE:
                rows[row.strategy.name, row.attempt.variant if by_variant else ""][row.attempt.variant].append(row)
        least = max(_LEAST_TASKS if tasks >= _FEW_TASKS else 1, round(_LEAST_SHARE * tasks))
        results = []
        for (name, _), variants in rows.items():
            pays = {variant: fmean(map(self.pay, same)) for variant, same in variants.items() if len(same) >= least}
            if pays:
                variant = max(pays, key=pays.__getitem__)
                paid = sorted(variants[variant], key=self.pay, reverse=True)
                told: dict[str, Any] = {"name": name, "variant": variant, "fix": paid[0].strategy.fix}
                examples = [self._example(row) for row in paid[:_EXAMPLES] if pays[variant] > 0]
                results.append(StrategyResult(**told, pay=round(pays[variant], 4), tasks=len(paid), examples=examples))
        return sorted(results, key=lambda result: (-result.pay, result.name != AGAIN.name))

    def _example(self, row: _Scored) -> AttackExample:
        told: dict[str, Any] = {"task": str(self.file.tasks[row.task]["id"]), "right_score": self.best(row.task)}
        return AttackExample(**told, answer=row.attempt.answer, steps=list(row.steps), score=row.value)

    def nothing_to_attack(self, tasks: int) -> str:
        """Why an attack has nothing to say."""
        if not self._right and self.errors:
            return f"no right answer could be scored: {Counter(self.errors.values()).most_common(1)[0][0]}"
        return (
            f"no right answer to {tasks} tasks scores more than the least, {max(self._right.values(), default=0):g}: "
            "the reward may need the steps or the state of a real agent, or its gold is in another column"
        )
