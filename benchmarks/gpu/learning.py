"""Does a real model learn? Zero-shot, supervised fine-tuning (SFT), then GRPO; all validation questions after each.

The parts ``learning`` (Spider) and ``medical`` of the GPU suite. Programs that do not wait for each other run at once.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.learning_results import Rows, differences, error_classes, training_figures
from benchmarks.gpu.suite import Suite
from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.evaluation.run_reader import final_rows

__all__ = ["VARIANTS", "part_learning", "part_medical", "write_halves"]

Settings = Mapping[str, Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "turns": {"credit": "turns"},
    "spider_dense": {"reward": "spider_dense"},
    "dynamic": {"sampling_budget": 3},
}
"""What further GRPO runs with the first agent and seed change."""
_KINDS = {"greedy": {"val_temperature": 0}, "sampled": {"val_temperature": 1}}
_TRAINING = {
    "trainer": "local",
    "steps": 400,
    "tasks_per_step": 48,
    "group_size": 8,
    "minibatches": 1,
    "credit": "broadcast",
    "lr_schedule": "constant",  # a run ends by its time, not at its last step
    "max_batch": 192,
    "runner_processes": 4,
    "tokens_per_forward": 16384,
    "val_tasks": 8,
    "val_every": 0,
    "keep_best": False,
    "checkpoint_every": 1000,  # a run that is terminated writes one
}
_EVALUATION = {"n_runners": 64, "runner_processes": 2}  # several run in the memory that the GRPO runs leave
_COLUMNS = ("task_id", "task", "status", "reward", "answer")


@dataclass(frozen=True)
class Experiment:
    """What a part trains on; settings are those of the commands."""

    part: str
    agents: Sequence[str]
    supervised: Settings
    agent: Settings
    """The agent, its prompts and replies: for GRPO and the evaluations."""
    training: Settings
    variants: Sequence[str] = ()
    data: Settings = field(default_factory=dict)
    """Figures of the data."""


def part_learning(suite: Suite) -> dict[str, Any]:
    """SFT on the questions about half of Spider's training databases, GRPO on those about the other half."""
    options = suite.options
    prompt = {"table_info_truncate": 6000, "example_values": 2, "show_keys": True, "execution_truncate": 200}
    prompt |= {"max_model_len": 3072, "max_tokens": 96}
    agents = options.agents.split(",")
    first, second, counts = write_halves(options.spider, suite.out / "halves")
    return _Run(
        suite,
        Experiment(
            part="learning",
            agents=agents,
            supervised={**prompt, "data_dir": str(first), "backend": ",".join(agents), "epochs": 30, "val_tasks": 100},
            agent={**prompt, "data_dir": str(second), "reward": "spider_exec_match", "n_runners": 384},
            training=_TRAINING,
            variants=[name for name in options.variants.split(",") if name],
            data=counts,
        ),
    ).result


def part_medical(suite: Suite) -> dict[str, Any]:
    """SFT on questions about other drugs and diseases than the bundled ones, GRPO on the bundled questions."""
    warm = suite.out / "medical-warm"
    suite.run("medical-generate", ["-m", "groundwire.domains.medical.generate", "--seed", "1", "--out", str(warm)])
    lengths = {"max_model_len": 3072, "max_tokens": 160}
    supervised = {"domain": "medical", "data_dir": str(warm), "backend": "openai-agents", **lengths}
    supervised |= {"prompt_profile": "full", "example_values": 3, "show_keys": True, "execution_truncate": 2048}
    supervised |= {"augment": 0, "epochs": 4, "questions_per_schema": 24, "warmup_steps": 10, "val_tasks": 200}
    return _Run(
        suite,
        Experiment(
            part="medical",
            agents=["openai-agents"],
            supervised=supervised,
            agent={"config": "medical", **lengths, "n_runners": 192},
            training={**_TRAINING, "tasks_per_step": 24},
        ),
    ).result


