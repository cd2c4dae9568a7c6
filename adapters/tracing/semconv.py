"""The names of what a call's span carries, in one place.

The GenAI semantic conventions of OpenTelemetry are used wherever they have a name, so that any trace viewer shows the
spans sensibly. What they have no name for, which is exactly what training needs, is under ``groundwire.``.
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

PROMPT_IDS = "groundwire.prompt_token_ids"
"""Base64 of little-endian uint32. On every call's span, empty where it failed: it tells ours apart."""
RESPONSE_IDS = "groundwire.response_token_ids"
"""Base64 of little-endian uint32: the tokens that the server sampled."""
LOGPROBS = "groundwire.response_logprobs"
"""Base64 of little-endian float32, one for each response token."""
WEIGHTS_VERSION = "groundwire.weights_version"
FIRST_WEIGHTS_VERSION = "groundwire.first_weights_version"
"""Where the weights changed under a reply: those of its first token."""

EMITTED = "groundwire.emitted"
"""On what an agent emitted while it worked: such a reward is a call's, and never the rollout's."""
AFTER_CALLS = "groundwire.after_calls"
"""And how many calls there had been, where the client that makes them counted them."""

REWARD_PREFIX = "agentlightning.reward."
"""Agent Lightning's own: ``agentlightning.reward.<i>.name`` and ``.value``, the primary reward first."""
