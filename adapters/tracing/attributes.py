"""The names of what a call's span carries, in one place.

The GenAI semantic conventions of OpenTelemetry are used wherever they have a name, so that any trace viewer shows the
spans sensibly. What they have no name for, which is exactly what training needs, is under ``lightning_rod.``.
"""

from __future__ import annotations

SPAN_NAME = "chat"

OPERATION = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
AGENT = "gen_ai.agent.name"
TOOLS = "gen_ai.tool.definitions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
STATUS = "http.response.status_code"
ERROR = "error.message"

PROMPT_IDS = "lightning_rod.prompt_token_ids"
"""Base64 of little-endian uint32. On every call's span, empty where it failed: it tells ours apart."""
RESPONSE_IDS = "lightning_rod.response_token_ids"
"""Base64 of little-endian uint32: the tokens that the server sampled."""
LOGPROBS = "lightning_rod.response_logprobs"
"""Base64 of little-endian float32, one for each response token."""
WEIGHTS_VERSION = "lightning_rod.weights_version"
FIRST_WEIGHTS_VERSION = "lightning_rod.first_weights_version"
"""Where the weights changed under a reply: those of its first token."""

EMITTED = "lightning_rod.emitted"
"""On what an agent emitted while it worked: such a reward is a call's, and never the rollout's."""
AFTER_CALLS = "lightning_rod.after_calls"
"""And how many calls there had been, where the client that makes them counted them."""

REWARD_PREFIX = "agentlightning.reward."
"""Agent Lightning's own: ``agentlightning.reward.<i>.name`` and ``.value``, the primary reward first."""
