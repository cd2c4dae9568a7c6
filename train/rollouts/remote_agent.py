"""Builds each rollout's agent from the settings stored with that rollout, so trainer and runners cannot disagree."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from agentlightning.litagent import LitAgent
from agentlightning.types import AttemptedRollout, NamedResources, SpanCoreFields

from groundwire import adapters, domains
from groundwire.tools.errors import UserError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.rollouts.agent import RolloutAgent, store_failure
from groundwire.train.rollouts.factory import make_backend, make_reward

__all__ = ["RemoteRolloutAgent"]


class RemoteRolloutAgent(LitAgent[dict[str, Any]]):
    """Runs rollouts of any training run that has this backend and this domain.

    ``agent`` (of the backend ``custom``) is the runner's own, so a store cannot name code to be run. Raises
    :class:`groundwire.train.config.errors.ConfigError` if the backend cannot be built.
    """

    def __init__(self, *, backend: str, agent: str | None, domain: str) -> None:
        super().__init__()
        self._fixed = {"backend": backend, "domain": domain}
        self._agent, self._domain = agent, domains.get(domain)
        self._agents: dict[str, RolloutAgent] = {}
        self._agent_for({})

    async def rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> list[SpanCoreFields]:
        """As :meth:`groundwire.train.rollouts.agent.RolloutAgent.rollout_async`, with the rollout's settings."""
        try:
            agent = self._agent_for((rollout.metadata or {}).get("settings", {}))
        except UserError as error:
            await store_failure(self.get_runner().get_store(), rollout, "agent", str(error), time.time())
            raise
        agent.set_runner(self.get_runner())
        return await agent.rollout_async(task, resources, rollout)

    async def stop(self) -> None:
        """Close the connections and processes of the backends."""
        for agent in self._agents.values():
            if isinstance(agent.backend, adapters.Stoppable):
                await agent.backend.stop()

    def _agent_for(self, given: Mapping[str, Any]) -> RolloutAgent:
        key = json.dumps(given, sort_keys=True)
        if key not in self._agents:
            for name, value in self._fixed.items():
                if given.get(name, value) != value:
                    raise ConfigError(f"this runner's {name} is {value!r}, and the rollout's is {given[name]!r}")
            settings = AgentSettings(**{**given, **self._fixed, "agent": self._agent})
            self._agents[key] = RolloutAgent(
                backend=make_backend(settings),
                domain=self._domain,
                reward=make_reward(settings, self._domain),
                timeout_s=settings.rollout_timeout_s,
            )
        return self._agents[key]
