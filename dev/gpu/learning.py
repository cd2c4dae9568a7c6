"""Does a real model learn? Zero-shot, supervised fine-tuning (SFT), then GRPO; all validation questions after each.

Beside them the controls :data:`CONTROLS`: SFT alone for the time of SFT and GRPO together.

The parts ``learning`` (Spider) and ``medical`` of the GPU suite. Programs that do not wait for each other run at once.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._results import read_lines

from dev.gpu.learning_results import Scores, differences, error_classes, training_figures
from dev.gpu.suite import Suite, separate_gpus
from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.evaluation.metrics import compare, format_change, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts

__all__ = [
    "CONTROLS",
    "KINDS",
    "VARIANTS",
    "LearningRun",
    "pairs",
    "part_async",
    "part_learning",
    "part_medical",
    "spider_experiment",
    "write_folder",
    "write_parts",
]

Settings = Mapping[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "turns": {"credit": "turns"},
    "dynamic": {"sampling_budget": 3},
    "verl": {"trainer": "verl"},
}
"""What further GRPO runs with the first agent and seed change."""
CONTROLS = ("SFT for longer", "SFT for longer on all")
"""SFT from the same model for the time of SFT and GRPO: on the questions for SFT, and on those for GRPO, too."""
KINDS: dict[str, dict[str, Any]] = {"greedy": {"val_temperature": 0}, "sampled": {"val_temperature": 1}}
"""The evaluations of a model."""
_TRAINING = {
    "group_size": 8,
    "minibatches": 1,
    "credit": "broadcast",
    "lr_schedule": "constant",  # a run ends by its time, not at its last step
    "val_tasks": 8,
    "val_every": 0,
    "checkpoint_every": 1000,  # a run that is terminated writes one
}
_OF_TRAINER: dict[str, dict[str, Any]] = {
    "local": {
        "steps": 400,
        "tasks_per_step": 48,
        "n_runners": 192,
        "runner_processes": 4,
    },
    "verl": {  # beside the local runs on one GPU: a small part of its memory
        "config": "starter",
        "steps": 200,
        "tasks_per_step": 12,
        "n_runners": 96,
        "checkpoint_every": 100,
        "runner_processes": 6,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 8_000_000_000,
    },
}
_ASYNC_AGENT = "langgraph"
_EVALUATION = {"n_runners": 64, "runner_processes": 2}  # several run in the memory that the GRPO runs leave


@dataclass(frozen=True)
class Experiment:
    """What a part trains on; settings are those of the commands."""

    part: str
    agents: Sequence[str]
    supervised: Settings
    agent: Settings
    """The agent, its prompts and replies: for GRPO and the evaluations."""
    changed: Settings = field(default_factory=dict)
    """What the GRPO runs change."""
    variants: Sequence[str] = ()
    all_questions: str | None = None
    """The folder with the questions of both parts."""
    data: Settings = field(default_factory=dict)
    """Figures of the data."""


def part_learning(suite: Suite) -> dict[str, Any]:
    """SFT on the questions about a part of Spider's training databases, GRPO on those about the others."""
    return LearningRun(suite, spider_experiment(suite, "learning", suite.options.agents)).run()


def spider_experiment(suite: Suite, part: str, agents: Sequence[str]) -> Experiment:
    """The experiment of a part on Spider; writes its data."""
    options, prompt = suite.options, _spider_prompt()
    first, second, counts = write_parts(options.spider, suite.out / "parts", options.sft_share)
    return Experiment(
        part=part,
        agents=agents,
        supervised={**prompt, "data_dir": str(first), "backend": ",".join(agents), "epochs": 30, "val_tasks": 100},
        agent=_spider_agent(second),
        variants=options.variants,
        all_questions=str(first.parent / "all"),
        data=counts,
    )


