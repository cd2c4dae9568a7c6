"""Runs rollouts and collects their results."""

import groundwire.train.store._lazy_agentlightning  # noqa: F401  (before anything of agentlightning)
