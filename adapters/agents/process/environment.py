"""The environment of an agent's process: where the clients of providers find the attempt, and keys of the right form.

Which variable moves which client was tried with the clients' newest versions (``docs/frameworks.md``). Some want the
root of the server, some a version, some a whole path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_ROOT = (
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL", "ANTHROPIC_BEDROCK_BASE_URL"),
    *("AZURE_OPENAI_ENDPOINT", "AZURE_API_BASE", "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE"),
    *("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "AWS_BEDROCK_RUNTIME_ENDPOINT", "OLLAMA_HOST", "OLLAMA_API_BASE"),
    *("GROQ_BASE_URL", "CO_API_URL", "TOGETHER_BASE_URL"),
)
_VERSION = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "MISTRAL_BASE_URL", "MISTRAL_API_BASE", "TOGETHER_API_BASE"),
    *("GROQ_API_BASE", "TOGETHER_AI_API_BASE", "OPENROUTER_API_BASE", "DEEPSEEK_API_BASE", "XAI_API_BASE"),
    "FIREWORKS_API_BASE",
)
_PYTHON_PROGRAMS = str(Path(__file__).parent / "python_programs")
_PATHS = {"COHERE_API_BASE": "/v2/chat"}
KEYS = {
    **dict.fromkeys(
        (
            *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AZURE_OPENAI_API_KEY", "AZURE_API_KEY", "GOOGLE_API_KEY"),
            *("GEMINI_API_KEY", "MISTRAL_API_KEY", "GROQ_API_KEY", "CO_API_KEY", "COHERE_API_KEY", "TOGETHER_API_KEY"),
            *("TOGETHERAI_API_KEY", "OPENROUTER_API_KEY", "DEEPSEEK_API_KEY", "XAI_API_KEY", "FIREWORKS_API_KEY"),
            *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ),
        "none",
    ),
    "HF_TOKEN": "hf_none",
    "OPENAI_API_VERSION": "2024-10-21",
    "AZURE_API_VERSION": "2024-10-21",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION_NAME": "us-east-1",
}
"""What is set where the app has none: clients refuse to be made without a key. The policy needs none."""


QUIET = {
    # LiteLLM would download its list of prices when it is imported, which blocks the event loop of all rollouts.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # The OpenAI Agents SDK would send a trace of every rollout to OpenAI, and CrewAI statistics to its makers.
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
    "CREWAI_DISABLE_TELEMETRY": "true",
}
_ALIASES = (("GOOGLE", "GEMINI"), ("CO", "COHERE"), ("TOGETHER", "TOGETHERAI"), ("AZURE_OPENAI", "AZURE"))
"""Names of one provider's key. Clients prefer one of them, so that a placeholder would hide the app's own."""
_OF_AWS = (
    *("AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)


def placeholder_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """The keys that an app with this environment does not have. None hides what it has elsewhere: credentials of AWS in
    a file, with which its tools read other services.
    """
    aliases = [{f"{name}_API_KEY" for name in names} for names in _ALIASES]
    own = {name for names in aliases if names & environment.keys() for name in names}
    if any(name in environment for name in _OF_AWS) or Path.home().joinpath(".aws").is_dir():
        own |= {name for name in KEYS if name.startswith("AWS_")}
    return {name: value for name, value in KEYS.items() if name not in environment and name not in own}


def provider_urls(base_url: str) -> dict[str, str]:
    """The variables that send the clients of providers to an attempt, whose ``base_url`` ends in ``/v1``."""
    base = base_url.rstrip("/")
    root = base.removesuffix("/v1")
    return {
        **dict.fromkeys(_ROOT, root),
        **dict.fromkeys(_VERSION, base),
        **{name: f"{root}{path}" for name, path in _PATHS.items()},
    }


def hooked_python(environment: Mapping[str, str]) -> dict[str, str]:
    """``PYTHONPATH`` with which Python programs of an attempt send their calls to the URL in ``OPENAI_BASE_URL``."""
    present = environment.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (_PYTHON_PROGRAMS, present)))}


def without_proxy(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """``NO_PROXY`` with the addresses of a run, which an HTTP proxy of the user's cannot reach."""
    present = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    hosts = dict.fromkeys([*filter(None, present.split(",")), "127.0.0.1", "localhost", host])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def set_template_environment(placeholder_url: str | None) -> None:
    """For the import of the agent: a client that is made there gets a placeholder, which each attempt replaces."""
    if placeholder_url is not None:
        os.environ.update(provider_urls(placeholder_url))
    os.environ.setdefault("HF_TOKEN", KEYS["HF_TOKEN"])
    os.environ.pop("AWS_BEARER_TOKEN_BEDROCK", None)  # it requires HTTPS
    os.environ.update(without_proxy("127.0.0.1", os.environ))
