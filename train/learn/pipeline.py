"""The walk from traces to a verdict. Each stage leaves its files in the result's folder, and is done once.

learn.json          what was asked for, the results and the verdict
task/               tasks.jsonl and reward.py, made of the traces
chats.jsonl         what is learned, and what is held out ("split": "validation")
evaluations/NAME/   of the model before, after fine-tuning (sft) and after reinforcement learning (grpo)
sft/, runs/         the supervised run and the run of groundwire train
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.domains.held_out import question_key
from groundwire.tools.errors import CommandError, UserError
from groundwire.tools.files import read_json
from groundwire.tools.secrets import say
from groundwire.tools.terminal import show_line, spinner
from groundwire.train.algorithms.distillation import NoLogprobsError, Teacher
from groundwire.train.api.evaluation import evaluation_settings, make_evaluation_job, run_evaluation
from groundwire.train.api.training import make_job, train
from groundwire.train.artifacts.run_dir import RunDir, new_folder
from groundwire.train.config.resolve import with_file
from groundwire.train.config.run_config import regular_expression
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.evaluation.metrics import compare, few_questions, format_change, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts, untrained
from groundwire.train.job.job import NO_OBJECTS, Job, ModelEndpoint, Objects
from groundwire.train.job.prepare import check_parts, relative_path, with_resolved_paths
from groundwire.train.job.trained_model import newest_model
from groundwire.train.job.trainer import default_trainer
from groundwire.train.learn.chats import Choice, prompt_changes, read_lines, write_best, write_chats
from groundwire.train.policy.pretrained.locate import find_model, read_tokenizer
from groundwire.train.traces.read import read_traces
from groundwire.train.traces.tasks import write_tasks

if TYPE_CHECKING:
    from rich.console import Console

STATE = "learn.json"
MARGIN = 0.05
"""A difference of fewer points, with its whole interval, is none."""
_TOKENS = 4096
"""Of a step of the fine-tuning: a few hundred traces make dozens of steps."""
_STAGES = {
    "before": "before",
    "sft": "after fine-tuning",
    "best": "after the teacher's answers",
    "grpo": "after reinforcement learning",
}
_PASSES = 2
"""How often reinforcement learning samples each task."""
_SAMPLES = 4
"""How often a teacher without log-probabilities is asked the same task."""


@dataclass(frozen=True, kw_only=True)
class LearnRequest:
    """What is asked for, as it is stored."""

    files: Sequence[str]
    given: Mapping[str, Any]
    """The settings of the run, by name."""
    sft: Mapping[str, Any] = field(default_factory=dict)
    """Those of the fine-tuning."""
    trained_agent: str = ""
    trained_model: str = ""
    rl: bool = True
    mask: bool = True


@dataclass(frozen=True)
class LearnResult:
    """What came of it."""

    verdict: str
    """``better``, ``equal``, ``worse`` or ``not enough data``."""
    line: str
    """The verdict with its numbers."""
    model: Path
    """The folder of the trained model, in Hugging Face's format."""
    folder: Path
    figures: dict[str, Any] = field(repr=False)
    """The content of ``learn.json``."""

    def __str__(self) -> str:
        return self.line


