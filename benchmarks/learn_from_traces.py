"""What ``groundwire learn`` gains on a laptop: agents, seeds and settings, at once on a machine with many cores.

Of each agent there are 300 traces (``python -m benchmarks.traced_agents AGENT --output FOLDER/AGENT.jsonl``), and
200 held-out tasks about the same databases. A run has two cores of its own. The settings are compared on one half of
the held-out tasks, and the best one is judged on the other::

    python -m benchmarks.learn_from_traces FOLDER --out OUT

OUT/results.json and the printed tables are made anew when a run has ended. Runs that have ended are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from groundwire import domains
from groundwire.tools.startup import child_python_path
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.metrics import compare, format_change, scores_by_question
from groundwire.train.evaluation.run_reader import final_rollouts
from groundwire.train.traces.export import to_chats
from groundwire.train.traces.read import read_traces

_ROOT = Path(__file__).resolve().parents[1]
AGENTS = {
    "langgraph": ["--backend", "langgraph"],
    "openai-agents": ["--agent", "examples/frameworks/openai_agents/agent.py:triage_agent"],
    "create-agent": ["--agent", "examples/frameworks/langchain/agent.py:agent"],
}
_SMALLER = ["steps=32", "tasks_per_step=16", "learning_rate=2e-4", "lr_schedule=linear"]
SETTINGS: dict[str, list[str]] = {
    "tuned": [],
    "smaller": _SMALLER,
    "unseen": _SMALLER,
    "cool": [*_SMALLER, "temperature=0.6"],
    "all": _SMALLER,
}
"""``tuned`` are the defaults. ``smaller`` has as many rollouts in more steps, with a larger rate that falls. The others
change one thing more: ``unseen`` has half of the traces for the fine-tuning, which so has not seen the answers to the
other tasks; ``cool`` samples at 0.6, near the greedy replies; ``all`` has the tasks of wrong traces, too."""
_TRACED, _HELD_OUT = 300, 200
_CORES = 2
_PAIRS = {"fine-tuning": ("before", "sft"), "GRPO": ("sft", "grpo"), "both": ("before", "grpo")}

Scores = Mapping[str, Sequence[float]]


def write_data(traces: Path, folder: Path, count: int) -> None:
    """``accepted.jsonl`` and ``all.jsonl``, with held-out tasks, and ``half.jsonl``, every second trace."""
    known = list(domains.get("spider").load().train)
    traced = random.Random(0).sample(known, _TRACED)  # as benchmarks.traced_agents
    names = {task["id"] for task in traced}
    held_out = random.Random(1).sample([task for task in known if task["id"] not in names], count)
    folder.mkdir(parents=True, exist_ok=True)
    accepted, half = set(), {task["question"] for task in traced[::2]}
    with open(folder / "half.jsonl", "w", encoding="utf-8") as file:
        for rollout in read_traces(traces):
            question = rollout.task["question"]
            if rollout.outcome.reward_components.get("correct", 0.0) > 0.5:
                accepted.add(question)
            if question in half:
                file.writelines(json.dumps(chat) + "\n" for chat in to_chats(rollout))
    _write_tasks(folder / "accepted.jsonl", [task for task in traced if task["question"] in accepted], held_out)
    _write_tasks(folder / "all.jsonl", traced, held_out)


def _write_tasks(file: Path, train: Sequence[Any], held_out: Sequence[Any]) -> None:
    rows = []
    for split, tasks in (("train", train), ("validation", held_out)):
        for task in tasks:
            row = {name: task[name] for name in ("id", "question", "db_path")}
            rows.append(json.dumps({**row, "expected": [task["query"]], "split": split}) + "\n")
    file.write_text("".join(rows), encoding="utf-8")


def run_learn(
    traces: Path,
    out: Path,
    agent: str,
    setting: str,
    seed: int,
    cores: Collection[int],
    given: Sequence[str],
    limit_s: float,
) -> str:
    """Run ``groundwire learn`` on these cores; continues one that was stopped. Returns how it ended, in words."""
    folder, data = out / f"{agent}-{setting}-{seed}", out / "data" / agent
    started = max(folder.glob("2*/learn.json"), default=None)
    if started is not None and "verdict" in json.loads(started.read_text()):
        return "was there"
    command = [sys.executable, "-m", "groundwire.train.learn"]
    if started is not None and "data" in json.loads(started.read_text()):
        command += ["--resume", str(started.parent)]
    else:
        command += [str(data / "half.jsonl" if setting == "unseen" else traces), "--model", "starter", *AGENTS[agent]]
        command += ["--domain", str(data / ("all.jsonl" if setting == "all" else "accepted.jsonl"))]
        command += ["--reward", "benchmarks/traced_agents.py:reward", "--output-dir", str(folder), f"seed={seed}"]
        command += dict((pair.split("=")[0], pair) for pair in [*SETTINGS[setting], *given]).values()
    variables = {"OMP_NUM_THREADS": str(len(cores)), "PYTHONPATH": child_python_path(_ROOT), "PYTHONUNBUFFERED": "1"}
    started_s = time.monotonic()
    with open(out / f"{folder.name}.log", "a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT, env={**os.environ, **variables},
            start_new_session=True,
        )  # fmt: skip
        os.sched_setaffinity(process.pid, cores)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            code = f"its limit of {limit_s:g} s"
    return f"ended with {code} after {time.monotonic() - started_s:.0f} s"


def scores_of(folder: Path) -> dict[str, dict[str, Scores]]:
    """By way of sampling and stage: those of the evaluations, and of the sampled validations of the run of GRPO."""
    scores = defaultdict[str, dict[str, Scores]](dict)
    for stage in ("before", "sft", "grpo"):
        for done in sorted(folder.glob(f"2*/evaluations/{stage}/*/evaluation.json"))[:1]:
            scores["greedy"][stage] = scores_by_question(final_rollouts(RunDir.open(done.parent)))
    for config in sorted(folder.glob("2*/runs/*/config.json"))[:1]:
        run = RunDir.open(config.parent)
        rollouts = [
            rollout for rollout in run.rollouts()[0] if rollout.mode == "val" and rollout.sampling["temperature"]
        ]
        last = run.config()["steps"]
        for stage, step in (("sft", 0), ("grpo", last)):
            if of_step := [rollout for rollout in rollouts if rollout.step == step]:
                scores["sampled"][stage] = scores_by_question(of_step)
    return scores


def tables(out: Path, names: Sequence[tuple[str, str, int]]) -> dict[str, Any]:
    """The results of all runs that have ended, over the seeds that have a stage: a question's score is their mean."""
    rows: dict[str, Any] = {}
    by_group = defaultdict[tuple[str, str, str], dict[int, dict[str, Scores]]](dict)
    for agent, setting, seed in names:
        for way, stages in scores_of(out / f"{agent}-{setting}-{seed}").items():
            by_group[agent, setting, way][seed] = stages
    for (agent, setting, way), seeds in by_group.items():
        row: dict[str, Any] = {
            stage: {seed: _mean(stages[stage]) for seed, stages in seeds.items() if stage in stages}
            for stage in ("before", "sft", "grpo")
        }
        for half in ("all", "first half", "second half"):
            for what, (first, second) in _PAIRS.items():
                both = [stages for stages in seeds.values() if first in stages and second in stages]
                if both:
                    change = compare(*(_pooled([stages[stage] for stages in both], half) for stage in (first, second)))
                    kept = ("difference", "difference_ci95", "questions", "accuracy")
                    row[f"{what}, {half}"] = {"seeds": len(both), **{name: change[name] for name in kept}}
        rows[f"{agent}, {setting}, {way}"] = row
    return rows


