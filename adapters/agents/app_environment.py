"""The environment variables of an agent: which it gets, where the clients of providers find the attempt, and what an
app lacks.

Its processes get those of our environment that programs need to run (:func:`agent_environment`), and none that may be
a key: what an agent does not have, it can neither leak nor spend.

Which variable moves which client was tried with the clients' newest versions (``docs/frameworks.md``). Some want the
root of the server, some a version, some a whole path. What :func:`set_environment` sets is given back when a run of
``fit`` or ``evaluate`` ends.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from groundwire.adapters.agents.changes import set_variable, undo_later, wrap
from groundwire.tools.errors import CommandError
from groundwire.tools.startup import KEY_NAME, env_file_variables, is_usual
from groundwire.tools.text import first_of

_OURS = re.compile(r"GROUNDWIRE_.*|MCP_SQL_TOKEN")
_OF_RUNS = re.compile(rf"{_OURS.pattern}|(WANDB|SWANLAB)_.*|HF_TOKEN|HUGGING_FACE_HUB_TOKEN")
_NOT_OF_AN_APP = re.compile(rf"{_OF_RUNS.pattern}|LD_.*|DYLD_.*|PYTHON.*|PATH")
_MISSES = re.compile(
    r"api[ _-]?key|access[ _-]?key|access[ _-]?token|credentials?\b|environment variable|env var|unauthorized|"
    r"unauthenticated|not authenticated|KeyError: '[A-Z]",
    re.IGNORECASE,
)
"""How clients say that they lack a key."""
_REMEDY = "what they need: --agent-env NAME,NAME, or the app's .env"
_missed: set[str] = set()

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


def agent_environment(names: Collection[str] = (), *, own_providers: bool = False) -> dict[str, str]:
    """The variables of our environment that a process of an agent gets: :func:`.is_usual` ones and ``names``.

    With ``own_providers`` it asks other models than the policy, and gets the keys and URLs of their providers. Raises
    ``ValueError`` for a name that is not set, or ours.
    """
    for name in names:
        if _OURS.fullmatch(name):
            raise ValueError(f"agent_env names {name}, which is for groundwire itself: leave it out")
        if name not in os.environ:
            raise ValueError(f"agent_env names {name}, which is not set: set it, or leave it out")
    passed = {*names, *(({*DEFAULTS} - {"HF_TOKEN"}) | provider_urls("").keys() if own_providers else ())}
    return {name: value for name, value in os.environ.items() if name in passed or is_usual(name)}


def _hidden_keys(environment: Mapping[str, str]) -> list[str]:
    """The names of keys that we have, for other things than runs, and an agent with this ``environment`` has not."""
    names = sorted(os.environ.keys() - environment.keys())
    return [name for name in names if KEY_NAME.fullmatch(name) and not _OF_RUNS.fullmatch(name)]


def without_keys(environment: Mapping[str, str]) -> str:
    """A line about the keys that agents with this ``environment`` do not get; empty if there are none."""
    names = [name for name in _hidden_keys(environment) if name not in DEFAULTS]  # calls of models need no key
    return f"its processes do not get {first_of(names)} ({_REMEDY})" if names else ""


def with_all_variables() -> str:
    """A line about the keys that an agent in this process can read; empty if there are none."""
    names = sorted(
        name for name, value in os.environ.items() if KEY_NAME.fullmatch(name) and DEFAULTS.get(name) != value
    )
    return f"it runs in this process, where it can read {first_of(names)}" if names else ""


def note_missed(hidden: Iterable[str]) -> None:
    """From now on note which of the ``hidden`` names the agent of this process asks its environment for."""
    names, kind = frozenset(hidden), type(os.environ)
    present: Any = kind.__getitem__

    def getitem(environment: Any, name: str) -> str:
        try:
            return str(present(environment, name))
        except KeyError:
            if name in names and not _asked_by_us(sys._getframe(1)):
                _missed.add(name)
            raise

    kind.__getitem__ = getitem  # type: ignore[method-assign]


def _asked_by_us(frame: Any) -> bool:
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("groundwire.")


def missed_variables() -> list[str]:
    """What :func:`note_missed` has noted, less what the agent has got since."""
    return sorted(_missed - {*os.environ})


def which_missed(names: Collection[str]) -> str:
    """What is said of an agent that asked for ``names``."""
    return f"it asked for {first_of(names)} of this environment, which agents do not get ({_REMEDY})"


def hidden_hint(text: str, environment: Mapping[str, str], missed: Iterable[str] = ()) -> str:
    """What to add to the failure ``text`` of an agent with this ``environment``: variables that it has ``missed``, or
    may have.
    """
    words = {word for word in re.findall(r"\w+", text.upper()) if "_" in word}
    hidden = sorted({*missed} | {name for name in os.environ.keys() - environment.keys() if name.upper() in words})
    hidden = hidden or (_hidden_keys(environment) if _MISSES.search(text) else [])
    if not hidden:
        return ""
    return f"; agents do not get {first_of(hidden)} of this environment ({_REMEDY})"


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
    files = {} if agent is None else app_variables(os.environ, *_folders(agent.rpartition(":")[0]))
    values = {name: value for name, value in files.items() if not os.environ.get(name)}
    missing = missing_variables({**os.environ, **values})
    missing.pop("HF_TOKEN", None)  # this process may load models, and the Hub refuses a token that it does not know
    for name, value in {**missing, **without_proxy("127.0.0.1", os.environ), **values}.items():
        set_variable(name, value)
    _read_tracing_again()
    undo_later(_read_tracing_again)


def app_variables(environment: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """What an app has in files ``.env``: in the nearest one of ``folders`` that has one, and in the present folder.

    They may name variables of ``environment``: the agent's, so that no file gives it a key that it does not get.
    """
    variables: dict[str, str] = {}
    for folder in (Path.cwd(), *[folder for folder in folders if (folder / ".env").is_file()][:1]):
        with suppress(CommandError):  # the app itself says what is wrong with it
            variables |= env_file_variables(folder / ".env", environment)
    return of_the_app(variables)


def of_the_app(variables: Mapping[str, Any]) -> dict[str, Any]:
    """``variables`` of an app's file without what is for runs, and what loads code into programs."""
    return {name: value for name, value in variables.items() if not _NOT_OF_AN_APP.fullmatch(name)}


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