def write_halves(data_dir: str | None, out: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Two folders with all validation questions, each with those about half of the training databases; their sizes.

    Golds without rows are left out of training.
    """
    domain: Any = domains.get("spider")
    data = domain.load(data_dir)
    counts = Counter(str(task["db_id"]) for task in data.train)
    databases = sorted(counts)
    random.Random(0).shuffle(databases)
    halves: tuple[list[str], list[str]] = ([], [])
    for database in databases:
        min(halves, key=lambda half: sum(counts[each] for each in half)).append(database)
    source, folders, figures = domain.database_folders(data_dir)[0], [], {"validation": len(data.validation)}
    for name, half in zip(("a", "b"), halves, strict=True):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        train = [task for task in data.train if task["db_id"] in half]
        for file, tasks in (("train_spider.json", train), ("dev.json", data.validation)):
            rows = [{key: value for key, value in task.items() if key != "db_path"} for task in tasks]
            (folder / file).write_text(json.dumps(rows))
        (folder / "gold_zero_rows.json").write_text("{}")  # the golds were run
        for databases_of in ("database", "test_database"):
            if (source / databases_of).is_dir() and not (folder / databases_of).exists():
                (folder / databases_of).symlink_to((source / databases_of).resolve())
        folders.append(folder)
        figures |= {f"databases {name}": len(half), f"questions {name}": len(train)}
    return folders[0], folders[1], figures


class _Run:
    """Runs an experiment. ``result`` is in the suite's results from the beginning, and written after each program."""

    def __init__(self, suite: Suite, experiment: Experiment) -> None:
        self.suite, self.experiment, self.options = suite, experiment, suite.options
        self.result: dict[str, Any] = {"data": experiment.data, "programs": {}, "accuracy": {}, "training": {}}
        suite.results[experiment.part] = self.result
        self._rows: dict[str, dict[str, Rows]] = {}
        self._lock = threading.Lock()
        at_once = self.options.at_once
        with ThreadPoolExecutor(at_once) as self._evaluations, ThreadPoolExecutor(at_once) as runs:
            for agent in experiment.agents:
                self._start_evaluations("zero", agent, suite.model)
            if model := self._supervise():
                for agent in experiment.agents:
                    self._start_evaluations("sft", agent, model)
                for agent, stage, changed in self._stages():
                    runs.submit(self._recorded, self._train, stage, agent, model, changed)

    def _stages(self) -> list[tuple[str, str, Settings]]:
        """Agent, name and changed settings of each GRPO run."""
        agents, seeds = self.experiment.agents, self.options.seeds.split(",")
        found: list[tuple[str, str, Settings]] = [
            (agent, f"seed {seed}", {"seed": int(seed)}) for agent in agents for seed in seeds
        ]
        return found + [
            (agents[0], name, {**VARIANTS[name], "seed": int(seeds[0])}) for name in self.experiment.variants
        ]

    def _recorded(self, work: Any, *arguments: Any) -> None:
        """An error of one program's results does not end the others."""
        try:
            work(*arguments)
        except Exception as error:
            self._write("errors", " ".join(map(str, arguments[:2])), f"{type(error).__name__}: {error}")

    def _supervise(self) -> str | None:
        """The folder of the fine-tuned model."""
        out = self.suite.out / "sft" / self.experiment.part
        settings = {**self.experiment.supervised, "model": self.suite.model, "device": self.options.device}
        settings |= {"time_limit_s": self.options.sft_s * len(self.experiment.agents), "output_dir": str(out)}
        if self.options.questions:
            settings["val_tasks"] = self.options.questions
        name = f"{self.experiment.part}-sft"
        self._write("programs", name, self.suite.run(name, ["-m", "groundwire.train.sft", *_pairs(settings)]))
        folder = max(out.glob("2*/model"), default=None)
        if folder is not None and (folder.parent / "summary.json").exists():
            self._write("training", "sft", json.loads((folder.parent / "summary.json").read_text()))
        return None if folder is None else str(folder)

    def _train(self, stage: str, agent: str, model: str, changed: Settings) -> None:
        settings = {**self.experiment.agent, **self.experiment.training, "learning_rate": self.options.learning_rate}
        settings |= {"model": model, "backend": agent, "device": self.options.device, **changed}
        settings |= parse_overrides(self.options.overrides)
        name = self._name(stage, agent)
        program, folder = self.suite.train(name, _pairs(settings), limit_s=self.options.grpo_s)
        self._write("programs", name, {key: program[key] for key in program if key not in ("summary", "figures")})
        if folder is not None:
            self._write("training", f"{agent}, {stage}", training_figures(RunDir.open(folder)))
            self._start_evaluations(stage, agent, str(folder))

    def _start_evaluations(self, stage: str, agent: str, model: str) -> None:
        for kind in _KINDS:
            self._evaluations.submit(self._recorded, self._evaluate, stage, agent, kind, model)

    def _evaluate(self, stage: str, agent: str, kind: str, model: str) -> None:
        options, name = self.options, self._name(stage, agent, kind)
        samples = options.samples if kind == "sampled" else 1
        settings = {**self.experiment.agent, **_EVALUATION, **_KINDS[kind], "model": model, "backend": agent}
        settings["val_tasks"] = options.questions
        program, folder = self.suite.evaluate(name, ["-n", str(samples), *_pairs(settings)])
        self._write("programs", name, program)
        if folder is None:
            return
        rows = [{column: row[column] for column in _COLUMNS} for row in final_rows(RunDir.open(folder))]
        figures = json.loads((folder / "evaluation.json").read_text())
        figures |= {"rows": str(folder.relative_to(self.suite.out)), "errors": error_classes(rows)}
        with self._lock:
            of_stage = self._rows.setdefault(f"{agent}, {kind}", {})
            of_stage[stage] = rows
            compared = {each: differences(found) for each, found in self._rows.items()}
            self.result["differences"] = compared
        self._write("accuracy", f"{agent}, {kind}, {stage}", figures)

    def _name(self, *parts: str) -> str:
        return "-".join([self.experiment.part, *parts]).replace(" ", "")

    def _write(self, section: str, name: str, value: Any) -> None:
        with self._lock:
            self.result.setdefault(section, {})[name] = value
            self.suite.write()


def _pairs(settings: Settings) -> list[str]:
    """The settings as arguments of a command."""
    return [f"{name}={value}" for name, value in settings.items()]
