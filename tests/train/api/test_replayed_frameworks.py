"""The agents of examples/frameworks go as recorded, with whole and with streamed replies."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from groundwire.train.api.evaluation import make_evaluation_job
from groundwire.train.api.replay import replay, replay_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.validation import choose_tasks, validation_deadline_s, validation_requests
from groundwire.train.policy import STARTER
from groundwire.train.policy.pretrained.tokenizer import read_tokenizer
from groundwire.train.policy.types import Completion, Sampling
from groundwire.train.step_timer import StepTimer

ROOT = Path(__file__).parents[3]
COUNT = 4
QUERIES = ("SELECT count(*) FROM sqlite_master", "SELECT name FROM sqlite_master", "SELEC 1", "SELECT 1, 'é'")
# What an author changes to stream: the model's option, the runner's method, or the client's.
STREAMED = {
    "langgraph": "agent.llm.streaming = True\ngraph = agent.graph\n",
    "openai_client": """
from openai.lib.streaming.chat import ChatCompletionStreamState
create = agent.client.chat.completions.create

async def streamed(**options):
    state = ChatCompletionStreamState()
    async for chunk in await create(**options, stream=True):
        state.handle_chunk(chunk)
    return state.get_final_completion()

agent.client.chat.completions.create = streamed
answer = agent.answer
""",
    "openai_agents": """
from agents import Runner

async def answer(task):
    result = Runner.run_streamed(agent.triage_agent, task["question"], context=dict(task))
    async for _ in result.stream_events():
        pass
    return result.final_output
""",
}
AGENTS = {
    "langgraph": ("langgraph", "graph"),
    "openai_client": ("openai", "answer"),
    "openai_agents": ("agents", "triage_agent"),
    "anthropic_client": ("anthropic", "answer"),
    "mcp_tools": ("mcp", "agent"),
}
"""The package that each needs, and the name of the agent. The Anthropic client's is streamed as it is."""


class CallingEngine:
    """Calls the tools that a prompt offers, now and then wrongly or several at once, by the seed of the request."""

    max_model_len, weights_version = 8192, 0

    def __init__(self) -> None:
        self.tokenizer = read_tokenizer(STARTER)

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, *, on_token: Any = None) -> Future[Completion]:
        chance = random.Random(sampling.seed)
        offered = re.findall(r'"name": "(\w+)", "description"', self.tokenizer.decode(prompt)) or [""]
        name, sql = chance.choice(offered), chance.choice(QUERIES)
        call = {"name": name, "arguments": {"query": sql, "sql": sql}}
        written = f"<tool_call>{json.dumps(call)}</tool_call>" * chance.choice((1, 1, 2))
        text = chance.choice((written, written, written[:-25], f"```sql\n{sql}\n```")) if name else sql
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        logprobs = [-chance.random() for _ in ids]
        for token, logprob in zip(ids, logprobs, strict=True) if on_token else ():
            on_token(token, logprob)
        future: Future[Completion] = Future()
        future.set_result(Completion(prompt, ids, logprobs, text, "stop"))
        return future

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("folder", "stream"),
    [*((folder, False) for folder in AGENTS), *((folder, True) for folder in STREAMED)],
)
def test_the_rollouts_of_an_example_go_as_recorded(folder: str, stream: bool, tmp_path: Path) -> None:
    package, name = AGENTS[folder]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    file = ROOT / "examples" / "frameworks" / folder / "agent.py"
    if stream:
        load = f"spec = importlib.util.spec_from_file_location('example', {str(file)!r})\n"
        load += "agent = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(agent)\n"
        streamed = tmp_path / "streamed.py"
        streamed.write_text(f"import importlib.util\n{load}{STREAMED[folder]}")
        file, name = streamed, {"openai_agents": "answer"}.get(folder, name)
    settings = {"agent": f"{file}:{name}", "model": "starter", "max_tokens": 256, "max_model_len": 8192}
    # The agents keep no state; without processes of their own an MCP server is started once.
    job = make_evaluation_job({**settings, "rollout_process": "off", "output_dir": str(tmp_path)})
    run = RunDir.create(tmp_path, backend="custom", domain="spider", config=job.config.to_dict())
    requests = validation_requests(choose_tasks(job.data.validation, COUNT), job.config, 1.0)
    with job.runtime(CallingEngine(), run=run, timer=StepTimer()) as runtime:
        run.write_rollouts(0, runtime.run(requests, deadline_s=validation_deadline_s(job.config, COUNT)), kind="val")
    rollouts, _ = run.rollouts()
    assert sum(len(rollout.calls) for rollout in rollouts) > COUNT
    chosen = [rollout.rollout_id for rollout in rollouts]
    [ended] = replay(replay_job(run, {}), run, chosen)
    assert [each.difference for each in ended] == [None] * COUNT
    assert [each.again.outcome.answer for each in ended] == [rollout.outcome.answer for rollout in rollouts]
