"""What does a small model learn of another one's traces? The part ``traces`` of the GPU suite, on Spider.

The teacher is the model of the part ``learning``: SFT, then GRPO (or ``--teacher FOLDER``). It answers training
questions with the LangGraph agent, and its traces are exported. Then for each seed, all at once, on several GPUs if
there are: ``groundwire learn`` (SFT on the accepted traces, on-policy distillation from the served teacher), and GRPO
from its model; with several GPUs also GRPO from the fine-tuned model, without distillation. Each stage is evaluated on
the same questions of other databases, greedy and sampled; a difference is paired by question, over the mean of seeds.

What is there already in ``--out`` is not made again: the teacher, its traces, and the stages of ``groundwire learn``.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dev.gpu.learning import KINDS, LearningRun, pairs, spider_experiment, write_folder
from dev.gpu.learning_results import Scores, training_figures
from dev.gpu.suite import Suite
from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.evaluation.metrics import compare, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts
from groundwire.train.job.trained_model import newest_model

__all__ = ["part_traces", "pooled_differences"]

_AGENT = "langgraph"
_PORT = 18761
"""Of the first GPU's teacher; a resumed ``groundwire learn`` asks where it asked before."""
_LEARN: dict[str, Any] = {  # dense feedback: small steps
    "config": "fast",  # the agent of the evaluations
    "credit": "broadcast",
    "backend": _AGENT,
    "domain": "spider",
    "reward": "spider_exec_match",
    "teacher_weight": 1,
    "trainer": "local",
    "tasks_per_step": 32,
    "group_size": 4,
    "minibatches": 1,
    "lr_schedule": "constant",
    "warmup_steps": 2,
    "val_every": 0,
    "checkpoint_every": 1000,
    "n_runners": 128,
    "runner_processes": 4,
}
_SFT = {"sft.epochs": 4, "sft.tokens_per_step": 16384, "sft.val_tasks": 50}


def part_traces(suite: Suite) -> dict[str, Any]:
    """The teacher, its traces, and what each seed learns of them."""
    return _TracesRun(suite, spider_experiment(suite, "traces", [_AGENT])).run()


