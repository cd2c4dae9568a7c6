"""Training: rollouts, the embedded trainer, and the command line."""

import tools.lightning  # noqa: F401  (before anything of agentlightning)
