"""What a process that runs agents takes from a store: only what may differ between rollouts.

A client that can write to a store chooses a rollout's task, sampling parameters and agent settings. The rest is given
to the process that runs the agent, on its own command line: agent, reward and judge, the folder of the databases, the
hosts of the policy. A request that names something else is refused, with a message that says which option allows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groundwire.domains import Domain, database_folders, is_inside
from groundwire.domains.task_list import is_file
from groundwire.tools.errors import UserError
from groundwire.tools.http.access_token import is_loopback
from groundwire.train.config.run_config import SQL_AGENTS, AgentSettings
from groundwire.train.rollouts.errors import RequestRefusedError
from groundwire.train.store.rollout import ProxyLLM, Rollout

POLICY_RESOURCE = "policy"
"""The name of the store's resource with the address of the proxy in front of the model (a ``ProxyLLM``)."""
MAIN_LLM = "main_llm"
"""The name under which agents that are written for Agent Lightning read the same resource."""

_PER_ROLLOUT = {"rollout_timeout_s", "reward_timeout_s", "failures", "agent_columns"}
_SAMPLING = {
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop"),
    *("frequency_penalty", "presence_penalty"),
}
"""Other parameters of a client, such as ``extra_headers`` or ``openai_proxy``, could lead a request elsewhere."""
# So strict that every HTTP client reads the same host from it.
_ENDPOINT = re.compile(
    r"https?://(?P<host>\[[\da-f:.]+\]|[\w.-]+)(?::\d{1,5})?(?:/[\w./~-]*)?", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class RequestCheck:
    """Checks the requests of a store. Its methods raise :class:`RequestRefusedError`.

    ``settings`` are the process's own, ``folders`` (or files) hold its databases, ``policy_hosts`` are the hosts of
    policies besides this machine.
    """

    settings: AgentSettings
    domain: Domain
    folders: Sequence[Path]
    policy_hosts: Collection[str]

    @classmethod
    def of(
        cls, settings: AgentSettings, domain: Domain, *, data_dir: str | None, policy_hosts: Collection[str], store: str
    ) -> RequestCheck:
        """The check of the requests of the store at the address ``store``.

        Raises :class:`groundwire.domains.DataError` if the domain's data cannot be found.
        """
        hosts = {host.strip("[]").lower() for host in policy_hosts} | {urlsplit(store).hostname or ""}
        own = AgentSettings(**{name: getattr(settings, name) for name in AgentSettings.model_fields})
        own = own.model_copy(update={"reward": own.reward or domain.default_reward})
        return cls(settings=own, domain=domain, folders=database_folders(domain, data_dir), policy_hosts=hosts)

    def for_rollout(self, theirs: Any) -> RequestCheck:
        """The check with the settings of a rollout: the process's own, and those that may differ between rollouts."""
        if not isinstance(theirs, Mapping):
            raise RequestRefusedError(f"the rollout's settings are {theirs!r:.100}; they must be a table")
        settings = dict(theirs)
        for name, own in self.settings.model_dump(mode="json").items():
            if name == "agent_options" and self.settings.agent is None and self.settings.backend in SQL_AGENTS:
                continue  # they are numbers and names; those of a user's function may be anything
            if name in settings and name not in _PER_ROLLOUT:
                self._compare(name, own, settings.pop(name))
        try:
            return replace(self, settings=AgentSettings(**{**dict(self.settings), **settings}))
        except UserError as error:
            raise RequestRefusedError(str(error)) from error

    def _compare(self, name: str, own: Any, theirs: Any) -> None:
        if name == "judge":
            if not isinstance(theirs, Mapping) or theirs.keys() - own.keys():
                raise RequestRefusedError(f"the rollout's judge is {theirs!r:.200}; it has {', '.join(own)}")
            for field, value in theirs.items():
                self._compare(f"judge {field}", own[field], value)
            return
        # Another machine may have the same file of tasks in another folder.
        is_same_file = name == "domain" and is_file(own) and Path(str(theirs)).name == Path(own).name
        is_default = name == "reward" and theirs is None and own == self.domain.default_reward
        if theirs != own and not is_same_file and not is_default:
            raise RequestRefusedError(
                f"this runner's {name} is {own!r}, and the rollout's is {theirs!r:.200}: start groundwire run and "
                f"groundwire runner with the same {_option(name)}"
            )

    def check(self, rollout: Rollout, resources: Mapping[str, Any]) -> None:
        """Check everything in a request."""
        if self.for_rollout(rollout.settings).settings != self.settings:
            raise RequestRefusedError(
                "the agents in the trainer's process have other settings than the rollout: start the trainer with "
                "--n-runners 0, and the agents with groundwire runner"
            )
        policy = policy_of(resources)
        self._check_policy(policy.endpoint)
        for sampling in (policy.sampling_parameters, rollout.sampling):
            if not isinstance(sampling, Mapping) or sampling.keys() - _SAMPLING:
                raise RequestRefusedError(
                    f"the rollout's sampling parameters are {sampling!r:.200}; a runner accepts "
                    f"{', '.join(sorted(_SAMPLING))}"
                )
        prompts = rollout.prompts or {}
        if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
            raise RequestRefusedError(f"the rollout's prompts are {prompts!r:.200}; they must be texts by their names")
        self._check_task(rollout.task)

    def _check_policy(self, endpoint: str) -> None:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None:
            raise RequestRefusedError(f"the policy's address is {endpoint!r:.200}; it must be like http://HOST:PORT/v1")
        host = match["host"].strip("[]").lower()
        if host not in self.policy_hosts and not is_loopback(host):
            others = "".join(f" and {other}" for other in sorted(self.policy_hosts) if not is_loopback(other))
            raise RequestRefusedError(
                f"the policy is at {endpoint}, and this runner sends requests to this machine{others} only: if that is "
                f"the trainer's --proxy-host, start the runner with --policy-host {host}"
            )

    def _check_task(self, task: Any) -> None:
        try:
            _, text = task["id"], task["question"]
            paths = {self.domain.database(task), task.get("db_path")} - {None, ""}
        except Exception as error:  # a domain is written by users, too
            raise RequestRefusedError(
                f"the task is no task of the domain {self.domain.name}: {error!r:.200}"
            ) from error
        if not isinstance(text, str):
            raise RequestRefusedError(f"the task's question is {text!r:.100}; it must be text")
        for path in paths:
            if not is_inside(path, self.folders):
                folders = ", ".join(map(str, self.folders[:3])) or "it has none"
                raise RequestRefusedError(
                    f"the task's database {path!r:.300} is not in the data of this runner ({folders}): start the "
                    "runner with the trainer's --data-dir, on a machine that has it at the same path"
                )


def policy_of(resources: Mapping[str, Any]) -> ProxyLLM:
    """The policy among the resources of a rollout. Raises :class:`RequestRefusedError`."""
    policy = resources.get(POLICY_RESOURCE)
    if not isinstance(policy, ProxyLLM):
        raise RequestRefusedError(f"the rollout's resources have no {POLICY_RESOURCE!r} of the type proxy_llm")
    return policy


def _option(name: str) -> str:
    first, _, field = name.partition(" ")
    if field:
        return {"model": "--judge-model", "base_url": "--judge-base-url"}.get(field, f"--judge {field}=VALUE")
    return "--agent-option" if first == "agent_options" else f"--{first}"
