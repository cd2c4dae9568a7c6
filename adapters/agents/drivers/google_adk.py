"""Google ADK."""

from __future__ import annotations

from typing import Any

from groundwire.adapters._types import AgentSetupError
from groundwire.adapters.agents.drivers import AgentTask, Driver

_NAME = "groundwire"


class FrameworkDriver(Driver):
    """An agent, an ``App`` or a ``Runner`` of ADK.

    Each attempt has a runner with services in memory, and a session. The state has what ``agent_context``
    returns, else the columns of the task.
    """

    method = "run_async"
    context_class = dict

    @property
    def calls_tools(self) -> bool:
        agent = getattr(self.agent, "agent", self.agent)  # of a runner
        root = getattr(agent, "root_agent", agent)  # of an app; of an agent, the one at the top of its tree
        return bool(getattr(root, "tools", None) or getattr(root, "sub_agents", None))

    def fresh(self) -> Any:
        from google.adk.runners import InMemoryRunner

        app = getattr(self.agent, "app", self.agent)  # of a runner, if it was made of one
        if hasattr(app, "root_agent") and hasattr(app, "plugins"):
            return InMemoryRunner(app=app)
        plugins = getattr(getattr(self.agent, "plugin_manager", None), "plugins", None)
        agent, name = getattr(self.agent, "agent", self.agent), getattr(self.agent, "app_name", _NAME)
        return InMemoryRunner(agent, app_name=name, plugins=plugins)

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        from google.genai.types import Content, Part

        state = dict(await self.context(task) or {})
        session = await agent.session_service.create_session(app_name=agent.app_name, user_id=_NAME, state=state)
        message = Content(role="user", parts=[Part(text=arguments)]) if isinstance(arguments, str) else arguments
        text, config = "", await self.config(task)
        async for event in agent.run_async(user_id=_NAME, session_id=session.id, new_message=message, **config):
            if event.error_code and not event.content:
                raise RuntimeError(f"{event.error_code}: {event.error_message}")
            if event.is_final_response() and event.content:
                parts = [part for part in event.content.parts or () if not part.thought]
                text = "".join(part.text or "" for part in parts) or text
                if any(part.function_call and "confirmation" in part.function_call.name for part in parts):
                    raise AgentSetupError("a tool waits for a confirmation, and nobody gives it in a rollout")
        return text
