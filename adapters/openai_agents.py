"""Any agent of the OpenAI Agents SDK as a backend.

The agent stays as its author wrote it: the model, its sampling parameters and the calling agent's name come from the
SDK's run configuration, so handoffs and agents used as tools are traced under their own names. The process's tracing
settings are not changed: export is off for these runs only.

If an agent runs out of turns, the agent has failed and not the infrastructure: the rollout ends with an empty output
and is scored. After a malformed tool call the model reads the SDK's error message and may try again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelResponse,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
)
from agents.models.chatcmpl_helpers import HEADERS_OVERRIDE
from agents.run_config import CallModelData, ModelInputData

from groundwire.adapters._failures import typed_failures
from groundwire.adapters._openai_client import Clients
from groundwire.adapters._types import Answer, Endpoint, Question
from groundwire.tools.types import AgentStep

__all__ = ["OpenAIAgentsBackend"]

_MODEL_SETTINGS = frozenset(setting.name for setting in fields(ModelSettings))


def _question_text(question: Question) -> str:
    return question.text


def _no_context(question: Question, steps: list[AgentStep]) -> None:
    return None


def _output_text(question: Question, context: Any, output: str) -> str:
    return output


class OpenAIAgentsBackend:
    """Runs ``agent`` once per question, over one HTTP connection pool.

    ``make_input`` and ``make_context`` build what ``Runner.run`` takes. The context is also given the rollout's list of
    steps: the backend appends the model's turns to it, and tools may append theirs. ``read_answer`` makes the answer
    from the question, the context and the final output (empty when the turns ran out). ``agents`` are the names of the
    agents that call the model; ``stream`` requests streamed replies, with the same answers.
    """

    def __init__(
        self,
        agent: Agent[Any],
        *,
        agents: tuple[str, ...] = (),
        make_input: Callable[[Question], Any] = _question_text,
        make_context: Callable[[Question, list[AgentStep]], Any] = _no_context,
        read_answer: Callable[[Question, Any, str], str] = _output_text,
        max_turns: int = 10,
        request_timeout_s: float = 120.0,
        stream: bool = False,
    ) -> None:
        self.agents, self.stream = agents, stream
        self._agent = agent
        self._make_input, self._make_context, self._read_answer = make_input, make_context, read_answer
        self._max_turns = max_turns
        self._clients = Clients(timeout_s=request_timeout_s)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        steps: list[AgentStep] = []
        with typed_failures(endpoint):
            context = self._make_context(question, steps)
            try:
                output = await self._output(self._make_input(question), context, steps, endpoint)
            except MaxTurnsExceeded:
                output = ""
            return Answer(text=self._read_answer(question, context, output), steps=steps)

    async def stop(self) -> None:
        """Close the connections."""
        await self._clients.close()

    async def _output(self, message: Any, context: Any, steps: list[AgentStep], endpoint: Endpoint) -> str:
        config = _run_config(OpenAIChatCompletionsModel(endpoint.model, self._clients.at(endpoint)), endpoint)
        options: dict[str, Any] = {
            "context": context,
            "hooks": _RecordTurns(steps),
            "max_turns": self._max_turns,
            "run_config": config,
        }
        if not self.stream:
            return str((await Runner.run(self._agent, message, **options)).final_output)
        result = Runner.run_streamed(self._agent, message, **options)
        async for _ in result.stream_events():  # cancelled, it cancels the run itself; twice would leak the connection
            pass
        return str(result.final_output)


def _run_config(model: OpenAIChatCompletionsModel, endpoint: Endpoint) -> RunConfig:
    """The configuration that sends all calls to ``endpoint``, instead of the agents' own models and settings."""

    def name_agent(data: CallModelData[Any]) -> ModelInputData:
        # The SDK calls this before each model call, in the same task: after a handoff and in an agent that serves as a
        # tool, the name is that agent's.
        HEADERS_OVERRIDE.set(endpoint.agent_headers(data.agent.name))
        return data.model_data

    known = {name: value for name, value in endpoint.sampling.items() if name in _MODEL_SETTINGS}
    others = {name: value for name, value in endpoint.sampling.items() if name not in _MODEL_SETTINGS}
    return RunConfig(
        model=model,
        model_settings=ModelSettings(**known, extra_args=others),
        tracing_disabled=True,
        call_model_input_filter=name_agent,
        tool_not_found_behavior="return_error_to_model",
    )


class _RecordTurns(RunHooks[Any]):
    """Appends the model's turns to the rollout's steps."""

    def __init__(self, steps: list[AgentStep]) -> None:
        self._steps = steps

    async def on_llm_end(self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse) -> None:
        parts = [
            item.name + item.arguments if item.type == "function_call" else "".join(map(_text, item.content))
            for item in response.output
            if item.type in ("function_call", "message")
        ]
        self._steps.append(AgentStep(agent=agent.name, kind="llm", input="", output="\n".join(parts), ok=True))


def _text(part: Any) -> str:
    return part.text if part.type == "output_text" else ""
