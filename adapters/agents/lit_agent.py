"""An agent of Agent Lightning (``LitAgent``): it gets the whole task and the model's resource, and returns a reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from groundwire.adapters._types import AgentError, Answer, Backend, Endpoint, Question
from groundwire.adapters.agents.failures import typed_failures
from groundwire.tools.daemon_threads import in_thread

_LIT_AGENT = "agentlightning.litagent.litagent.LitAgent"


def is_lit_agent(agent: Any) -> bool:
    """Whether ``agent`` is a ``LitAgent`` or a class of them. Imports nothing."""
    classes = agent.__mro__ if inspect.isclass(agent) else type(agent).__mro__
    return any(f"{each.__module__}.{each.__qualname__}" == _LIT_AGENT for each in classes)


class LitAgentBackend(Backend):
    """Runs ``agent``, a ``LitAgent`` or a class of them that is made without arguments.

    The runner calls :meth:`rollout` in place of :meth:`run`. Raises ``ValueError`` if the class needs arguments.
    """

    def __init__(self, agent: Any) -> None:
        try:
            self.agent: Any = agent() if inspect.isclass(agent) else agent
        except TypeError as error:
            raise ValueError(f"agent {agent.__qualname__!r} cannot be made ({error}): name an object of it") from error

    def describe_call(self, question: Question) -> str:
        """How the agent is called."""
        return f"{type(self.agent).__name__}.training_rollout(the whole task, resources, rollout)"

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Always raises :class:`adapters.AgentError`."""
        raise AgentError("a LitAgent needs the whole task: it runs in a training run or an evaluation only")

    async def rollout(
        self, task: Mapping[str, Any], resources: Mapping[str, Any], rollout: Any, endpoint: Endpoint
    ) -> Any:
        """What the agent returns for an attempt; a plain method has its own thread.

        Raises a :class:`adapters.BackendError`.
        """
        prefix = "training" if rollout.mode == "train" else "validation"
        with typed_failures(endpoint):
            if self.agent.is_async():
                return await getattr(self.agent, f"{prefix}_rollout_async")(task, resources, rollout)
            call = partial(getattr(self.agent, f"{prefix}_rollout"), task, resources, rollout)
            return await asyncio.wrap_future(in_thread(call, name=f"agent {rollout.rollout_id}"))
