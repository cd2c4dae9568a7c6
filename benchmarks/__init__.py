"""Benchmarks: ``python -m benchmarks`` runs those of the CPU, ``python -m dev.gpu`` those of a GPU."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM downloads a list of prices
