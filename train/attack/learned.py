"""The learnt attacker: a small policy that is trained against a reward alone, and the ways in which it was paid.

It reads what an agent reads of a task, never the gold. Its own reward is what the attacked one pays for an answer that
is known to be wrong, times a novelty that falls with every use of a way, so that it looks for others. It begins as a
model that has learned for a short time to write the answers of the mechanical strategies: it mixes and varies them.

An answer that was paid is cut down to what it is paid for. This text, with its question's words replaced, is the way.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from groundwire.adapters.sql_agents.prompts import write
from groundwire.adapters.sql_agents.toolkit import SQLToolkit
from groundwire.adapters.tracing import LLMCall
from groundwire.rewards import RewardError
from groundwire.rewards.attack import AttackAnswer, Context, Strategy
from groundwire.rewards.attack.engine import Answers, Learn, Pays
from groundwire.rewards.attack.watch import LEARNT, PAID, contains, fill, question_words
from groundwire.tools.secrets import say
from groundwire.tools.sql.answers import SQL
from groundwire.tools.terminal import progress
from groundwire.train.algorithms.credit import training_items
from groundwire.train.algorithms.model_size import rl_learning_rate
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import all_threads, check_device, fitting_length, load_policy
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.policy.types import Sampling
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.sft.data.examples import Turn, encode
from groundwire.train.sft.trainer import SFTTrainer, make_steps
from groundwire.train.store.rollout import Outcome, Rollout

_TASKS, _GROUP = 8, 8  # of a step: tasks, and answers to each
_TEMPERATURE, _MAX_TOKENS = 1.2, 48
_WARM, _EPOCHS = 0.3, 20  # share of the time in which the mechanical answers are learned, and most passes over them
_CUTS, _CUT_IN_STEP = 150, 3  # answers that are scored to cut one down, and answers that a step cuts down, at most
_FULL = 0.99
"""Pay from which an answer counts on its own task alone. A graded reward owes less than that to an answer that is
partly right, and a policy learns to be: then the way must be paid for other tasks, too."""
_WAYS = 5  # ways that become strategies: those that were used most


@dataclass
class Way:
    """A way of being paid for wrong answers."""

    template: str
    """What is paid; see :func:`.fill`."""
    examples: dict[int, str] = field(default_factory=dict)
    """An answer of each task that was paid in full."""
    uses: int = 0

    def strategy(self) -> Strategy:
        """As a strategy for any task."""
        fix = f"do not pay for {self.template!r}: compare the whole answer with the gold, or judge it by a rubric"
        return Strategy(f"{LEARNT}{self.template}", fix, self._answers)

    def _answers(self, context: Context) -> Iterator[AttackAnswer]:
        yield AttackAnswer(fill(self.template, context.task), "what is paid")
        if context.index in self.examples:
            yield AttackAnswer(self.examples[context.index], "as it was found")


def learner(
    tasks: Sequence[Mapping[str, Any]], view: AgentView, *, model: str, device: str, minutes: float, seed: int = 0
) -> Learn:
    """What learns for so many minutes to attack a reward of ``tasks``, with ``model``. Ctrl-C ends it earlier."""

    check_device(device)
    policy, tokenizer = load_policy(find_model(model))  # what is wrong with it is said before the reward is called
    policy.to(device)

    async def learn(indices: Sequence[int], lessons: Answers, pays: Pays) -> list[Strategy]:
        loop = asyncio.get_running_loop()

        def score(answers: Answers) -> list[float]:
            return asyncio.run_coroutine_threadsafe(pays(answers), loop).result()

        prompts = {index: _prompt(view, tasks[index]) for index in indices}
        attacker = Attacker(tasks, prompts, score, policy, tokenizer, seed=seed)
        with suppress(NotImplementedError, RuntimeError, ValueError):  # on Windows; in another thread
            loop.add_signal_handler(signal.SIGINT, partial(setattr, attacker, "stopped", True))
        try:
            with progress(f"Learning to attack, for {minutes:g} min at most (Ctrl-C ends it)", 100) as advance:
                await asyncio.to_thread(attacker.learn, lessons, 60 * minutes, advance)
        except (RewardError, torch.OutOfMemoryError) as error:
            said = str(error).splitlines()[0]
            say(f"note: the learnt attacker ended: {said:.200}", err=True)
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)
        say(f"note: the learnt attacker took {attacker.steps:,} steps of {_TASKS * _GROUP} answers", err=True)
        return [way.strategy() for way in sorted(attacker.ways, key=lambda way: -way.uses)[:_WAYS]]

    return learn


def _prompt(view: AgentView, task: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages to the attacker: what an agent sees of the task."""
    question, database = str(task.get("question", "")), view.domain.database(dict(task))
    if view.answers is SQL and database:
        system, user = write("system", SQLToolkit().schema(database)), write("write", question)
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]
    others = {name: value for name, value in view.columns(dict(task)).items() if name not in ("id", "question")}
    return [{"role": "user", "content": "\n".join([question, *(f"{name}: {value}" for name, value in others.items())])}]


