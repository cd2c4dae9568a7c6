"""DSPy: modules."""

from __future__ import annotations

import inspect
from typing import Any

from groundwire.adapters.agents.drivers import AgentTask, Driver, lacks

_NO_ANSWERS = {"reasoning", "rationale", "trajectory"}  # outputs that modules add to those of their signatures


class FrameworkDriver(Driver):
    """A ``Module``. An input with the name of a column gets that, another gets the question."""

    method = ""
    takes_context = False
    threaded = True
    tool_fields = ()  # they are described in the prompt

    def inputs(self, task: AgentTask) -> dict[str, Any]:
        kind = type(self.agent)  # the object itself warns of its `forward`
        _, *parameters = inspect.signature(getattr(kind, "forward", None) or kind.aforward).parameters.values()
        needs = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not needs:
            signatures = (getattr(module, "signature", None) for module in (self.agent, *self.agent.predictors()))
            needs = dict.fromkeys(next(filter(None, signatures)).input_fields, True)
        lacking = [name for name, needed in needs.items() if needed and name not in task]
        if len(lacking) > 1 or (lacking and "question" in needs):
            raise lacks(lacking, "module")
        return {name: task[name] for name in needs if name in task} | dict.fromkeys(lacking, task["question"])

    def fresh(self) -> Any:
        return self.agent.deepcopy()  # tools and what else cannot be copied are shared

    async def run(self, agent: Any, arguments: Any, task: AgentTask) -> Any:
        import dspy

        arguments = {**arguments, **await self.config(task)}
        for predictor in agent.predictors():
            predictor.lm = _through_httpx(predictor.lm)
        with dspy.context(lm=_through_httpx(dspy.settings.lm)):
            is_sync = hasattr(type(agent), "forward")
            result = await (self.in_thread(lambda: agent(**arguments), task) if is_sync else agent.acall(**arguments))
        fields = result.toDict() if isinstance(result, dspy.Prediction) else {}
        answers = {name: value for name, value in fields.items() if name not in _NO_ANSWERS}
        return {"answer": next(iter(answers.values()))} if len(answers) == 1 else answers or result


def _through_httpx(lm: Any) -> Any:
    """A model that calls through LiteLLM: DSPy's own client has sockets of its own, which are not redirected."""
    return lm.copy(engine="litellm") if getattr(lm, "engine", None) in ("auto", "lm15") else lm
