"""The name and the attributes of a call's span.

They follow OpenTelemetry's GenAI semantic conventions, so that any trace viewer can show the spans. Attributes that
only training needs begin with ``groundwire.``.
"""

from __future__ import annotations

SPAN_NAME = "chat"

OPERATION = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
AGENT = "gen_ai.agent.name"
TOOLS = "gen_ai.tool.definitions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
RESPONSE_ID = "gen_ai.response.id"
"""The reply's id, as the agent got it. On an emitted span it names the reply that a reward belongs to."""
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
STATUS = "http.response.status_code"
ERROR = "error.message"

PROMPT_IDS = "groundwire.prompt_token_ids"
"""Base64 of little-endian uint32. Every call's span has it (empty if the call failed), and no other span."""
RESPONSE_IDS = "groundwire.response_token_ids"
"""Base64 of little-endian uint32: the sampled tokens."""
LOGPROBS = "groundwire.response_logprobs"
"""Base64 of little-endian float32, one for each response token."""
WIRE_API = "groundwire.wire_api"
"""The API that the agent used: ``chat``, ``responses``, ``messages`` or ``completions``. The messages are always chat
messages."""
WEIGHTS_VERSION = "groundwire.weights_version"
GRAMMAR = "groundwire.grammar"
"""What a constrained reply had to be, as JSON text; ``null`` if the server did not report it. Only on such calls."""
FIRST_WEIGHTS_VERSION = "groundwire.first_weights_version"
"""The version at the first token, if the weights changed during a reply."""

CHOICE = "groundwire.choice"
"""The index of the reply among several choices of one request; missing for the only one."""

EMITTED = "groundwire.emitted"
"""On spans that an agent emitted while it ran: such a reward belongs to a call, never to the rollout."""
CALL_ID = "groundwire.call_id"
"""On a call's span the id that the agent's HTTP client gave it; on an emitted span that of its call."""

ANNOTATION_SPAN = "agentlightning.annotation"
"""Agent Lightning's name of a span with a reward."""
REWARD_PREFIX = "agentlightning.reward."
"""Agent Lightning's name: ``agentlightning.reward.<i>.name`` and ``.value``, the primary reward first."""
