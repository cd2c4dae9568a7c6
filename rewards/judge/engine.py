"""The judge: from an answer to a verdict, through the cache, within the deadline and the spending cap.

A judge without a verdict abstains (:class:`rewards.JudgeAbstainedError`), which leaves the rollout out of its group. A
number in its place would teach the policy about the judge's network.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from groundwire.rewards._types import JudgeAbstainedError, all_of
from groundwire.rewards.judge.cache import JudgeCache, cache_key
from groundwire.rewards.judge.client import JudgeClient, JudgeRequestError
from groundwire.rewards.judge.facts import presence
from groundwire.rewards.judge.prompt import UnreadableError, messages, parse_scores, response_format, teacher_messages
from groundwire.rewards.judge.settings import CRITERIA, JudgeSettings

T = TypeVar("T")
Messages = list[dict[str, str]]
CONCURRENCY = 32
"""Requests at once, in each process."""
PAUSES_S = (0.5, 1.0, 2.0)
"""Before further attempts after a temporary failure: 429, 5xx, a lost connection."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``scores`` has the four criteria, 0 to 1; ``score`` is their weighted mean. Without a model they are the
    precision and the recall of the answer's facts, and their F1."""

    scores: dict[str, float]
    score: float
    spread: float | None = None
    """The largest minus the smallest score of several samples."""


