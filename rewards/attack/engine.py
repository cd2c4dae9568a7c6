"""Lets strategies make answers, and scores those that are known to be wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from statistics import fmean
from typing import Any, NamedTuple

from groundwire.rewards._columns import names_read
from groundwire.rewards._types import Reward, RewardError, declared_range
from groundwire.rewards.attack.forms import GoldFile, plain
from groundwire.rewards.attack.result import AttackResult, Example, StrategyResult
from groundwire.rewards.attack.strategies import STRATEGIES, Attempt, Context, Strategy, step
from groundwire.rewards.attack.truth import GoldTruth, Truth
from groundwire.rewards.audit import Score, map_concurrently, score
from groundwire.tools.sql.answers import SQL
from groundwire.tools.types import TEXT, AgentStep, AnswerKind

_PILOT = 6
"""Tasks that are tried first: what a call takes, the form of right answers, chance, state."""
_NEIGHBOURS, _WRONGS, _EXAMPLES, _MOST_TEXTS, _LONGEST_TEXT = 300, 6, 3, 40, 300
_TOLERANCE = 1e-9
_LEAST_SHARE, _LEAST_TASKS = 0.05, 3
"""A strategy counts if its answer is known to be wrong for so many of the attacked tasks."""
_NONSENSE = "The zorblax quembles 7919 vints."
_AGAIN = Strategy(
    "the same wrong answer again, after a right one",
    "a score must depend on task, answer and steps alone: make the cache's key of all of them, or keep none",
    lambda _: (),
)
_Steps = tuple[AgentStep, ...]
_STEPS: tuple[Callable[[str], _Steps], ...] = (
    lambda answer: (),
    lambda answer: (step(answer, answer), step("", answer, kind="llm")),
)
"""Steps of an honest agent, from its answer; the first ones with which a right answer scores are used."""


class _Scored(NamedTuple):
    strategy: Strategy
    attempt: Attempt
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
) -> AttackResult:
    """Attack ``reward`` on at most ``limit`` of ``tasks``, each with an ``id``.

    ``golds`` are the values of the tasks' gold columns, None without one; ``truth`` None is :class:`.GoldTruth`.
    ``name`` and ``source`` go into the result. At most ``max_calls`` answers are scored, for about ``max_seconds``;
    ``on_plan`` gets a line about both before the bulk of them. Raises :class:`rewards.RewardError` if no right
    answer scores more than a wrong one, as there is nothing to attack then.
    """
    started = time.monotonic()
    file = GoldFile(tasks, golds, is_sql=answers is SQL)
    run = _Attack(file, reward, truth or GoldTruth(file), random.Random(seed), max_calls)
    chosen = run.choose(limit)
    seconds_of_call = await run.pilot(chosen[:_PILOT])
    planned = [plan for index in chosen for plan in await run.plan(index, strategies)]
    done = len(run.floors)
    most = int(max(1.0, max_seconds - (time.monotonic() - started)) / max(seconds_of_call, 1e-6))
    most = most if max_calls is None else min(most, max(0, max_calls - run.calls - len(chosen)))
    kept, note = planned, ""
    if len(planned) > most:
        kept = run.thin(planned, most)
        note = f"only {len(kept):,} of {len(planned):,} answers, {max_seconds:.0f} s or the budget of calls; "
    on_plan(
        f"{note}{len(kept) + len(chosen) - done:,} calls of the reward on {len(chosen):,} tasks, "
        f"about {max(1, len(kept) * seconds_of_call):,.0f} s ({seconds_of_call * 1000:,.3g} ms each)"
    )
    await run.score_right(chosen[_PILOT:])
    if not any(run.is_usable(index) for index in chosen):
        raise RewardError(run.nothing_to_attack(chosen))
    scored = await run.score_all(kept, started + max_seconds * 1.2)
    results = run.results(scored, len(chosen))
    share = run.unknown / max(1, run.unknown + len(planned))
    notes = [*run.notes, *([f"{note.rstrip('; ')} were tried"] if note else [])]
    return AttackResult(
        reward=name,
        source=source,
        truth=run.truth.how,
        tasks=len(chosen),
        calls=run.calls,
        seconds=round(time.monotonic() - started, 1),
        failed=run.failed,
        unknown=round(share, 4),
        strategies=results,
        notes=notes,
    )


class _Attack:
    """The state of one attack. Tasks are indices of ``file``."""

    def __init__(self, file: GoldFile, reward: Reward, truth: Truth, rng: random.Random, max_calls: int | None) -> None:
        self.file, self.reward, self.truth, self.rng, self.max_calls = file, reward, truth, rng, max_calls
        self.golds = GoldTruth(file)
        self.calls = self.failed = self.unknown = 0
        self.notes: list[str] = []
        self.right: dict[int, float] = {}
        """The score of the right answer."""
        self.floors: dict[int, float] = {}
        self.again: list[_Scored] = []
        self._errors: list[str] = []
        self._forms, self._steps = [""], _STEPS[0]
        texts = [text for text in names_read(reward) if text.strip() and len(text) <= _LONGEST_TEXT]
        self._texts = sorted(texts, key=lambda text: (text.isidentifier(), text))[:_MOST_TEXTS]

    def choose(self, limit: int) -> list[int]:
        """The tasks to attack: those first in which case or order decide, up to a third."""
        indices = self.rng.sample(range(len(self.file.golds)), len(self.file.golds))
        special = [i for i in indices if self.file.case_matters(i) or self.file.order_matters(i)][: max(1, limit // 3)]
        chosen = [*special, *(index for index in indices if index not in set(special))][:limit]
        return self.rng.sample(chosen, len(chosen))

    async def call(self, index: int, answer: str, steps: _Steps) -> Score:
        """Score an answer; remembers the least score of each task."""
        self.calls += 1
        scored = await score(self.reward, dict(self.file.tasks[index]), answer, [*steps])
        if scored.value is None:
            self.failed += 1
            self._errors.append(scored.error)
        else:
            least = self.floors.get(index, declared_range(self.reward)[0])
            self.floors[index] = min(least, scored.value)
        return scored

    def wrong_golds(self, index: int) -> list[str]:
        """Golds of other tasks that are wrong for this one, the most similar first."""
        gold, texts = self.file.golds[index], {other.text: None for other in self.file.golds}
        others = [text for text in texts if text and text != gold.text]
        others = self.rng.sample(others, min(_NEIGHBOURS, len(others)))
        if gold.form != "sql":
            others = [text for text in others if self.golds.verdict(index, text) is False]
        invented = {"number": f"{gold.value * 3 + 17:g}" if gold.form == "number" else "", "list": '["zxqwv"]'}
        others.sort(key=lambda text: -SequenceMatcher(None, gold.text[:100], text[:100]).quick_ratio())
        near = others[: _WRONGS - 1]
        return [*near, *others[len(near) :][-1:]] or [invented.get(gold.form) or _NONSENSE]

    async def pilot(self, indices: Sequence[int]) -> float:
        """Find out how right answers score on a few tasks; the seconds that a call takes, others beside it."""
        before = {index: await self.call(index, self.wrong_golds(index)[-1], ()) for index in indices}
        started, calls = time.monotonic(), self.calls
        forms: dict[tuple[int, str], list[float]] = defaultdict(list)
        for number, make_steps in enumerate(_STEPS):
            jobs = [(i, form, text) for i in indices for form, text in self.file.golds[i].answers.items()]

            async def one(job: tuple[int, str, str], make: Callable[[str], _Steps] = make_steps) -> Score:
                return await self.call(job[0], job[2], make(job[2]))

            scores = await map_concurrently(one, jobs, on_end=lambda: None)
            for (index, form, _), scored in zip(jobs, scores, strict=True):
                if scored.value is not None:
                    forms[number, form].append(scored.value)
                    self.right[index] = max(self.right.get(index, scored.value), scored.value)
            if any(self.is_usable(index) for index in indices):
                break
        seconds = (time.monotonic() - started) / max(1, self.calls - calls)
        ranked = sorted(forms, key=lambda key: (-fmean(forms[key]), key[0]))
        if ranked:
            best = ranked[0]
            self._steps = _STEPS[best[0]]
            self._forms = list(dict.fromkeys([best[1], "as it is"]))
            top = fmean(forms[best])
            refused = [form for (_, form), values in forms.items() if fmean(values) < top / 2]
            if refused:
                self.notes.append(f"right answers that score less than half: {', '.join(map(repr, refused[:8]))}")
        await self._look_for_chance_and_state(indices, before)
        return seconds

    async def _look_for_chance_and_state(self, indices: Sequence[int], before: Mapping[int, Score]) -> None:
        random_tasks = 0
        for index in indices:
            text = self.right_text(index)
            twice = [(await self.call(index, text, self._steps(text))).value for _ in range(2)]
            random_tasks += twice[0] != twice[1]
        for index in indices:
            wrong = self.wrong_golds(index)[-1]
            after = await self.call(index, wrong, ())
            first = before[index].value
            known = await self.is_wrong(index, Attempt(wrong))
            if known and after.value is not None and first is not None:
                self.again.append(_Scored(_AGAIN, Attempt(wrong), index, (), after.value - first + self.floors[index]))
        if random_tasks:
            self.notes.append(
                f"the reward is random: two scores of one answer differ in {random_tasks} of {len(indices)} tasks"
            )

    def right_text(self, index: int) -> str:
        """The right answer in the form that scores best."""
        answers = self.file.golds[index].answers
        return next((answers[form] for form in self._forms if form in answers), self.file.golds[index].text)

    async def score_right(self, indices: Sequence[int]) -> None:
        """Score the right answers of the other tasks."""

        async def one(index: int) -> None:
            answers = self.file.golds[index].answers
            for form in self._forms:
                text = answers.get(form, self.file.golds[index].text)
                if (value := (await self.call(index, text, self._steps(text))).value) is not None:
                    self.right[index] = max(self.right.get(index, value), value)

        await map_concurrently(one, indices, on_end=lambda: None)

    def best(self, index: int) -> float | None:
        """The score of a right answer; without a gold, the greatest that the reward declares."""
        if self.file.golds[index].form == "none":
            return max(declared_range(self.reward)[1], self.right.get(index, 0.0))
        return self.right.get(index)

    def is_usable(self, index: int) -> bool:
        """Whether a right answer scores more than the least."""
        best = self.best(index)
        return best is not None and best > self.floors.get(index, best) + _TOLERANCE

    async def is_wrong(self, index: int, attempt: Attempt) -> bool:
        """Whether the answer is known to be wrong."""
        verdict = await self.truth(self.file.tasks[index], attempt.answer, attempt.steps or ())
        if verdict is None and isinstance(self.truth, GoldTruth):
            invented = self.file.golds[index].form == "none" and _NONSENSE in attempt.answer
            return attempt.wrong is True or invented
        return verdict is False

    async def plan(self, index: int, strategies: Sequence[Strategy]) -> list[tuple[Strategy, Attempt, int]]:
        """The attempts at one task that are known to be wrong."""
        task, gold = self.file.tasks[index], self.file.golds[index]
        columns = [
            value for key, value in task.items() if isinstance(value, str) and key not in ("id", "db_path", "database")
        ]
        wrongs = self.wrong_golds(index)
        context = Context(
            task=task,
            index=index,
            file=self.file,
            gold=gold,
            wrongs=wrongs,
            steps=self._steps(gold.text),
            code_texts=self._texts,
            columns=[text for text in columns if plain(gold.text) not in plain(text) or not gold.text],
            rng=self.rng,
        )
        plans = []
        for strategy in strategies:
            for attempt in await asyncio.to_thread(list[Attempt], strategy.answers(context)):
                if await self.is_wrong(index, attempt):
                    plans.append((strategy, attempt, index))
                else:
                    self.unknown += 1
        return plans

    def thin(self, plans: list[tuple[Strategy, Attempt, int]], most: int) -> list[tuple[Strategy, Attempt, int]]:
        """At most ``most`` of the attempts: each variant on the fewest tasks that count, then on more."""
        seen: dict[tuple[str, str], int] = defaultdict(int)
        rounds = []
        for plan in plans:
            key = (plan[0].name, plan[1].variant)
            rounds.append((seen[key] // _LEAST_TASKS, self.rng.random(), plan))
            seen[key] += 1
        return [plan for *_, plan in sorted(rounds, key=lambda row: row[:2])[:most]]

    async def score_all(self, plans: Sequence[tuple[Strategy, Attempt, int]], deadline: float) -> list[_Scored]:
        """The scores of attempts; those after the deadline are left out."""
        known: dict[tuple[int, str, str], asyncio.Task[Score]] = {}
        late = 0

        async def one(plan: tuple[Strategy, Attempt, int]) -> _Scored | None:
            nonlocal late
            strategy, attempt, index = plan
            steps = self._steps(attempt.answer) if attempt.steps is None else attempt.steps
            key = (index, attempt.answer, repr(steps))
            if time.monotonic() > deadline and key not in known:
                late += 1
                return None
            if key not in known:
                known[key] = asyncio.ensure_future(self.call(index, attempt.answer, steps))
            value = (await known[key]).value
            return _Scored(strategy, attempt, index, steps, self.floors.get(index, 0.0) if value is None else value)

        scored = await map_concurrently(one, plans, on_end=lambda: None)
        if late:
            self.notes.append(f"{late:,} answers were not scored: the time was over")
        return [row for row in scored if row is not None]

    def pay(self, row: _Scored) -> float:
        """What a wrong answer earns of what the right one earns, 0 to 1."""
        floor, best = self.floors[row.task], self.best(row.task) or 0.0
        return min(1.0, max(0.0, (row.value - floor) / (best - floor))) if best - floor > _TOLERANCE else 0.0

    def results(self, scored: Sequence[_Scored], tasks: int) -> list[StrategyResult]:
        """The strategies, the best-paid first."""
        rows: dict[str, dict[str, list[_Scored]]] = defaultdict(lambda: defaultdict(list))
        for row in (*self.again, *scored):
            if self.is_usable(row.task):
                rows[row.strategy.name][row.attempt.variant].append(row)
        least = min(tasks, max(_LEAST_TASKS, round(_LEAST_SHARE * tasks)))
        results = []
        for name, variants in rows.items():
            pays = {variant: fmean(map(self.pay, same)) for variant, same in variants.items() if len(same) >= least}
            if pays:
                variant = max(pays, key=pays.__getitem__)
                results.append(self._result(name, variant, pays[variant], variants[variant]))
        return sorted(results, key=lambda result: (-result.pay, result.name != _AGAIN.name))

    def _result(self, name: str, variant: str, pay: float, rows: Sequence[_Scored]) -> StrategyResult:
        paid = sorted(rows, key=lambda row: -self.pay(row))[: _EXAMPLES if pay > 0 else 0]
        examples = [
            Example(
                task=str(self.file.tasks[row.task]["id"]),
                answer=row.attempt.answer,
                steps=list(row.steps),
                score=row.value,
                right_score=self.best(row.task) or 0.0,
            )
            for row in paid
        ]
        fix = rows[0].strategy.fix
        return StrategyResult(
            name=name, variant=variant, fix=fix, pay=round(pay, 4), tasks=len(rows), examples=examples
        )

    def nothing_to_attack(self, indices: Sequence[int]) -> str:
        """Why an attack has nothing to say."""
        if self._errors and not self.right:
            return f"no right answer could be scored: {self._errors[0]}"
        best = max(self.right.values(), default=0.0)
        return (
            f"no right answer to {len(indices)} tasks scores more than the least, {best:g}: the reward may need the "
            "steps or the state of a real agent, or the gold is in another column than it reads"
        )
