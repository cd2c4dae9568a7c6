"""The Lightning store: backends, server and client."""