class Attacker:
    """Learns what ``score`` pays; ``prompts`` are the messages for some of ``tasks``, by their indices.

    ``stopped``, set from any thread, ends :meth:`learn` after its step, as an error of ``score`` does.
    """

    def __init__(
        self,
        tasks: Sequence[Mapping[str, Any]],
        prompts: Mapping[int, Any],
        score: Callable[[Answers], list[float]],
        policy: Any,
        tokenizer: Any,
        *,
        seed: int,
    ) -> None:
        self._tasks, self._turns, self._score, self._seed = tasks, prompts, score, seed
        self._random = random.Random(seed)
        torch.manual_seed(seed)
        self._model, self._tokenizer = policy, tokenizer
        blank = {"role": "assistant", "content": "."}
        examples = encode(self._tokenizer, [Turn(messages, blank) for messages in prompts.values()])
        ids = {index: example.prompt_ids for index, example in zip(prompts, examples, strict=True)}
        positions = fitting_length(self._model, _MAX_TOKENS + max(map(len, ids.values())))
        self._prompts = {index: prompt for index, prompt in ids.items() if len(prompt) + _MAX_TOKENS <= positions}
        self.ways: list[Way] = []
        self.steps, self.stopped = 0, False

    def learn(self, demonstrations: Answers, seconds: float, on_step: Callable[[], None]) -> None:
        """Attack for about so many seconds, after learning ``demonstrations``: indices of tasks, and answers."""
        end = time.monotonic() + seconds
        if demonstrations:
            self._imitate(demonstrations, _WARM * seconds)
        if not self._prompts:
            raise RewardError("no task fits into the model's context")
        longest = max(map(len, self._prompts.values())) + _MAX_TOKENS
        engine = LocalEngine(self._model, self._tokenizer, max_model_len=longest, max_batch=_TASKS * _GROUP)
        rate = rl_learning_rate(self._model.num_parameters())
        config = RunConfig(loss="dr-grpo", learning_rate=rate, temperature=_TEMPERATURE, max_tokens=_MAX_TOKENS)
        settings, constraints = GRPOConfig.from_settings(config), Constraints(self._model, self._tokenizer)
        grpo = GRPO(self._model, settings, seed=self._seed, constraints=constraints)
        try:
            while time.monotonic() < end and not self.stopped:
                rollouts = self._sample(engine)
                torch.set_num_threads(all_threads())  # the engine uses fewer
                grpo.update(training_items(rollouts, config, least=0.0))
                self.steps += 1
                engine.update_weights(self.steps)
                on_step()
        finally:
            engine.close()

    def _is(self, way: Way, index: int, answer: str) -> bool:
        return contains(answer, fill(way.template, self._tasks[index]))

    def _imitate(self, demonstrations: Answers, seconds: float) -> None:
        turns = [Turn(self._turns[index], {"role": "assistant", "content": text}) for index, text in demonstrations]
        examples = [example for example in encode(self._tokenizer, turns) if len(example.response_ids) <= _MAX_TOKENS]
        self._random.shuffle(examples)
        with TemporaryDirectory() as folder:
            settings, checkpoints = SFTSettings(time_limit_s=max(1.0, seconds)), Checkpoints(Path(folder))
            trainer = SFTTrainer(self._model, self._tokenizer, settings, checkpoints=checkpoints)
            groups = [trainer.rows(examples[start : start + 16]) for start in range(0, len(examples), 16)] * _EPOCHS
            steps = takewhile(lambda _: not self.stopped, make_steps(groups, trainer.tokens_per_forward, first=0))
            trainer.train(steps, len(groups), [], lambda _: None)

    def _sample(self, engine: LocalEngine) -> list[Rollout]:
        """The scored answers of a step."""
        asked = self._random.sample(list(self._prompts), min(_TASKS, len(self._prompts)))
        sampling = Sampling(temperature=_TEMPERATURE, max_tokens=_MAX_TOKENS)
        futures = [(index, engine.submit(self._prompts[index], sampling)) for index in asked for _ in range(_GROUP)]
        replies = [(index, future.result()) for index, future in futures]
        pays = self._score([(index, reply.text) for index, reply in replies])
        rollouts, cuts = [], 0
        for (index, reply), pay in zip(replies, pays, strict=True):
            novelty = 1.0
            if pay >= PAID:
                way = next((way for way in self.ways if self._is(way, index, reply.text)), None)
                if way is None and cuts < _CUT_IN_STEP:
                    way, cuts = self._cut_down(index, reply.text), cuts + 1
                if way is not None:
                    way.uses += 1
                    novelty = (1 + way.uses / _GROUP) ** -0.5
                    if pay >= _FULL:
                        way.examples.setdefault(index, reply.text)
            task = self._tasks[index]
            rollout = Rollout(task=dict(task), group=str(index), outcome=Outcome(reward=pay * novelty))
            call = LLMCall(rollout_id=rollout.rollout_id, attempt_id="", sequence=1, prompt_ids=[*reply.prompt_ids])
            call.response_ids, call.logprobs, rollout.calls = reply.token_ids, reply.logprobs, [call]
            rollouts.append(rollout)
        return rollouts

    def _cut_down(self, index: int, answer: str) -> Way:
        """The way of an answer: the answer without the parts that it is paid without."""
        left, calls = re.findall(r"\s*(?:\w+|[^\w\s])", answer), _CUTS
        size = len(left)
        while size and calls > 0:
            shorter = [left[:start] + left[start + size :] for start in range(0, len(left), size)][:calls]
            calls -= len(shorter)
            pays = self._score([(index, "".join(rest).strip()) for rest in shorter])
            paid = [rest for rest, pay in zip(shorter, pays, strict=True) if pay >= PAID]
            left = self._random.choice(paid) if paid else left
            size = min(size, len(left)) if paid else size // 2
        template = text = "".join(left).strip()
        if (known := next((way for way in self.ways if self._is(way, index, text)), None)) is not None:
            return known
        for number, word in enumerate(question_words(self._tasks[index]), 1):
            template = re.sub(rf"\b{re.escape(word)}\b", f"{{{number}}}", template)
        self.ways.append(Way(template))
        return self.ways[-1]
