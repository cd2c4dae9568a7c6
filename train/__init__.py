"""Training: rollouts, the embedded trainer, and the command line."""

import os

# LiteLLM, which agentlightning imports, otherwise fetches a list of prices from the network while it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