def part_medical(suite: Suite) -> dict[str, Any]:
    """SFT on questions about other drugs and diseases than the bundled ones, GRPO on the bundled questions."""
    warm = suite.out / "medical-warm"
    suite.run("medical-generate", ["-m", "dev.medical_data", "--seed", "1", "--out", str(warm)])
    supervised = {"domain": "medical", "data_dir": str(warm), "backend": "openai-agents", "max_model_len": 3072}
    supervised |= _agent_options(prompt_profile="full", example_values=3, show_keys=True, execution_truncate=2048)
    supervised |= {"augment": 0, "epochs": 4, "val_tasks": 200}
    experiment = Experiment(
        part="medical",
        agents=["openai-agents"],
        supervised=supervised,
        agent={"config": "medical", "max_model_len": 3072, "max_tokens": 160, "n_runners": 192},
        changed={"tasks_per_step": 24},
    )
    return LearningRun(suite, experiment).run()


def part_async(suite: Suite) -> dict[str, Any]:
    """SFT, then long runs with verl in each trainer mode, on the questions that the model was not tuned on."""
    options, result = suite.options, dict[str, Any]()
    experiment = spider_experiment(suite, "async", [_ASYNC_AGENT])
    tuned = LearningRun(suite, experiment).supervise("sft", options.sft_s)
    if tuned is None:
        return {"error": "SFT left no model: see its log"}
    agent = {**experiment.agent, "backend": _ASYNC_AGENT}
    scores: dict[str, dict[str, Scores]] = {kind: {} for kind in KINDS}
    for stage in ("before", *options.modes):
        folder: Path | None = Path(tuned)
        if stage != "before":
            settings = {**agent, **_TRAINING, **_OF_TRAINER["verl"], "trainer": "verl", "model": tuned}
            settings |= {"steps": options.steps, "learning_rate": options.learning_rate}
            modes = [f"trainer.v1.trainer_mode={stage}", *(separate_gpus() if stage == "separate_async" else [])]
            program, folder = suite.train(f"async-{stage}", [*pairs(settings), *modes], limit_s=options.verl_s)
            result[stage] = {key: program[key] for key in program if key != "summary"}
        if folder is None:
            continue
        if stage != "before":
            run = RunDir.open(folder)
            verl = [line["data"] for line in read_lines(folder / "verl.jsonl")]
            kept = re.compile("stale|version|memory|partial|dropped|gpu_idle")
            names = sorted({name for line in verl for name in line if kept.search(name)})
            of_steps = {name: [line.get(name) for line in verl] for name in names}
            result[stage] |= {"training": training_figures(run), "of each step": of_steps}
        for kind, temperature in KINDS.items():
            evaluation = {**agent, **_EVALUATION, **temperature, "model": str(folder), "val_tasks": options.questions}
            _, evaluated = suite.evaluate(f"async-{stage}-{kind}", pairs(evaluation))
            if evaluated is not None:
                scores[kind][stage] = scores_by_question(final_rollouts(RunDir.open(evaluated)))
                compared = {
                    f"{first} -> {stage}": format_change(compare(scores[kind][first], scores[kind][stage]))
                    for first in list(scores[kind])[:-1]
                }
                accuracy = mean(map(mean, scores[kind][stage].values()))
                result.setdefault(kind, {})[stage] = {"accuracy": round(accuracy, 4), **compared}
            suite.results["async"] = result
            suite.write()
    return result


def write_parts(data_dir: str | None, out: Path, sft_share: float) -> tuple[Path, Path, dict[str, Any]]:
    """Two folders, for SFT and GRPO, each with all validation questions and its part of the training databases.

    Beside them the folder ``all`` has both parts.

    The databases for SFT have about ``sft_share`` of the training questions. Golds without rows are left out of
    training. Also returns the sizes.
    """
    domain: Any = domains.get("spider")
    data = domain.load(data_dir)
    counts = Counter(str(task["db_id"]) for task in data.train)
    databases = sorted(counts)
    random.Random(0).shuffle(databases)
    shares, parts = {"sft": sft_share, "grpo": 1 - sft_share}, {"sft": set[str](), "grpo": set[str]()}
    for database in databases:
        name = min(shares, key=lambda name: sum(counts[each] for each in parts[name]) / shares[name])
        parts[name].add(database)
    figures = {"validation": len(data.validation)}
    for name, part in {**parts, "all": set(databases)}.items():
        train = [task for task in data.train if task["db_id"] in part]
        write_folder(out / name, data_dir, train, data.validation)
        figures |= {f"databases for {name}": len(part), f"questions for {name}": len(train)}
    return out / "sft", out / "grpo", figures


