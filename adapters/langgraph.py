"""Any compiled LangGraph graph as a backend.

The graph is built once and serves all rollouts at the same time. A rollout's chat model is made from its endpoint and
reaches the graph through the input or the runtime context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph

from groundwire.adapters._failures import typed_failures
from groundwire.adapters._openai_client import Clients
from groundwire.adapters._types import Answer, Endpoint, Question

__all__ = ["LangGraphBackend"]


def _messages(question: Question, endpoint: Endpoint, model: ChatOpenAI) -> dict[str, Any]:
    return {"messages": [("user", question.text)]}


def _no_context(question: Question, endpoint: Endpoint, model: ChatOpenAI) -> None:
    return None


def _last_message(question: Question, state: Any) -> Answer:
    return Answer(text=state["messages"][-1].text)


class LangGraphBackend:
    """Runs ``graph`` once per question, over one HTTP connection pool.

    ``make_input`` and ``make_context`` build what ``graph.ainvoke`` takes, from the question, the endpoint and its chat
    model. ``read_answer`` reads the answer and the agent's steps from the final state. The defaults suit a graph over
    ``MessagesState``. ``agents`` are the names that the graph's nodes send with ``endpoint.agent_headers``.
    """

    def __init__(
        self,
        graph: CompiledStateGraph[Any, Any, Any, Any],
        *,
        agents: tuple[str, ...] = (),
        make_input: Callable[[Question, Endpoint, ChatOpenAI], Any] = _messages,
        make_context: Callable[[Question, Endpoint, ChatOpenAI], Any] = _no_context,
        read_answer: Callable[[Question, Any], Answer] = _last_message,
        recursion_limit: int = 25,
        request_timeout_s: float = 120.0,
    ) -> None:
        self.agents = agents
        self._graph = graph
        self._make_input, self._make_context, self._read_answer = make_input, make_context, read_answer
        self._config = {"recursion_limit": recursion_limit}
        self._clients = Clients(timeout_s=request_timeout_s)

    async def run(self, question: Question, endpoint: Endpoint) -> Answer:
        """Answer one question. Raises a :class:`adapters.BackendError`."""
        with typed_failures(endpoint):
            given = (question, endpoint, self._model(endpoint))
            context = self._make_context(*given)
            state = await self._graph.ainvoke(self._make_input(*given), self._config, context=context)
            return self._read_answer(question, state)

    async def stop(self) -> None:
        """Close the connections."""
        await self._clients.close()

    def _model(self, endpoint: Endpoint) -> ChatOpenAI:
        client = self._clients.at(endpoint)
        return ChatOpenAI(
            model=endpoint.model,
            api_key=endpoint.api_key,
            root_async_client=client,
            async_client=client.chat.completions,
            client=object(),  # the synchronous client is never used
            **endpoint.sampling,
        )
