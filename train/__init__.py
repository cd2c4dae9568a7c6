"""Training: rollouts, the embedded trainer, and the command line."""

import groundwire.adapters._lazy_agentlightning  # noqa: F401  (before anything of agentlightning)