def write_folder(
    folder: Path, data_dir: str | None, train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]
) -> None:
    """Spider's layout with these tasks, and links to its databases."""
    source = domains.get("spider").folder(data_dir)[0]  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    for file, tasks in (("train_spider.json", train), ("dev.json", validation)):
        rows = [{key: value for key, value in task.items() if key != "db_path"} for task in tasks]
        (folder / file).write_text(json.dumps(rows))
    (folder / "report.json").write_text('{"left_out_of_training": {}}')  # the golds were run
    for databases_of in ("database", "test_database"):
        if (source / databases_of).is_dir() and not (folder / databases_of).exists():
            (folder / databases_of).symlink_to((source / databases_of).resolve())


class LearningRun:
    """Runs an experiment. ``result`` is in the suite's results from the beginning, and written after each program."""

    def __init__(self, suite: Suite, experiment: Experiment) -> None:
        self.suite, self.experiment, self.options = suite, experiment, suite.options
        self.result: dict[str, Any] = {"data": experiment.data, "programs": {}, "accuracy": {}, "training": {}}
        suite.results[experiment.part] = self.result
        self.scores: dict[str, dict[str, Scores]] = {}
        """By agent and way of sampling, and by stage."""
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """SFT, then GRPO and the controls; evaluations after each. Returns :attr:`result`."""
        experiment, at_once = self.experiment, self.options.at_once
        with ThreadPoolExecutor(at_once) as self._evaluations, ThreadPoolExecutor(at_once) as runs:
            for agent in experiment.agents:
                self._start_evaluations("zero", agent, self.suite.model)
            if model := self.supervise("sft", self.options.sft_s):
                for agent in experiment.agents:
                    self._start_evaluations("sft", agent, model)
                for control in CONTROLS[: 1 if experiment.all_questions is None else 2]:
                    runs.submit(self.recorded, self._control, control)  # beside GRPO, as fast or slow as it
                for agent, stage, changed in self._stages():
                    runs.submit(self.recorded, self._train_and_evaluate, stage, agent, model, changed)
        return self.result

    def _stages(self) -> list[tuple[str, str, Settings]]:
        """Agent, name and changed settings of each GRPO run."""
        agents, seeds = self.experiment.agents, self.options.seeds
        found: list[tuple[str, str, Settings]] = [
            (agent, f"seed {seed}", {"seed": seed}) for agent in agents for seed in seeds
        ]
        return found + [(agents[0], name, {**VARIANTS[name], "seed": seeds[0]}) for name in self.experiment.variants]

    def recorded(self, work: Any, *arguments: Any) -> None:
        """An error of one program's results does not end the others."""
        try:
            work(*arguments)
        except Exception as error:
            name = " ".join(map(str, arguments[:2])) or self.experiment.part
            self.write("errors", name, f"{type(error).__name__}: {error}")

    def _control(self, name: str) -> None:
        """SFT for the time of SFT and GRPO together; the time ends it, not the number of epochs."""
        changed: dict[str, Any] = {"epochs": 1000}
        if name == CONTROLS[1]:
            changed["data_dir"] = self.experiment.all_questions
        if model := self.supervise(name, self.options.sft_s + self.options.grpo_s, changed):
            for agent in self.experiment.agents:
                self._start_evaluations(name, agent, model)

    def supervise(self, stage: str, seconds: float, changed: Settings | None = None) -> str | None:
        """The folder of the model after ``seconds`` of SFT for each agent."""
        name, seconds = self._name(stage), seconds * len(self.experiment.agents)
        out = self.suite.out / "sft" / name
        settings = {**self.experiment.supervised, "model": self.suite.model, "device": self.options.device}
        settings |= {"time_limit_s": seconds, "output_dir": str(out), **(changed or {})}
        if self.options.questions:
            settings["val_tasks"] = self.options.questions
        command = ["-m", "groundwire.train.sft", *pairs(settings)]
        self.write("programs", name, self.suite.run(name, command, limit_s=seconds + self.options.limit))
        folder = max(out.glob("2*/model"), default=None)
        if folder is not None and (folder.parent / "summary.json").exists():
            self.write("training", stage, json.loads((folder.parent / "summary.json").read_text()))
        return None if folder is None else str(folder)

    def _train_and_evaluate(self, stage: str, agent: str, model: str, changed: Settings) -> None:
        limit_s = self.options.verl_s if changed.get("trainer") == "verl" else self.options.grpo_s
        if folder := self.train(stage, agent, model, changed, limit_s):
            self._start_evaluations(stage, agent, str(folder))

    def train(
        self,
        stage: str,
        agent: str,
        model: str,
        changed: Settings,
        limit_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> Path | None:
        """The folder of a run of GRPO that ends after ``limit_s``; ``variables`` as for :meth:`.Suite.start`."""
        options, experiment, trainer = self.options, self.experiment, changed.get("trainer", "local")
        settings = {**experiment.agent, **_TRAINING, **_OF_TRAINER[trainer], "learning_rate": options.learning_rate}
        settings |= {"model": model, "backend": agent, "trainer": trainer}
        if trainer == "local":
            settings |= {"device": options.device, **parse_overrides(options.overrides)}
        settings |= {**experiment.changed, **changed}
        name = self._name(stage, agent)
        program, folder = self.suite.train(name, pairs(settings), limit_s, variables)
        self.write("programs", name, {key: program[key] for key in program if key not in ("summary", "figures")})
        if folder is not None:
            figures = training_figures(RunDir.open(folder)) | {"verl": program.get("figures")}
            self.write("training", f"{agent}, {stage}", figures)
        return folder

    def _start_evaluations(self, stage: str, agent: str, model: str) -> None:
        for kind in KINDS:
            self._evaluations.submit(self.recorded, self.evaluate, stage, agent, kind, model)

    def evaluate(
        self,
        stage: str,
        agent: str,
        kind: str,
        model: str,
        changed: Settings | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Path | None:
        """The folder of an evaluation of one of :data:`KINDS`; ``variables`` as for :meth:`.Suite.start`."""
        options, name = self.options, self._name(stage, agent, kind)
        samples = options.samples if kind == "sampled" else 1
        settings = {**self.experiment.agent, **_EVALUATION, **KINDS[kind], "model": model, "backend": agent}
        settings |= {"val_tasks": options.questions, **(changed or {})}
        program, folder = self.suite.evaluate(name, ["-n", str(samples), *pairs(settings)], variables)
        self.write("programs", name, program)
        if folder is None:
            return None
        rollouts = final_rollouts(RunDir.open(folder))
        figures = json.loads((folder / "evaluation.json").read_text())
        figures |= {"rows": str(folder.relative_to(self.suite.out)), "errors": error_classes(rollouts)}
        with self._lock:
            of_stage = self.scores.setdefault(f"{agent}, {kind}", {})
            of_stage[stage] = scores_by_question(rollouts)
            self.result["differences"] = self.compare()
        self.write("accuracy", f"{agent}, {kind}, {stage}", figures)
        return folder

    def compare(self) -> dict[str, Any]:
        """The differences of :attr:`scores`."""
        return {each: differences(found) for each, found in self.scores.items()}

    def _name(self, *parts: str) -> str:
        return "-".join([self.experiment.part, *parts]).replace(" ", "")

    def write(self, section: str, name: str, value: Any) -> None:
        """Add a value to the results, and write them."""
        with self._lock:
            self.result.setdefault(section, {})[name] = value
            self.suite.write()


def _spider_prompt() -> dict[str, Any]:
    prompt = _agent_options(table_info_truncate=6000, example_values=2, show_keys=True, execution_truncate=200)
    return prompt | {"max_model_len": 3072}


def _spider_agent(data_dir: Path) -> dict[str, Any]:
    own = {"max_tokens": 96, "data_dir": str(data_dir), "reward": "spider_exec_match", "n_runners": 384}
    return {**_spider_prompt(), **own}


def _agent_options(**options: Any) -> dict[str, Any]:
    return {f"agent_options.{name}": value for name, value in options.items()}


def pairs(settings: Settings) -> list[str]:
    """The settings as arguments of a command."""
    return [f"{name}={value}" for name, value in settings.items()]