class _TracesRun(LearningRun):
    def run(self) -> dict[str, Any]:
        """Returns the results, with ``errors`` if there were some."""
        self.recorded(self._run)
        return self.result

    def _run(self) -> None:
        options, out = self.options, self.suite.out
        self.questions, self.gpus = options.questions or 400, _gpu_count(options.device)
        data: Any = domains.get("spider").load(options.spider)
        asked = random.Random(1).sample(list(data.train), min(options.traced, len(data.train)))
        self.learned = out / "parts" / "learned"
        write_folder(self.learned, options.spider, asked, data.validation)
        write_folder(out / "parts" / "asked", options.spider, data.train[:8], asked)
        self.result["data"] |= {"asked": len(asked), "held out": min(self.questions, len(data.validation))}
        teacher = self._teacher()
        with ThreadPoolExecutor() as pool:
            for kind in KINDS:
                pool.submit(self.recorded, self._measure, "teacher", 0, kind, teacher)
            traces = self._traces(teacher)
            with self._served(teacher):
                seeds = [pool.submit(self.recorded, self._learn, seed, traces) for seed in options.seeds]
                wait(seeds)

    def _teacher(self) -> str:
        """The folder of the teacher. Raises ``RuntimeError`` if its training failed."""
        place = self.suite.out / "teacher.txt"
        if self.options.teacher or place.exists():
            return str(self.options.teacher or place.read_text().strip())
        teacher = self.supervise("teacher-sft", self.options.sft_s)
        if teacher is None:
            raise RuntimeError("the teacher's SFT left no model: see its log")
        folder = self.train("teacher", _AGENT, teacher, {"seed": 0}, self.options.grpo_s)
        if folder is not None and list(folder.glob("checkpoints/step-*")):
            teacher = str(newest_model(RunDir.open(folder)))
        else:
            self.write("errors", "teacher", "GRPO left no checkpoint, so the teacher is the model after SFT")
        place.write_text(teacher + "\n")
        return teacher

    def _traces(self, teacher: str) -> Path:
        """The exported traces of the teacher. Raises ``RuntimeError`` if there are none."""
        file = self.suite.out / "traces.jsonl"
        if not file.exists():
            changed = {"data_dir": str(self.suite.out / "parts" / "asked"), "val_tasks": 0}
            changed |= {"n_runners": 384, "runner_processes": 8}
            if (folder := self.evaluate("answers 0", _AGENT, "greedy", teacher, changed)) is None:
                raise RuntimeError("the teacher answered nothing: see its log")
            part = file.with_suffix(".part")
            export = ["-m", "groundwire.train.export", str(folder), "--format", "otlp", "--output", str(part)]
            self.write("programs", "traces-export", self.suite.run("traces-export", export))
            part.rename(file)
        return file

    @contextmanager
    def _served(self, teacher: str) -> Iterator[None]:
        """The teacher on each GPU."""
        self.variables = {"OPENAI_API_KEY": secrets.token_urlsafe(24)}
        servers = []
        for number in {seed % self.gpus for seed in self.options.seeds}:
            serve = ["-m", "groundwire.train.serve", teacher, "--port", str(_PORT + number)]
            serve += ["--device", self.options.device, "--max-model-len", str(self.experiment.agent["max_model_len"])]
            variables = {**self._on_gpu(number), "GROUNDWIRE_TOKEN": self.variables["OPENAI_API_KEY"]}
            servers.append(self.suite.start(f"traces-serve-{number}", serve, variables=variables))
        try:
            yield
        finally:
            for server in servers:
                server.terminate()

    def _learn(self, seed: int, traces: Path) -> None:
        """Everything of a seed."""
        options, folder = self.options, self.suite.out / "learn" / f"seed{seed}"
        if started := sorted(folder.glob("*/learn.json")):
            command = ["--resume", str(started[-1].parent)]
        else:
            settings = {**self.experiment.agent, **_LEARN, "learning_rate": options.distill_rate, "seed": seed}
            settings |= {"model": self.suite.model, "device": options.device, "data_dir": str(self.learned)}
            settings |= {"steps": options.distill_steps, "val_tasks": self.questions, "output_dir": str(folder)}
            teacher = f"http://127.0.0.1:{_PORT + seed % self.gpus}/v1"
            settings |= {"teacher": teacher, "teacher_model": "teacher"}
            settings |= {**parse_overrides(options.overrides), **_SFT, "sft.time_limit_s": options.student_sft_s}
            command = [str(traces), *pairs(settings)]
        name = f"traces-learn-{seed}"
        command = ["-m", "groundwire.train.learn", *command]
        self.write("programs", name, self.suite.run(name, command, None, {**self._on_gpu(seed), **self.variables}))
        learned = max(folder.glob("*/learn.json"), default=None)
        if learned is None:
            raise RuntimeError(f"groundwire learn left nothing: see the log {name}")
        state = json.loads(learned.read_text())
        self.write("learn", str(seed), {key: state.get(key) for key in ("data", "line", "prompts", "comparisons")})
        with ThreadPoolExecutor() as pool:
            models = self._models(seed, learned.parent, state)
            for stage, model in models.items():
                pool.submit(self.recorded, self._measure, stage, seed, "sampled", model)
            starts = {"grpo": models.get("distilled"), **({"sft, grpo": models.get("sft")} if self.gpus > 1 else {})}
            for stage, start in starts.items():
                if start is not None:
                    pool.submit(self.recorded, self._reinforce, stage, seed, start)

    def _models(self, seed: int, folder: Path, state: Mapping[str, Any]) -> dict[str, str]:
        """The models that ``groundwire learn`` has made. Notes the scores of its evaluations."""
        for stage, name in {"zero": "before", "sft": "sft", "distilled": "grpo"}.items():
            if name in state:
                rollouts = final_rollouts(RunDir.open(folder / state[name]["run"]))
                self._note(f"{_AGENT}, greedy", stage, seed, scores_by_question(rollouts))
        models = {"sft": str(folder / state["fine_tuned"])} if "fine_tuned" in state else {}
        if run := max((path for path in folder.glob("runs/2*") if list(path.glob("checkpoints/step-*"))), default=None):
            self.write("training", f"distilled, seed {seed}", _distillation_figures(RunDir.open(run)))
            models["distilled"] = str(newest_model(RunDir.open(run)))
            if "grpo" not in state:  # it was ended by its time
                self._measure("distilled", seed, "greedy", models["distilled"])
        return models

    def _reinforce(self, stage: str, seed: int, model: str) -> None:
        changed = {"seed": seed, "data_dir": str(self.learned)}
        name, variables = f"{stage} {seed}", self._on_gpu(seed + (stage != "grpo"))
        if folder := self.train(name, _AGENT, model, changed, self.options.student_grpo_s, variables):
            for kind in KINDS:
                self._measure(stage, seed, kind, str(folder))

    def _measure(self, stage: str, seed: int, kind: str, model: str) -> None:
        changed = {"data_dir": str(self.learned), "val_tasks": self.questions}
        self.evaluate(f"{stage} {seed}", _AGENT, kind, model, changed, self._on_gpu(seed))
        way = f"{_AGENT}, {kind}"
        if scores := self.scores.get(way, {}).get(f"{stage} {seed}"):
            self._note(way, stage, seed, scores)

    def _note(self, way: str, stage: str, seed: int, scores: Scores) -> None:
        with self._lock:
            self.scores.setdefault(way, {})[f"{stage} {seed}"] = scores
        self.write("stages", "differences", {each: pooled_differences(found) for each, found in self.scores.items()})
        print(f"[traces] {way}, {stage} {seed}: {_accuracy(scores):.3f}", flush=True)

    def compare(self) -> dict[str, Any]:
        """The stages are compared as soon as each is noted."""
        return {}

    def _on_gpu(self, number: int) -> dict[str, str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.gpus)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": visible[number % self.gpus]} if self.gpus > 1 else {}


