"""From an answer to a verdict: asked for in time, within the cap, once for the same question, or not at all.

A judge that cannot say anything abstains (:class:`rewards.JudgeAbstainedError`), which leaves the rollout out of its
group. Any number in its place would be a lesson about the judge's network, and the policy would learn it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from groundwire.rewards._types import JudgeAbstainedError
from groundwire.rewards.judge.cache import JudgeCache, key_of
from groundwire.rewards.judge.client import JudgeClient, JudgeRequestError, Reply
from groundwire.rewards.judge.grader import grade
from groundwire.rewards.judge.prompt import RESPONSE_FORMAT, UnreadableError, messages, read_scores
from groundwire.rewards.judge.settings import CRITERIA, JudgeSettings

__all__ = ["Judge", "Verdict"]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``scores`` has the four criteria, 0 to 1; ``score`` is their weighted mean."""

    scores: dict[str, float]
    score: float
    spread: float | None = None
    """Largest less smallest score, where more than one was asked for."""


class Judge:
    """Scores answers as ``settings`` say. One for each settings and process: :meth:`of`."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._cache = JudgeCache(settings.cache)
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, _Room] = WeakKeyDictionary()

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, settings: JudgeSettings) -> Judge:
        """The judge of these settings: those who share it share its connections and its turn."""
        return cls(settings)

    async def verdict(self, *, question: str, reference: str, answer: str) -> Verdict:
        """Score ``answer``. Raises :class:`rewards.JudgeAbstainedError`, after ``deadline_s`` at the latest."""
        settings = self._settings
        if settings.model is None:
            scores = grade(answer, reference=reference, question=question)
            return Verdict(scores=scores, score=settings.weighted(scores))
        loop = asyncio.get_running_loop()
        room = self._rooms.setdefault(loop, _Room(settings))
        orders = (False, True) if settings.swap else (False,)
        asked = [_Asked(question, reference, answer, swapped, n) for n in range(settings.samples) for swapped in orders]
        work = [asyncio.ensure_future(self._scores(each, room)) for each in asked]
        try:
            found = await asyncio.wait_for(asyncio.gather(*work), settings.deadline_s)
        except asyncio.TimeoutError as error:
            raise JudgeAbstainedError(
                f"the judge {settings.model} gave no verdict within its deadline of {settings.deadline_s:g} s, "
                f"waiting for one of {settings.concurrency} turns included"
            ) from error
        finally:
            for task in work:
                task.cancel()
        return self._mean(found)

    def _mean(self, found: Sequence[dict[str, float]]) -> Verdict:
        scores = {name: sum(each[name] for each in found) / len(found) for name in CRITERIA}
        each = [self._settings.weighted(one) for one in found]
        spread = max(each) - min(each) if len(each) > 1 else None
        return Verdict(scores=scores, score=self._settings.weighted(scores), spread=spread)

    async def _scores(self, asked: _Asked, room: _Room) -> dict[str, float]:
        key = self._key(asked)
        async with room.lock(key):  # who asks the same at the same time waits for the one reply
            kept = await asyncio.to_thread(self._cache.reply, key)
            if kept is not None:
                return read_scores(kept)
            why = ""
            for _ in range(2):
                reply = await self._reply(asked.messages(secrets.token_hex(16), unreadable=why), room)
                try:
                    scores = read_scores(reply.text)
                except UnreadableError as error:
                    why = str(error)
                    continue
                await asyncio.to_thread(self._cache.store, key, model=str(self._settings.model), reply=reply.text)
                return scores
        raise JudgeAbstainedError(f"the judge {self._settings.model} gave no verdict in two replies: {why}")

    async def _reply(self, request: list[dict[str, str]], room: _Room) -> Reply:
        """One reply, tried for again where that can help."""
        settings, pause_s = self._settings, _FIRST_PAUSE_S
        for left in range(settings.retries, -1, -1):
            try:
                async with room.turn:
                    return await self._paid(request, room.client)
            except JudgeRequestError as error:
                if not error.again or not left:
                    tries = settings.retries - left + 1
                    raise JudgeAbstainedError(f"{error}" + (f" (asked {tries} times)" if tries > 1 else "")) from error
                wait_s = max(error.after_s, pause_s * random.uniform(0.5, 1.0))
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    async def _paid(self, request: list[dict[str, str]], client: JudgeClient) -> Reply:
        settings = self._settings
        most = await client.most(request)
        await asyncio.to_thread(self._cache.reserve, most, max_calls=settings.max_calls, max_usd=settings.max_usd)
        try:
            reply = await client.ask(request)
        except JudgeRequestError as error:
            if not error.paid:
                await asyncio.to_thread(self._cache.settle, most, 0.0)
            raise
        if reply.usd is not None:
            await asyncio.to_thread(self._cache.settle, most, reply.usd)
        return reply

    def _key(self, asked: _Asked) -> str:
        settings = self._settings
        return key_of(
            {
                "model": settings.model,
                "base_url": settings.base_url,
                "messages": asked.messages("FENCE"),
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
                "response_format": RESPONSE_FORMAT,
                "sample": asked.sample,
            }
        )


@dataclass(frozen=True)
class _Asked:
    question: str
    reference: str
    answer: str
    swapped: bool
    sample: int

    def messages(self, fence: str, *, unreadable: str = "") -> list[dict[str, str]]:
        return messages(
            question=self.question,
            reference=self.reference,
            answer=self.answer,
            fence=fence,
            swapped=self.swapped,
            unreadable=unreadable,
        )


class _Room:
    """What requests of one event loop share."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.client = JudgeClient(settings)
        self.turn = asyncio.Semaphore(settings.concurrency)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, key: str) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
