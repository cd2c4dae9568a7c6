"""Which rollouts are worth their tokens? Trains a model in three ways, for as many sampled tokens or seconds.

  python -m dev.sampling_arms --out OUT
  python -m dev.sampling_arms --out OUT --model sft/NAME/model --data-dir ~/spider --device cuda --seconds 600 \
      KEY=VALUE ...

The arms are GRPO, ``sampling_budget`` (another task in place of one whose rewards are equal), and supervised
fine-tuning that goes on for the seconds of GRPO. The validation databases are halved: a run of seed 0 with each value
of a setting is judged on the first half, sampled, and the best value is taken; the table is of the second half.
``KEY=VALUE`` are settings of all runs. A result that is in ``OUT`` is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from dev.gpu.suite import Suite
from groundwire import domains
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import AgentSettings
from groundwire.train.evaluation.metrics import compare, format_accuracy, format_change, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts

_TRAINING: Mapping[str, Any] = {
    "trainer": "local",
    "credit": "broadcast",
    "lr_schedule": "constant",  # a run ends by its tokens, not at its last step
    "steps": 400,
    "val_tasks": 8,
    "val_every": 0,
    "checkpoint_every": 1000,  # a run that is terminated writes one
}
_CANDIDATES = ((3, 0.6), (3, 1.0))
"""Values of ``sampling_budget`` that are compared on the first half, each with its share of the tasks of a step of
GRPO: fewer, so that a step samples about as many tokens."""
_OF_PROMPTS = {"agent_options", "max_model_len"}
_OF_EVALUATION = {*AgentSettings.model_fields, "max_tokens", "max_model_len", "n_runners", "runner_processes"}
_KINDS = {"greedy": 0, "sampled": 1}

Scores = Mapping[str, Sequence[float]]


def main() -> None:
    """Train and evaluate what is not in the folder yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for everything that is written")
    parser.add_argument("--model", default="starter", help="where all arms begin; default: %(default)s")
    parser.add_argument("--data-dir", help="folder of real Spider; default: the bundled data")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=30_000, help="sampled tokens of a run; default: %(default)s")
    parser.add_argument("--tasks", type=int, default=10, help="of a step of GRPO; default: %(default)s")
    parser.add_argument("--questions", type=int, default=0, help="of an evaluation, to try it; default: all")
    parser.add_argument("--seconds", type=float, help="seconds of sampling and updates of a run, not --tokens")
    parser.add_argument("--at-once", type=int, default=1, help="programs that run at once; default: %(default)s")
    seeds = "seeds of the table; default: %(default)s"
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default="1,2,3", help=seeds)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    suite = Suite(parser.parse_intermixed_args())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the program that runs ends, too
    try:
        _Arms(suite).write_table()
    finally:
        suite.stop()


