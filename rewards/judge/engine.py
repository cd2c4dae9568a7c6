"""The judge: from an answer to a verdict, through the cache, within the deadline and the spending cap.

A judge without a verdict abstains (:class:`rewards.JudgeAbstainedError`), which leaves the rollout out of its group. A
number in its place would teach the policy about the judge's network.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from groundwire.rewards._types import JudgeAbstainedError
from groundwire.rewards.judge.cache import JudgeCache, cache_key
from groundwire.rewards.judge.client import JudgeClient, JudgeReply, JudgeRequestError
from groundwire.rewards.judge.facts import presence
from groundwire.rewards.judge.prompt import RESPONSE_FORMAT, UnreadableError, messages, parse_scores, teacher_messages
from groundwire.rewards.judge.settings import CRITERIA, JudgeSettings

T = TypeVar("T")
_Prompt = Callable[..., list[dict[str, str]]]
CONCURRENCY = 32
"""Requests at once, in each process."""
RETRIES = 3
"""Further attempts after a temporary failure: 429, 5xx, a lost connection."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``scores`` has the four criteria, 0 to 1; ``score`` is their weighted mean. Without a model they are the
    precision and the recall of the answer's facts, and their F1."""

    scores: dict[str, float]
    score: float
    spread: float | None = None
    """The largest minus the smallest score of several samples."""


class _LoopState:
    """The connections and locks of one event loop."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.client = None if settings.model is None else JudgeClient(settings)
        self.teacher = None if settings.teacher is None else JudgeClient(settings.of_teacher(), role="teacher")
        self.slots = asyncio.Semaphore(CONCURRENCY)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())


class Judge:
    """Scores answers with ``settings``. Use :meth:`of`: one judge for each settings in a process."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._cache = JudgeCache(settings.cache)
        self._loop_states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, settings: JudgeSettings) -> Judge:
        """The judge of these settings, whose callers share connections and the limit of concurrent requests."""
        return cls(settings)

    async def verdict(self, *, question: str, reference: str, answer: str) -> Verdict:
        """Score ``answer``; an empty ``reference`` is none.

        Raises :class:`rewards.JudgeAbstainedError`, after ``deadline_s`` at the latest.
        """
        settings = self._settings
        if settings.model is None:
            facts = presence(answer, reference=reference, question=question)
            return Verdict(scores=facts._asdict(), score=facts.f1)
        state = self._loop_states.setdefault(asyncio.get_running_loop(), _LoopState(settings))
        prompt = functools.partial(messages, question=question, reference=reference, answer=answer)
        orders = (False, True) if settings.swap_order else (False,)
        work = [
            asyncio.ensure_future(self._scores(functools.partial(prompt, swapped=swapped), sample, state))
            for sample in range(settings.samples)
            for swapped in orders
        ]
        try:
            samples = await self._in_time(asyncio.gather(*work), f"the judge {settings.model} gave no verdict")
        finally:
            for future in work:
                future.cancel()
        scores = {name: sum(sample[name] for sample in samples) / len(samples) for name in CRITERIA}
        means = [settings.weighted(sample) for sample in samples]
        spread = max(means) - min(means) if len(means) > 1 else None
        return Verdict(scores=scores, score=settings.weighted(scores), spread=spread)

    async def reference(self, question: str) -> str:
        """The teacher's answer to ``question``: asked for once, then in the cache, for all processes and runs.

        Raises :class:`rewards.JudgeAbstainedError`, after ``deadline_s`` at the latest.
        """
        settings = self._settings
        state = self._loop_states.setdefault(asyncio.get_running_loop(), _LoopState(settings))
        request = teacher_messages(question)
        about = {"teacher": settings.teacher, "base_url": settings.teacher_base_url, "messages": request}
        key = cache_key({**about, "temperature": settings.temperature, "max_tokens": settings.max_tokens})

        async def taught() -> str:
            async with state.lock(key):
                if (cached := await asyncio.to_thread(self._cache.reply, key)) is not None:
                    return cached.strip()
                text = (await self._reply(request, state, teacher=True)).text
                if text.strip():
                    await asyncio.to_thread(self._cache.store, key, model=str(settings.teacher), reply=text)
                return text.strip()

        text = await self._in_time(taught(), f"the teacher {settings.teacher} gave no answer")
        if not text:
            raise JudgeAbstainedError(f"the teacher {settings.teacher} gave an empty answer")
        return text

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

    async def _scores(self, prompt: _Prompt, sample: int, state: _LoopState) -> dict[str, float]:
        """The scores of one sample: from the cache, or from a reply, which is requested twice if it is unreadable."""
        settings = self._settings
        about: dict[str, Any] = {"model": settings.model, "base_url": settings.base_url}
        about |= {"messages": prompt(fence="FENCE"), "response_format": RESPONSE_FORMAT, "sample": sample}
        key = cache_key({**about, "temperature": settings.temperature, "max_tokens": settings.max_tokens})
        async with state.lock(key):  # concurrent callers with the same request wait for one reply
            cached = await asyncio.to_thread(self._cache.reply, key)
            with suppress(UnreadableError):  # an older version could read more
                if cached is not None:
                    return parse_scores(cached)
            problem = ""
            for _ in range(2):
                reply = await self._reply(prompt(fence=secrets.token_hex(16), unreadable=problem), state)
                try:
                    scores = parse_scores(reply.text)
                except UnreadableError as error:
                    problem = str(error)
                    continue
                await asyncio.to_thread(self._cache.store, key, model=str(settings.model), reply=reply.text)
                return scores
        raise JudgeAbstainedError(f"the judge {settings.model} gave no verdict in two replies: {problem}")

    async def _reply(self, request: list[dict[str, str]], state: _LoopState, *, teacher: bool = False) -> JudgeReply:
        """One reply, with retries after transient failures."""
        pause_s, attempts = _FIRST_PAUSE_S, RETRIES + 1
        for attempt in range(1, attempts + 1):
            try:
                async with state.slots:
                    client = state.teacher if teacher else state.client
                    assert client is not None
                    return await self._paid_reply(request, client, structured=not teacher)
            except JudgeRequestError as error:
                if not error.transient or attempt == attempts:
                    count = f" (asked {attempt} times)" if attempt > 1 else ""
                    raise JudgeAbstainedError(f"{error}{count}") from error
                wait_s = max(error.retry_after_s, pause_s * random.uniform(0.5, 1.0))
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    async def _paid_reply(self, request: list[dict[str, str]], client: JudgeClient, *, structured: bool) -> JudgeReply:
        """One reply, counted against the caps."""
        settings = self._settings
        cost = await client.max_cost(request)
        await asyncio.to_thread(self._cache.reserve, cost, max_calls=settings.max_calls, max_usd=settings.max_usd)
        try:
            reply = await client.ask(request, structured=structured)
        except JudgeRequestError as error:
            if not error.billed:
                await asyncio.to_thread(self._cache.settle, cost, 0.0)
            raise
        if reply.usd is not None:
            await asyncio.to_thread(self._cache.settle, cost, reply.usd)
        return reply
