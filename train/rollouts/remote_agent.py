"""A runner's agent, made as each rollout says: trainer and runners cannot disagree about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.types import AttemptedRollout, NamedResources, SpanCoreFields

from groundwire import adapters, domains
from groundwire.tools.plugins import UnknownNameError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.rollouts.agent import RolloutAgent
from groundwire.train.rollouts.factory import make_backend, make_reward

__all__ = ["RemoteRolloutAgent"]


class RemoteRolloutAgent(LitAgent[dict[str, Any]]):
    """Agents of one backend and one domain, with the settings of whatever run a rollout belongs to.

    ``agent`` (of the backend ``custom``) is the runner's own: no store can name code to be run. Raises
    :class:`groundwire.train.config.errors.ConfigError` where the backend cannot be made at all.
    """

    def __init__(self, *, backend: str, agent: str | None, domain: str) -> None:
        super().__init__()
        self._own = {"backend": backend, "domain": domain}
        self._agent, self._domain = agent, domains.get(domain)
        self._agents: dict[str, RolloutAgent] = {}
        self._made({})

    async def rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> list[SpanCoreFields]:
        """As :class:`groundwire.train.rollouts.agent.RolloutAgent`, with the rollout's settings."""
        settings = (rollout.metadata or {}).get("settings", {})
        try:
            agent = self._made(settings)
        except (ConfigError, UnknownNameError) as error:
            agent = RolloutAgent(backend=_Unusable(str(error)), domain=self._domain, reward=_no_reward)
        agent.set_runner(self.get_runner())
        return await agent.rollout_async(task, resources, rollout)

    async def stop(self) -> None:
        """Let go of what the backends hold."""
        for agent in self._agents.values():
            if isinstance(agent.backend, adapters.Stoppable):
                await agent.backend.stop()

    def _made(self, settings: Mapping[str, Any]) -> RolloutAgent:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._agents:
            for name, own in self._own.items():
                if settings.get(name, own) != own:
                    raise ConfigError(f"this runner's {name} is {own!r}, and the rollout's is {settings[name]!r}")
            given = {**settings, **self._own, "agent": self._agent}
            config = resolve(given.pop("config", "fast"), **given)
            self._agents[key] = RolloutAgent(
                backend=make_backend(config),
                domain=self._domain,
                reward=make_reward(config, self._domain),
                timeout_s=config.rollout_timeout_s,
            )
        return self._agents[key]


class _Unusable:
    """Stands in for a backend that cannot be made, so that the rollout reports why."""

    agents: tuple[str, ...] = ()

    def __init__(self, why: str) -> None:
        self._why = why

    async def run(self, question: adapters.Question, endpoint: adapters.Endpoint) -> adapters.Answer:
        raise adapters.AgentError(self._why)


async def _no_reward(task: Any, answer: str, steps: Any) -> float:
    raise AssertionError("an agent that cannot be made has no answer")