class _Arms:
    """Runs the programs of all arms."""

    def __init__(self, suite: Suite) -> None:
        self.suite, self.options = suite, suite.options
        self.given = dict(pair.split("=", 1) for pair in self.options.settings)
        self.halves = _write_halves(self.options.data_dir, suite.out / "halves")

    def write_table(self) -> None:
        """Of each arm: what a group with a gradient costs, and the accuracy on the second half."""
        seeds, tasks = self.options.seeds, self.options.tasks
        candidates: list[dict[str, Any]] = [
            {"sampling_budget": value, "tasks_per_step": round(share * tasks)} for value, share in _CANDIDATES
        ]
        trained = self._at_once(self._train, [(seed, {}) for seed in seeds], [(0, each) for each in candidates])
        runs = {"GRPO": trained[: len(seeds)]}
        seconds = self.options.seconds or mean(spent(run)["seconds"] for run in runs["GRPO"])
        rates: list[dict[str, Any]] = [{}, self._given({"learning_rate"})]  # its own, and that of GRPO
        supervised = self._at_once(self._supervise, [(0, seconds, rate) for rate in rates]) if rates[1] else []
        of_first_half = [*map(self._model_of, trained[len(seeds) :]), *supervised]
        self._at_once(self._evaluate, [(*model, 0, "sampled") for model in of_first_half])
        best = self._best(candidates, of_first_half)
        rate = self._best(rates, supervised) if supervised else {}
        arm = f"sampling_budget {best['sampling_budget']}, {best['tasks_per_step']} tasks"
        runs[arm] = self._at_once(self._train, [(seed, best) for seed in seeds])
        models = {arm: list(map(self._model_of, of_arm)) for arm, of_arm in runs.items()}
        models["SFT continued"] = self._at_once(self._supervise, [(seed, seconds, rate) for seed in seeds])
        models = {"before": [("before", self.suite.model)], **models}
        self._at_once(self._evaluate, [(*model, 1, kind) for model in _all(models) for kind in _KINDS])
        scores = {
            arm: {kind: [self._evaluate(*model, 1, kind) for model in of_arm] for kind in _KINDS}
            for arm, of_arm in models.items()
        }
        print("| | tokens, steps, seconds | groups that teach | tokens for one | greedy | points | sampled | points |")
        print("|---|---|---|---|---|---|---|---|")
        for arm, of_kinds in scores.items():
            cells = [arm, *[""] * 3]
            if figures := [spent(run) for run in runs.get(arm, ())]:
                means = {name: mean(figure[name] for figure in figures) for name in figures[0]}
                size = ", ".join(f"{means[name]:,.0f}" for name in ("tokens", "steps", "seconds"))
                used = f"{means['used']:.0f} of {means['groups']:.0f}"
                cells = [arm, size, used, f"{means['tokens'] / max(1, means['used']):.0f}"]
            for kind, of_kind in of_kinds.items():
                accuracy = [mean(map(mean, of_run.values())) for of_run in of_kind]
                change = "" if arm == "GRPO" else _change(scores["GRPO"][kind], of_kind)
                cells += [", ".join(map(format_accuracy, accuracy)), change]
            print(f"| {' | '.join(cells)} |", flush=True)

    def _at_once(self, work: Callable[..., Any], *calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What ``work`` returns for each of ``calls``. Called again with the same, it returns what is there."""
        with ThreadPoolExecutor(self.options.at_once) as pool:
            return list(pool.map(lambda arguments: work(*arguments), chain(*calls)))

    def _best(self, candidates: Sequence[dict[str, Any]], models: list[tuple[str, str]]) -> dict[str, Any]:
        """The changed settings with the best model on the first half; takes their models from ``models``."""
        accuracy = []
        for changed in candidates:
            accuracy.append(mean(map(mean, self._evaluate(*models.pop(0), 0, "sampled").values())))
            print(f"{changed} on the first half: {accuracy[-1]:.3f}", flush=True)
        return candidates[accuracy.index(max(accuracy))]

    @staticmethod
    def _model_of(run: RunDir) -> tuple[str, str]:
        return run.path.parent.name, str(run.path)

    def _train(self, seed: int, changed: Mapping[str, Any]) -> RunDir:
        """A run that ends at the step after which what it has spent is nearest to its tokens or seconds."""
        name = "-".join(["grpo", *(f"{setting}-{value}" for setting, value in changed.items()), f"seed-{seed}"])
        folder = self.suite.out / "runs" / name
        settings = {**_TRAINING, **self._common(0), "tasks_per_step": self.options.tasks, **self.given, **changed}
        settings |= {"seed": seed, "output_dir": folder}
        if not any(folder.glob("2*/checkpoints/step-*")):
            process = self.suite.start(name, ["-m", "groundwire.train.run", *_pairs(settings)])
            while process.poll() is None:
                time.sleep(0.2)
                metrics = max(folder.glob("2*/metrics.jsonl"), default=None)
                if metrics is not None and self._has_spent(RunDir.open(metrics.parent)):
                    process.terminate()
                    process.wait(300)
        checkpoint = max(folder.glob("2*/checkpoints/step-*"), default=None)
        if checkpoint is None:
            raise SystemExit(f"{name} has no checkpoint: see {self.suite.log(name)}")
        return RunDir.open(checkpoint.parents[1])

    def _has_spent(self, run: RunDir) -> bool:
        figures, options = spent(run), self.options
        limit, value = (options.seconds, figures["seconds"]) if options.seconds else (options.tokens, figures["tokens"])
        return bool(figures["steps"]) and value * (1 + 0.5 / figures["steps"]) >= limit

    def _supervise(self, seed: int, seconds: float, changed: Mapping[str, Any]) -> tuple[str, str]:
        """The name and the model of a run of supervised fine-tuning."""
        name = "-".join(["sft", *(f"{setting}-{value}" for setting, value in changed.items()), f"seed-{seed}"])
        folder = self.suite.out / "runs" / name
        if not any(folder.glob("2*/model")):
            settings = {**self._common(0), **self._given(_OF_PROMPTS), "seed": seed, "output_dir": folder}
            settings |= {"epochs": 1000, "time_limit_s": seconds, "val_tasks": 20, **changed}
            self.suite.run(name, ["-m", "groundwire.train.sft", *_pairs(settings)], limit_s=seconds + 900)
        return name, str(max(folder.glob("2*/model")))

    def _evaluate(self, name: str, model: str, half: int, kind: str) -> Scores:
        """The scores of the questions of a half, by their ids."""
        name = f"{name}-half-{half}-{kind}"
        folder = self.suite.out / "evaluations" / name
        if not any(folder.glob("2*/evaluation.json")):
            settings = {**self._common(half), **self._given(_OF_EVALUATION), "model": model, "output_dir": folder}
            settings |= {"val_tasks": self.options.questions, "val_temperature": _KINDS[kind]}
            self.suite.run(name, ["-m", "groundwire.train.evaluate", *_pairs(settings)], limit_s=3600)
        return scores_by_question(final_rollouts(RunDir.open(max(folder.glob("2*/evaluation.json")).parent)))

    def _common(self, half: int) -> dict[str, Any]:
        return {"model": self.suite.model, "data_dir": self.halves[half], "device": self.options.device}

    def _given(self, names: set[str]) -> dict[str, str]:
        """The settings of the command line of these names."""
        return {name: value for name, value in self.given.items() if name.partition(".")[0] in names}


def spent(run: RunDir) -> dict[str, float]:
    """The steps of a run, the tokens that it sampled, its groups, those with a gradient, and the seconds without
    validations."""
    lines = [line for line in run.metrics() if line["step"] > 0]
    names = {"tokens": "tokens_generated", "groups": "groups", "used": "groups_used"}
    figures = {name: sum(line.get(key, 0) for line in lines) for name, key in names.items()}
    return {**figures, "steps": len(lines), "seconds": sum(sum(line["seconds"].values()) for line in lines)}


def _write_halves(data_dir: str | None, out: Path) -> list[Path]:
    """Two folders with all training questions, and those of half of the validation databases each."""
    domain: Any = domains.get("spider")
    data, source = domain.load(data_dir), domain.folder(data_dir)[0]
    databases = sorted({str(task["db_id"]) for task in data.validation})
    random.Random(0).shuffle(databases)
    folders = []
    for half in range(2):
        folders.append(folder := out / str(half))
        folder.mkdir(parents=True, exist_ok=True)
        dev = [task for task in data.validation if task["db_id"] in databases[half::2]]
        for file, tasks in (("train_spider.json", data.train), ("dev.json", dev)):
            rows = [{key: value for key, value in task.items() if key != "db_path"} for task in tasks]
            (folder / file).write_text(json.dumps(rows))
        (folder / "report.json").write_text('{"left_out_of_training": {}}')  # the golds were run
        for name in ("database", "test_database"):
            if (source / name).is_dir() and not (folder / name).exists():
                (folder / name).symlink_to((source / name).resolve())
    return folders


def _all(lists: Mapping[str, Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists.values()))


def _change(before: Sequence[Scores], after: Sequence[Scores]) -> str:
    """The paired difference in points of the means over seeds."""
    return format_change(compare(_together(before), _together(after)))


def _together(scores: Sequence[Scores]) -> Scores:
    together = defaultdict[str, list[float]](list)
    for of_run in scores:
        for task, values in of_run.items():
            together[task] += values
    return together


def _pairs(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


if __name__ == "__main__":
    main()