def _pooled(seeds: Sequence[Scores], half: str) -> Scores:
    tasks = sorted(seeds[0])
    random.Random(2).shuffle(tasks)
    chosen = {"all": tasks, "first half": tasks[::2], "second half": tasks[1::2]}[half]
    return {task: [score for scores in seeds for score in scores.get(task, ())] for task in chosen}


def _mean(scores: Scores) -> float:
    return round(sum(sum(samples) / len(samples) for samples in scores.values()) / max(1, len(scores)), 4)


def show(rows: Mapping[str, Any]) -> None:
    """Print the tables, and of each agent the setting that gains most by GRPO on the first half, on the second."""
    for name, row in rows.items():
        stages = "  ".join(
            f"{stage} {' '.join(f'{value:.3f}' for value in row[stage].values())}"
            for stage in ("before", "sft", "grpo")
        )
        changes = "  ".join(f"{what} {format_change(row[f'{what}, all'])}" for what in _PAIRS if f"{what}, all" in row)
        print(f"{name}: {stages}  {changes}", flush=True)
    for agent, way in itertools.product(AGENTS, ("greedy", "sampled")):
        of_agent = {name: row for name, row in rows.items() if name.startswith(f"{agent}, ") and name.endswith(way)}
        ended = {name: row for name, row in of_agent.items() if "GRPO, first half" in row}
        if len(ended) > 1:
            best = max(ended, key=lambda name: ended[name]["grpo"] and ended[name]["GRPO, first half"]["accuracy"][1])
            print(
                f"best on the first half: {best}; GRPO on the second: {format_change(ended[best]['GRPO, second half'])}"
            )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="the folder with AGENT.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--settings", default="tuned,smaller,unseen,cool", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cores", type=int, default=0, help="how many of this machine's; default: all")
    parser.add_argument("--held-out", type=int, default=_HELD_OUT)
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds of a run")
    parser.add_argument("given", nargs="*", metavar="KEY=VALUE", help="further settings of all runs")
    arguments = parser.parse_intermixed_args()
    agents, settings = arguments.agents.split(","), arguments.settings.split(",")
    names = list(itertools.product(agents, settings, map(int, arguments.seeds.split(","))))
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for agent in agents:
        write_data(arguments.traces / f"{agent}.jsonl", out / "data" / agent, arguments.held_out)
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores or None]
    free = queue.SimpleQueue[list[int]]()
    places = [cores[place : place + _CORES] for place in range(0, len(cores) - len(cores) % _CORES or 1, _CORES)]
    for place in places:
        free.put(place)

    def job(agent: str, setting: str, seed: int) -> str:
        place, traces = free.get(), (arguments.traces / f"{agent}.jsonl").resolve()
        try:
            ended = run_learn(traces, out, agent, setting, seed, place, arguments.given, arguments.limit)
        finally:
            free.put(place)
        return f"{agent}, {setting}, seed {seed}: {ended}"

    with ThreadPoolExecutor(len(places)) as pool:
        for done in as_completed([pool.submit(job, *name) for name in sorted(names, key=lambda name: name[2])]):
            print(f"\n== {done.result()}", flush=True)
            rows = tables(out, names)
            (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
            show(rows)


if __name__ == "__main__":
    main()
