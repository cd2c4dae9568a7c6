"""Names of earlier versions that are no setting any more, and what to do in their place."""

from __future__ import annotations

_RENAMED = {"sample_values": "example_values", "keys": "show_keys"}
_OPTIONS = (
    *("max_turns", "check_last", "prompt_profile", "table_info_truncate", "example_values", "show_keys"),
    *("execution_truncate", *_RENAMED),
)
OF_SQL_AGENTS = {
    name: f"it is an option of the SQL agents: --agent-option {_RENAMED.get(name, name)}=VALUE" for name in _OPTIONS
}
"""Options of the SQL agents that were settings."""

OF_RUN = {
    "clip_low": "it is 0.2 (with verl: actor_rollout_ref.actor.clip_ratio_low)",
    "further_rollouts": "it gained nothing; leave it out",
    "proxy_port": "give it with the host, --proxy-host HOST:PORT",
    "step_deadline_s": "a step may take six times --rollout-timeout-s; give that",
    "unresponsive_s": "a runner without a heartbeat is given up after 30 s; leave it out",
    "val_every_tasks": "the shorter validations have 64 questions; leave it out",
}
"""Of a run."""
