"""The Lightning store: backends, server and client."""

import groundwire.train.store._lazy_agentlightning  # noqa: F401  (before anything of agentlightning)
