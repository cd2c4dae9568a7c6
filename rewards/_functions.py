"""A user's function as a reward: sync or async, with or without the agent's steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from groundwire.rewards._range import declared_range
from groundwire.rewards._types import Reward, RewardError, UnusableRewardError
from groundwire.tools.daemon_threads import in_thread
from groundwire.tools.types import AgentStep

__all__ = ["reward_function", "with_time_limit"]


def reward_function(function: Callable[..., Any]) -> Reward:
    """The reward that calls ``function`` with ``(task, answer, steps)``, or without the steps if it takes two.

    A plain function may block: each call has its own thread. Raises :class:`UnusableRewardError`.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or inspect.isclass(function):
        raise UnusableRewardError(f"reward {name!r} is no function; write it as: def reward(task, answer)")
    count = _argument_count(function, name)
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004

    @wraps(function)
    async def reward(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        arguments = (task, answer, steps)[:count]
        if is_async:
            return await function(*arguments)

        def call() -> Any:
            try:
                return function(*arguments)
            except StopIteration as error:  # a future cannot hold it
                raise RewardError(f"the reward raised {error!r}") from error

        value = await asyncio.wrap_future(in_thread(call, name="reward"))
        return await value if inspect.isawaitable(value) else value

    reward.reward_range = declared_range(function)  # type: ignore[attr-defined]
    return reward


def with_time_limit(reward: Reward, timeout_s: float) -> Reward:
    """``reward``, whose value after ``timeout_s`` seconds is a :class:`RewardError` that names the limit.

    Nothing waits for a call that is over time: the thread of a plain function runs on.
    """

    async def call(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        try:
            return await reward(task, answer, steps)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
            raise RewardError(f"the reward raised {error!r}") from error

    @wraps(reward)
    async def limited(task: Mapping[str, Any], answer: str, steps: Sequence[AgentStep]) -> Any:
        work = asyncio.ensure_future(call(task, answer, steps))
        try:
            await asyncio.wait({work}, timeout=timeout_s)  # wait_for() would wait until a cancelled reward ends
            if work.done():
                return work.result()
        finally:
            work.cancel()
        raise RewardError(
            f"the reward gave no value within reward_timeout_s, {timeout_s:g} s: make it faster, or the limit longer"
        )

    return limited


def _argument_count(function: Callable[..., Any], name: str) -> int:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: its signature is unknown
        return 2
    for count in (3, 2):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise UnusableRewardError(
        f"reward {name!r} takes {signature}; it is called with (task, answer) or (task, answer, steps)"
    )
