"""The environment variables of an agent: where the clients of providers find the attempt, and what an app lacks.

Which variable moves which client was tried with the clients' newest versions (``docs/frameworks.md``). Some want the
root of the server, some a version, some a whole path. What :func:`set_environment` sets is given back when a run of
``fit`` or ``evaluate`` ends.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.changes import set_variable, undo_later, wrap

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
_PYTHON_PROGRAMS = str(Path(__file__).parent / "process" / "python_programs")
_PATHS = {"COHERE_API_BASE": "/v2/chat"}
DEFAULTS = {
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
    # LiteLLM would download its list of prices when it is imported, which blocks the event loop of all rollouts.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # The OpenAI Agents SDK would send a trace of every rollout to OpenAI, and CrewAI statistics to its makers.
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
    "CREWAI_DISABLE_TELEMETRY": "true",
}
"""What is set where the app has none. Clients refuse to be made without a key; the policy needs none."""
_ALIASES = (("GOOGLE", "GEMINI"), ("CO", "COHERE"), ("TOGETHER", "TOGETHERAI"), ("AZURE_OPENAI", "AZURE"))
"""Names of one provider's key. Clients prefer one of them, so that a placeholder would hide the app's own."""
_OF_AWS = (
    *("AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)


def missing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What an app with this environment does not have: keys, and what keeps libraries quiet.

    None hides what it has elsewhere: credentials of AWS in a file, with which its tools read other services. An empty
    value is none.
    """
    environment = {name: value for name, value in environment.items() if value}
    aliases = [{f"{name}_API_KEY" for name in names} for names in _ALIASES]
    own = {name for names in aliases if names & environment.keys() for name in names}
    if any(name in environment for name in _OF_AWS) or Path.home().joinpath(".aws").is_dir():
        own |= {name for name in DEFAULTS if name.startswith("AWS_")}
    return {name: value for name, value in DEFAULTS.items() if name not in environment and name not in own}


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


def set_environment(agent: str | None = None) -> None:
    """Set what is missing for ``agent``, a name, before it is imported; None: for an object."""
    _keep_urls()
    dotenv = {} if agent is None else _dotenv(agent)
    values = {name: value for name, value in dotenv.items() if not os.environ.get(name)}
    missing = missing_variables({**os.environ, **values})
    missing.pop("HF_TOKEN", None)  # this process may load models, and the Hub refuses a token that it does not know
    for name, value in {**missing, **without_proxy("127.0.0.1", os.environ), **values}.items():
        set_variable(name, value)
    _read_tracing_again()
    undo_later(_read_tracing_again)


def _dotenv(agent: str) -> Mapping[str, str]:
    """The nearest ``.env`` file from the folder of the agent's file upwards, if the app has python-dotenv."""
    with suppress(ImportError, OSError, ValueError):
        from dotenv import dotenv_values

        for folder in _folders(agent.rpartition(":")[0]):
            if (file := folder / ".env").is_file():
                return {name: value for name, value in dotenv_values(file).items() if value is not None}
    return {}


def _folders(place: str) -> Iterator[Path]:
    """The folders in which python-dotenv searches if it is called in the module or file ``place``."""
    if place.endswith(".py"):
        yield from Path(place).resolve().parents
        return
    package, *inner = place.split(".")
    spec = importlib.util.find_spec(package)  # of the outermost: any other would be imported
    if spec is not None and spec.origin is not None:
        deepest = Path(spec.origin).resolve().parent.joinpath(*inner[:-1])
        yield from (deepest, *deepest.parents)


@cache
def _keep_urls() -> None:
    """``load_dotenv(override=True)`` in the agent's code leaves the URLs of the attempt, in a process that has them."""

    def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        urls = {name: value for name, value in os.environ.items() if name in provider_urls("")}
        result = wrapped(*args, **kwargs)
        os.environ.update(urls)
        return result

    wrap("dotenv.main", "DotEnv.set_as_environment_variables", load)
    undo_later(_keep_urls.cache_clear)


def _read_tracing_again() -> None:
    """Let the Agents SDK read the variable that switches its tracing off, which it reads once."""
    provider: Any = getattr(sys.modules.get("agents.tracing.setup"), "GLOBAL_TRACE_PROVIDER", None)
    if provider is not None and hasattr(provider, "_env_disabled"):
        provider._env_disabled = None