class Judge:
    """Scores answers with ``settings``, on one event loop. Use :meth:`of`: one judge for each settings and loop."""

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[JudgeSettings, Judge]] = WeakKeyDictionary()

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._cache = JudgeCache(settings.cache)
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @functools.cached_property
    def _client(self) -> JudgeClient:
        return JudgeClient(self._settings)

    @functools.cached_property
    def _teacher(self) -> JudgeClient:
        return JudgeClient(self._settings, teacher=True)

    @classmethod
    def of(cls, settings: JudgeSettings) -> Judge:
        """The judge of these settings, whose callers share connections and the limit of concurrent requests."""
        judges = cls._of_loops.setdefault(asyncio.get_running_loop(), {})
        return judges.setdefault(settings, cls(settings))

    async def verdict(self, *, question: str, reference: str, answer: str) -> Verdict:
        """Score ``answer``; an empty ``reference`` is none.

        Raises :class:`rewards.JudgeAbstainedError`, after ``deadline_s`` at the latest.
        """
        settings = self._settings
        if settings.model is None:
            facts = presence(answer, reference=reference, question=question)
            return Verdict(scores=facts._asdict(), score=facts.f1)
        prompt = functools.partial(messages, question=question, reference=reference, answer=answer)
        orders = (False, True) if settings.swap_order else (False,)
        work = [
            self._scores(functools.partial(prompt, swapped=swapped), sample)
            for sample in range(settings.samples)
            for swapped in orders
        ]
        samples = await self._in_time(all_of(work), f"{self._client.name} gave no verdict")
        scores = {name: sum(sample[name] for sample in samples) / len(samples) for name in CRITERIA}
        means = [settings.weighted(sample) for sample in samples]
        spread = max(means) - min(means) if len(means) > 1 else None
        return Verdict(scores=scores, score=settings.weighted(scores), spread=spread)

    async def compare(self, *, question: str, answers: Sequence[str]) -> dict[str, tuple[int, float]]:
        """For each of ``answers``, which differ: how many it beats less those that beat it, over all samples, and
        the share of its comparisons in which the two orders contradict each other. Raises as :meth:`verdict`.
        """
        if len(answers) == 1:
            return {answers[0]: (0, 0.0)}
        work, standings = [], {}
        for sample in range(self._settings.samples):
            order = random.Random(cache_key([sample, question, *answers])).sample(answers, len(answers))
            work += [self._compared(question, places, sample) for places in (order, order[::-1])]
        scores = await self._in_time(all_of(work), f"{self._client.name} gave no verdict")
        for answer in answers:
            gaps = [
                [of_order[answer] - of_order[rival] for of_order in both]
                for both in zip(scores[::2], scores[1::2], strict=True)
                for rival in answers
                if rival != answer
            ]
            won = sum((min(gap) > 0) - (max(gap) < 0) for gap in gaps)
            standings[answer] = won, sum(min(gap) < 0 < max(gap) for gap in gaps) / len(gaps)
        return standings

    async def _compared(self, question: str, answers: Sequence[str], sample: int) -> dict[str, float]:
        named = {f"answer_{place}": answer for place, answer in enumerate(answers, 1)}
        prompt = functools.partial(messages, question=question, answer=named)
        scores = await self._scores(prompt, sample, list(named))
        return {named[name]: score for name, score in scores.items()}

    async def reference(self, question: str) -> str:
        """The teacher's answer to ``question``: asked for once, then in the cache, for all processes and runs.

        Raises :class:`rewards.JudgeAbstainedError`, after ``deadline_s`` at the latest.
        """
        client, request = self._teacher, teacher_messages(question)
        identity: dict[str, object] = {
            "teacher": self._settings.teacher,
            "base_url": self._settings.teacher_base_url,
            "messages": request,
        }

        def read(text: str) -> str:
            if not text.strip():
                raise JudgeAbstainedError(f"{client.name} gave an empty answer")
            return text.strip()

        return await self._in_time(
            self._ask(client, identity, lambda _: request, read), f"{client.name} gave no answer"
        )

    async def _scores(
        self, prompt: Callable[..., Messages], sample: int, names: Sequence[str] = CRITERIA
    ) -> dict[str, float]:
        settings, read = self._settings, functools.partial(parse_scores, names=names)
        identity: dict[str, object] = {
            "model": settings.model,
            "base_url": settings.base_url,
            "messages": prompt(fence="FENCE"),
        }
        identity |= {"response_format": response_format(names), "sample": sample}

        def request(problem: str) -> Messages:
            return prompt(fence=secrets.token_hex(16), unreadable=problem)

        return await self._ask(self._client, identity, request, read)

    async def _in_time(self, work: Awaitable[T], problem: str) -> T:
        """What ``work`` returns within the deadline."""
        deadline_s = self._settings.deadline_s
        try:
            return await asyncio.wait_for(work, deadline_s)
        except asyncio.TimeoutError as error:
            raise JudgeAbstainedError(
                f"{problem} within its deadline of {deadline_s:g} s, including the wait for one of {CONCURRENCY} "
                "concurrent requests"
            ) from error

    async def _ask(
        self,
        client: JudgeClient,
        identity: dict[str, object],
        request: Callable[[str], Messages],
        read: Callable[[str], T],
    ) -> T:
        """What ``read`` makes of a reply: of the cache's for ``identity``, or of the model's.

        ``request`` makes the messages; it gets the problem of the last reply. The model is asked twice if ``read``
        raises :class:`UnreadableError`.
        """
        settings, problem = self._settings, ""
        key = cache_key({**identity, "temperature": settings.temperature, "max_tokens": settings.max_tokens})
        async with self._locks.setdefault(key, asyncio.Lock()):  # the same request waits for one reply
            with suppress(UnreadableError):  # an older version could read more
                if (cached := await asyncio.to_thread(self._cache.reply, key)) is not None:
                    return read(cached)
            for _ in range(2):
                reply = await self._reply(client, request(problem), identity.get("response_format"))
                try:
                    value = read(reply)
                except UnreadableError as error:
                    problem = str(error)
                    continue
                await asyncio.to_thread(self._cache.store, key, model=str(client.model), reply=reply)
                return value
        raise JudgeAbstainedError(f"{client.name} gave no verdict in two replies: {problem}")

    async def _reply(self, client: JudgeClient, request: Messages, form: object) -> str:
        """One reply, counted against the caps, with retries after transient failures."""
        settings, cost, attempts = self._settings, await client.max_cost(request), 0
        reserve = functools.partial(self._cache.reserve, max_calls=settings.max_calls, max_usd=settings.max_usd)
        while True:
            attempts += 1
            async with self._slots:
                await asyncio.to_thread(reserve, cost)
                try:
                    reply, usd = await client.ask(request, form)
                    if usd is not None:
                        await asyncio.to_thread(self._cache.settle, cost, usd)
                    return reply
                except JudgeRequestError as error:
                    failure = error
                if not failure.billed:
                    await asyncio.to_thread(self._cache.settle, cost, 0.0)
            if not failure.transient or attempts > len(PAUSES_S):
                count = f" (asked {attempts} times)" if attempts > 1 else ""
                raise JudgeAbstainedError(f"{failure}{count}") from failure
            await asyncio.sleep(max(failure.retry_after_s, PAUSES_S[attempts - 1] * random.uniform(0.5, 1.0)))