def pooled_differences(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """``accuracy`` by stage and seed, and the paired differences of stages over the mean of the seeds that have both.

    ``scores`` are by stage and seed, such as ``sft 0``.
    """
    stages = defaultdict[str, dict[str, Scores]](dict)
    for name, of_seed in scores.items():
        stage, seed = name.rsplit(" ", 1)
        stages[stage][seed] = of_seed
    figures: dict[str, Any] = {
        "accuracy": {
            stage: {seed: round(_accuracy(of_seed), 4) for seed, of_seed in sorted(seeds.items())}
            for stage, seeds in stages.items()
        }
    }
    compared = [("zero", "sft"), ("sft", "distilled"), ("sft", "grpo"), ("distilled", "grpo")]
    for first, second in [*compared, ("sft", "sft, grpo"), ("sft, grpo", "grpo")]:
        if seeds := sorted(stages[first].keys() & stages[second].keys()):
            before, after = (_pooled([stages[stage][seed] for seed in seeds]) for stage in (first, second))
            change = compare(before, after)
            kept = ("questions", "accuracy", "difference", "difference_ci95")
            figures[f"{first} -> {second}"] = {"seeds": seeds, **{name: change[name] for name in kept}}
    return figures


def _pooled(seeds: list[Scores]) -> Scores:
    return {task: [score for of_seed in seeds for score in of_seed.get(task, ())] for task in seeds[0]}


def _accuracy(scores: Scores) -> float:
    means = [sum(samples) / len(samples) for samples in scores.values() if samples]
    return sum(means) / max(1, len(means))


def _distillation_figures(run: RunDir) -> dict[str, Any]:
    steps = [line for line in run.metrics() if line["step"] > 0]
    return {**training_figures(run), "teacher_kl": [line.get("teacher_kl") for line in steps]}


def _gpu_count(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device.startswith("cuda") else 1