def verdict(change: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """The verdict on a ``change`` of :mod:`groundwire.train.evaluation.metrics`, and its line; ``unit``: of what."""
    difference, (low, high), count = change["difference"], change["difference_ci95"], change["questions"]
    numbers = f"{format_change(change)} on {count} {unit}"
    if low > 0 or high < 0:
        word = "better" if low > 0 else "worse"
        return word, f"{word}: {numbers}"
    if low >= -MARGIN and high <= MARGIN:
        return "equal", f"equal: {numbers}; less than {100 * MARGIN:g} points either way"
    reach = (high - low) / 2
    needed = math.ceil(count * (reach / max(abs(difference), MARGIN)) ** 2)
    return "not enough data", f"not enough data: {numbers}; to see this difference takes about {needed:,} {unit}"


class Learning:
    """A result's folder on its way to the verdict."""

    def __init__(self, folder: Path, request: LearnRequest, output: Console, objects: Objects = NO_OBJECTS) -> None:
        self.folder, self.request, self.output, self.objects = folder, request, output, objects
        self.state = read_json(folder / STATE)
        self.base = find_model(request.given["model"])

    def run(self) -> LearnResult:
        """Do what is left to do. Raises errors derived from :class:`groundwire.tools.errors.UserError`."""
        with_agent = _has_agent(self.request.given, self.objects)
        chats = self.folder / "chats.jsonl"
        if "data" not in self.state:
            self._say(f"folder: {self.folder}")
            traces = read_traces(*self.request.files, mask=self.request.mask)
            self._data(traces, chats, with_agent=with_agent)
        with_agent = with_agent and self.state["data"]["judged"]
        if with_agent:
            before = self._evaluate("before", self.base)
            self._compare_prompts(chats, before)
        settings = self._sft_settings(chats, self.base, "sft")
        model = self._fine_tune(settings)
        self._write(fine_tuned=self._inside(model))
        if not with_agent:
            return self._compare_replies(model, chats, settings)
        self._evaluate("sft", model)
        if self._settings()["teacher"] and not self._teacher_scores():
            model = self._learn_best(model)
        if self.request.rl and self._settings()["steps"] != 0:
            model = self._reinforce(model)
            self._evaluate("grpo", model)
        return self._conclude(model)

    def _write(self, **values: Any) -> None:
        self.state |= values
        RunDir(self.folder).write_json(STATE, self.state)

    def _inside(self, path: Path) -> str:
        """A path in the result's folder, which may be moved."""
        return str(path.resolve().relative_to(self.folder.resolve()))

    def _say(self, text: str) -> None:
        show_line(self.output, text)

    def _data(self, traces: Any, chats: Path, *, with_agent: bool) -> None:
        given, tasks = self.request.given, self.folder / "task"
        shutil.rmtree(tasks, ignore_errors=True)  # of a time that was stopped
        with spinner("reading the traces"):
            written = write_tasks(tasks, traces)
        own = bool(given.get("domain") or self.objects.domain)
        judged = bool(given.get("reward") or self.objects.reward or own) or not written.is_draft
        lines = [] if own else list(written.lines)
        learned = "the accepted ones are learned" if written.rule else "nothing tells answers apart, so all are learned"
        lines.append(f"rule: {written.rule or 'none'}; {learned}")
        self.state["data"] = {"judged": judged}
        splits = self._own_splits() if own and with_agent else written.splits
        with spinner("rendering the traces"):
            made = write_chats(
                chats,
                traces,
                Choice(
                    written.accepts if written.rule else lambda rollout: True,
                    (lambda key: splits.get(key, "train")) if own else splits.get,
                    self.request.trained_agent,
                    self.request.trained_model,
                ),
                read_tokenizer(self.base),
                max_model_len=self._settings()["max_model_len"],
            )
        lines += [*made.lines(), *(f"unread: {count:,} {reason}" for reason, count in traces.unread.most_common())]
        if masked := sum(traces.masked.values()):
            lines.append(f"masked: {masked:,} keys and personal data; what is learned has marks in their place")
        held_out = sum(split == "validation" for split in splits.values())
        lines += filter(None, [few_questions(held_out) if with_agent else ""])
        if with_agent and not judged:
            lines.append(
                f"note: {tasks / 'reward.py'} is a draft, so no answer can be judged: replies are compared. Give "
                " --reward for reinforcement learning and a test"
            )
        for line in lines:
            self._say(line)
        trained = sum(split == "train" for split in splits.values())
        self._write(data={"judged": judged, "tasks": trained, "lines": lines})

    def _own_splits(self) -> dict[str, str]:
        """The split of each task of the user's own domain."""
        data = self._job("before", self.base).data
        return {question_key(task): split for split in ("train", "validation") for task in getattr(data, split)}

    def _settings(self) -> dict[str, Any]:
        """The resolved settings of the run."""
        given = {name: value for name, value in self.request.given.items() if name != "output_dir"}
        return evaluation_settings(given, objects=self.objects.names()).to_dict()

    def _given(self, model: Path, folder: str) -> dict[str, Any]:
        given, task = dict(self.request.given), self.folder / "task"
        if not (given.get("domain") or self.objects.domain):
            given["domain"] = str(task / "tasks.jsonl")
            if not (given.get("reward") or self.objects.reward):
                given["reward"] = f"{task / 'reward.py'}:reward"
        if self.state.get("teacher", "").startswith("best"):
            del given["teacher"], given["teacher_model"]
        return {**given, "model": str(model), "output_dir": str(self.folder / folder)}

    def _job(self, name: str, model: Path) -> Job:
        return make_evaluation_job(self._given(model, f"evaluations/{name}"), objects=self.objects)

    def _evaluate(self, name: str, model: Path) -> RunDir:
        """The evaluation of a model on the held-out tasks, which is made if it is not there."""
        if done := sorted(self.folder.glob(f"evaluations/{name}/*/evaluation.json")):
            run = RunDir.open(done[0].parent)
        else:
            self._say(f"{_STAGES[name]}: the held-out tasks")
            run, _ = run_evaluation(self._job(name, model), samples=1, output=self.output)
        accuracy = read_json(run.path / "evaluation.json")["accuracy"]
        self._write(**{name: {"accuracy": accuracy, "run": self._inside(run.path)}})
        self._say(f"{_STAGES[name]}: {accuracy:.3f}")
        return run

    def _compare_prompts(self, chats: Path, before: RunDir) -> None:
        if "prompts" in self.state:
            return
        now = ((call.agent, call.prompt_ids) for rollout in final_rollouts(before) for call in rollout.trainable_calls)
        lines = list(prompt_changes(chats, read_tokenizer(self.base), now))
        for line in lines:
            say(line, err=True)
        self._write(prompts=lines)

    def _fine_tune(self, settings: SFTSettings) -> Path:
        """The folder of the fine-tuned model, which is made if it is not there."""
        from groundwire.train.sft.run import train_and_print

        resumed = next(iter(sorted(Path(settings.output_dir).glob("*/config.json"))), None)
        if resumed and (resumed.parent / "model" / "config.json").is_file():
            return resumed.parent / "model"
        folder, given = resumed and resumed.parent, {} if resumed else settings.model_dump()
        return train_and_print(settings, resume=folder, given=given, quiet=self.output.quiet)

    def _teacher_scores(self) -> bool:
        """Whether the teacher gives log-probabilities of the model's tokens."""
        if "teacher" not in self.state:
            try:
                Teacher(
                    evaluation_settings(self.request.given, objects=self.objects.names()), read_tokenizer(self.base)
                )
                self._write(teacher="on-policy distillation")
            except NoLogprobsError as error:
                self._say(f"{error}. So its right answers to the training tasks are learned")
                self._write(teacher=f"best of {_SAMPLES}")
        return self.state["teacher"] == "on-policy distillation"

    def _learn_best(self, model: Path) -> Path:
        """The model after fine-tuning on the teacher's right answers to the training tasks."""
        from groundwire.train.cli.progress import ProgressDisplay

        folder = self.folder / "teacher"
        chats = folder / "best.jsonl"
        if "best_of_n" not in self.state:
            folder.mkdir(exist_ok=True)
            given = {**self._given(model, "teacher"), "model": self.request.given["teacher_model"], "val_tasks": 0}
            endpoint = ModelEndpoint(self.request.given["teacher"], os.environ.get("OPENAI_API_KEY"))
            job = make_evaluation_job(given, endpoint, split="train", objects=self.objects)
            with ProgressDisplay(self.output, 0) as display:
                answered, asked = write_best(job, chats, display, samples=_SAMPLES)
            answers = f"right answers to {answered:,} of {asked:,} training tasks"
            self._say(f"the teacher: {answers}, each asked at most {_SAMPLES} times")
            self._write(best_of_n={"answered": answered, "tasks": asked})
        if self.state["best_of_n"]["answered"]:
            model = self._fine_tune(self._sft_settings(chats, model, "teacher/sft"))
            self._evaluate("best", model)
            self._write(fine_tuned=self._inside(model))
        return model

    def _sft_settings(self, chats: Path, model: Path, folder: str) -> SFTSettings:
        config = self._settings()
        common = {name: config[name] for name in ("device", "seed", "max_model_len")} | {"tokens_per_step": _TOKENS}
        own = {"chats": str(chats.resolve()), "model": str(model), "output_dir": str(self.folder / folder)}
        return SFTSettings(**{**common, **self.request.sft, **own})

    def _reinforce(self, model: Path) -> Path:
        started = sorted(self.folder.glob("runs/*/config.json"))
        resumed = RunDir.open(started[0].parent) if started else None
        steps = math.ceil(_PASSES * self.state["data"]["tasks"] / self._settings()["tasks_per_step"])
        given = {} if resumed else {"steps": steps, **self._given(model, "runs")}  # a preset's are for more tasks
        job = make_job(given, resumed=resumed, objects=self.objects)
        for note in job.notes:
            self._say(note)
        run = train(job, resumed, self.output)
        if reason := untrained(run.metrics()):
            self._say(f"warning: {reason}")
        self._write(run=self._inside(run.path))
        return newest_model(run)

    def _conclude(self, model: Path) -> LearnResult:
        scores = {
            name: scores_by_question(final_rollouts(RunDir.open(self.folder / self.state[name]["run"])))
            for name in _STAGES
            if name in self.state
        }
        names = list(scores)
        if "grpo" in scores and verdict(compare(scores[names[-2]], scores["grpo"]), "")[0] == "worse":
            self._say("reinforcement learning made the model worse, so the fine-tuned one is kept and judged")
            names, model = names[:-1], self.folder / self.state["fine_tuned"]
        comparisons, pairs = {}, dict.fromkeys([*pairwise(scores), (names[0], names[-1])])
        for first, second in pairs:
            change = compare(scores[first], scores[second])
            comparisons[f"{second} - {first}"] = change
            self._say(f"{second} - {first}: {format_change(change)} on {change['questions']} held-out tasks")
        word, line = verdict(comparisons[f"{names[-1]} - {names[0]}"], "held-out tasks")
        accuracies = ", ".join(f"{self.state[name]['accuracy']:.3f} {_STAGES[name]}" for name in names)
        return self._result(word, f"{line} ({accuracies})", model, comparisons)

    def _compare_replies(self, model: Path, chats: Path, settings: SFTSettings) -> LearnResult:
        from groundwire.train.learn.replies import score_replies

        for name, folder in (("before", self.base), ("sft", model)):
            if "logprob" not in self.state.get(name, {}):
                self._write(**{name: score_replies(folder, read_lines(chats), settings)})
        before, after = self.state["before"], self.state["sft"]
        change = compare(before["equal"], after["equal"])
        self._say(
            f"log-probability of a token of the {after['replies']:,} held-out replies: {before['logprob']:.3f} before, "
            f"{after['logprob']:.3f} after"
        )
        word, line = verdict(change, "held-out conversations")
        shares = "share of greedy replies that are equal to the recorded ones {:.3f} before, {:.3f} after"
        return self._result(word, f"{line} ({shares.format(*change['accuracy'])})", model, {"sft - before": change})

    def _result(self, word: str, line: str, model: Path, comparisons: Mapping[str, Any]) -> LearnResult:
        self._write(verdict=word, line=line, model=self._inside(model), comparisons=comparisons)
        self._say(f"model: {model}")
        self._say(line)
        return LearnResult(word, line, model, self.folder, self.state)


def learn_from(
    request: LearnRequest | None, *, resume: Path | None = None, output: Console, objects: Objects = NO_OBJECTS
) -> LearnResult:
    """Begin with a ``request``, or go on in the folder ``resume``."""
    if (request is None) == (resume is None):
        raise CommandError("give files of traces and --model, or --resume with a folder of groundwire learn alone")
    if resume is not None:
        try:
            stored = read_json(resume / STATE)["request"]
            request = LearnRequest(**stored)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CommandError(f"{resume} is no folder of groundwire learn: {error}") from error
        return _go_on(resume, request, output, objects)
    assert request is not None
    given = with_resolved_paths(with_file(dict(request.given)), "model", "data_dir")
    if not given.get("model"):
        raise CommandError("give the model that is to learn: --model starter, smollm2, a folder, or OWNER/MODEL")
    trainer = given.get("trainer") or default_trainer(None, device=given.get("device"), dev=bool(objects.names()))
    if not given.get("config") and trainer == "local":
        given["config"] = "tuned" if given["model"] == "starter" else "hf"
    files = [str(path.resolve()) for path in read_traces(*request.files).files]
    request = replace(request, files=files, given=given)
    SFTSettings(**{**request.sft, "chats": "chats.jsonl"})
    for name in ("trained_agent", "trained_model"):
        regular_expression(name, getattr(request, name))
    find_model(given["model"])
    config = evaluation_settings(given, objects=objects.names())
    check_parts(config, objects, with_agent=_has_agent(given, objects))
    folder = new_folder(given.get("output_dir", "learned"), Path(files[0]).stem)
    RunDir(folder).write_json(STATE, {"request": asdict(request)})
    try:
        return _go_on(folder, request, output, objects)
    except UserError:
        if "data" not in read_json(folder / STATE):  # nothing was made of the traces
            shutil.rmtree(folder)
            with suppress(OSError):
                folder.parent.rmdir()  # if nothing else is in it
        raise


def _has_agent(given: Mapping[str, Any], objects: Objects) -> bool:
    return bool(given.get("agent") or given.get("backend") or objects.agent)


def _go_on(folder: Path, request: LearnRequest, output: Console, objects: Objects) -> LearnResult:
    folder = Path(relative_path(folder.resolve()))
    try:
        with RunDir(folder).lock():
            return Learning(folder, request, output, objects).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; continue with groundwire learn --resume {folder}") from None
