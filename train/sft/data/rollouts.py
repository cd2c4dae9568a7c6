"""Accepted rollouts of a run: what the policy sampled where the reward was high (rejection sampling).

Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning" (arXiv:2308.01825): several different
correct answers to each question are learned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.sft_settings import FORMATS, SFTSettings
from groundwire.train.evaluation.diagnosis import trained_calls
from groundwire.train.report.token_text import TokenDecoder, token_decoder
from groundwire.train.sft.data.examples import Example
from groundwire.train.store.rollout import Rollout

_FROM_RUN = ("model", "domain", "data_dir", "agent_options", "max_model_len")
_COLUMNS = ("mode", "step", "task_id", "status", "reward", "calls", "answer", "agent_steps")
_OTHER_AGENTS = "calls of agents that agent_match does not select"
_REJECTED = "queries that the agent itself rejected and wrote again"
_REJECTING = "calls that rejected the accepted query, which was written again"
_SCHEMA_LOOKUP = re.compile(r"\bsqlite_(master|schema)\b|\binformation_schema\b|^\s*pragma\b", re.IGNORECASE)


def with_run_settings(settings: SFTSettings, given: Mapping[str, Any]) -> SFTSettings:
    """``settings`` with the model, domain, agent and prompts of the run ``settings.rollouts`` where none are given."""
    config = RunDir.open(str(settings.rollouts)).config()
    stored = {name: config[name] for name in _FROM_RUN if name in config}
    if config.get("backend") in FORMATS:
        stored["backend"] = [config["backend"]]
    return SFTSettings(**{**settings.model_dump(), **stored, **given})


def accepted_rollouts(run: RunDir, *, min_reward: float, per_task: int) -> tuple[list[list[Example]], Counter[str]]:
    """The calls of each task's accepted training rollouts, which differ in their replies, and how many calls are left
    out, by reason: those of agents that the run did not train, and queries that the agent itself rejected.

    At most ``per_task`` (0: all) of a task: those with the highest rewards, of the latest steps. Validation rollouts
    are never learned. Raises :class:`ConfigError` if there is nothing to learn, and for an evaluation.
    """
    if "evaluation" in run.config():
        raise ConfigError(f"{run.path} is an evaluation, which is never learned: give the folder of a groundwire run")
    scored = [
        (rollout.outcome.reward, rollout)
        for rollout in run.rollouts(_COLUMNS)[0]
        if rollout.mode == "train" and rollout.outcome.reward is not None and rollout.trainable_calls
    ]
    rewards = [reward for reward, _ in scored]
    scored = [(reward, rollout) for reward, rollout in scored if reward >= min_reward]
    if not scored:
        best = f"the highest reward of {len(rewards):,} is {max(rewards):g}" if rewards else "it has none with calls"
        raise ConfigError(f"{run.path} has no training rollout with a reward of at least {min_reward:g}: {best}")
    tasks: dict[str, dict[Any, list[Example]]] = {}
    left_out, decoder, config = Counter[str](), token_decoder(run), cache(run.config)
    for _, rollout in sorted(scored, key=lambda pair: (-pair[0], -pair[1].step)):
        accepted = tasks.setdefault(str(rollout.task["id"]), {})
        if per_task and len(accepted) >= per_task:
            continue
        calls, reasons = _learned_calls(rollout, config(rollout.step).get("agent_match"), decoder)
        replies = tuple(tuple(call.response_ids) for call in calls)
        if calls and replies not in accepted:
            accepted[replies] = [Example(call.prompt_ids, call.response_ids) for call in calls]
            left_out.update(reasons)
    learned = [list(chain.from_iterable(accepted.values())) for accepted in tasks.values() if accepted]
    if not learned:
        match = run.config().get("agent_match")
        raise ConfigError(f"{run.path} has no accepted rollout with a call of an agent of agent_match {match!r}")
    return learned, left_out


def _learned_calls(rollout: Rollout, agent_match: str | None, decoder: TokenDecoder) -> tuple[list[LLMCall], list[str]]:
    """The calls of a rollout that are learned, and why each of the others is not."""
    trained = trained_calls(rollout, agent_match)
    reasons = [_OTHER_AGENTS] * (len(rollout.trainable_calls) - len(trained))
    answer = _plain(rollout.outcome.answer)
    steps = (step for step in rollout.outcome.steps if step["kind"] == "tool")
    queries = {_plain(step["input"]) for step in steps if not _SCHEMA_LOOKUP.search(step["input"])}
    if answer not in queries:
        return trained, reasons
    texts = [_plain(decoder.text(call.response_ids)) for call in trained]
    written = [max((query for query in queries if query and query in text), key=len, default="") for text in texts]
    right = [place for place, query in enumerate(written) if query == answer] or [0]
    kept = []
    for place, (call, query) in enumerate(zip(trained, written, strict=True)):
        if query not in ("", answer):
            reasons.append(_REJECTED)
        elif not query and right[0] < place < right[-1]:
            reasons.append(_REJECTING)
        else:
            kept.append(call)
    return kept, reasons


def _plain(text: str) -> str:
    """A query without what its spelling in a reply changes: blanks, quotes, and their escapes in JSON."""
    return re.sub(r"""[\s"'`;\\]+""", "", re.sub(r"\\[nrt]", " ", text))
