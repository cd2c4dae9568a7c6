"""The layers of an installation: packages that the base does not have, and the command that installs them."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["check_trainer", "missing_layer"]

_EXTRAS = {
    "agents": "openai-agents",
    "langchain_core": "langgraph",
    "langchain_openai": "langgraph",
    "langgraph": "langgraph",
    **dict.fromkeys(
        (
            "agentlightning", "httpx_aiohttp", "jinja2", "litellm", "llguidance", "matplotlib", "numpy", "openai",
            "pandas", "pyarrow", "safetensors", "tokenizers", "torch", "transformers",
        ),
        "train",
    ),
}  # fmt: skip
"""The extra of each module that is imported where it is needed."""


def missing_layer(error: ModuleNotFoundError, *, extra: str | None = None) -> str:
    """A message with the command that installs the missing module; empty if it is none of groundwire's.

    ``extra`` is the one that has all a command needs. Without it, the module decides.
    """
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        return ""
    return f"this needs {module}, which is not installed: pip install 'groundwire[{extra or _EXTRAS[module]}]'"


def check_trainer() -> None:
    """Raise ``ModuleNotFoundError`` if only the base is installed, so that no other error is reported first."""
    if find_spec("agentlightning") is None:
        raise ModuleNotFoundError("No module named 'agentlightning'", name="agentlightning")
