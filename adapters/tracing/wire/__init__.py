"""The APIs in which agents call the policy.

The policy is always asked for a chat completion. A class for each API translates an agent's request to a chat request,
and the reply, whole or in chunks, back (:class:`groundwire.adapters.tracing.wire.call.WireCall`). So spans have chat
messages, whatever API an agent uses.
"""
