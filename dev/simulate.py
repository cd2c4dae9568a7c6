"""The time of a step, simulated without a GPU: ``python -m dev.simulate``.

Prints each measured step of dev/simulate.toml beside its prediction. A new measurement is one line there: a row of the
same setup (machine and software) is predicted; the first row of a new setup says which speed it calibrates. With
``--gpus`` it prints the parts of a step that nobody has measured, and how busy each part of the sampling is:

    python -m dev.simulate --gpus 64 --groups 12500 --params 1.39
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GROUP_SIZE = 8
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODES = ("sync", "colocate_async", "separate_async")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run whose step is simulated; ``params`` in 10^9, ``prompt`` and ``reply`` in tokens."""

    params: float
    groups: int
    gpus: int = 1
    prompt: int | None = None
    """None: prompts of Spider, of which groups share the beginning."""
    reply: int = 42
    recompute: bool = False
    """Whether the update recomputes activations."""
    old_log_probs: bool = False
    """Whether the trainer computes them, as always in the asynchronous modes."""
    mode: str = "sync"
    calls: tuple[int, ...] = (1,)
    """LLM calls of a rollout; groups take turns."""
    runners: int | None = None
    """Runners with an external store, a process on one processor each; None: the trainer's own, and its own store."""
    processors: int = 16
    """Of a GPU, for agents, unless they have runners."""
    at_once: int | None = None
    """Rollouts that run at the same time; None: all of a step."""
    agent_ms: float | None = None
    """CPU of an agent for each of its calls; None: that of the simplest agent."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step, those of its parts, and the busy share of each part of the sampling."""

    seconds: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]


class Station:
    """A queue with several servers: who comes first is served first."""

    def __init__(self, servers: int) -> None:
        self._free_at = [0.0] * servers
        self.busy_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a job that comes now is done; jobs must come in the order of time."""
        end = max(now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, end)
        self.busy_s += seconds
        return end

    def share(self, seconds: float) -> float:
        """How much of the time its servers were busy."""
        return self.busy_s / (len(self._free_at) * seconds)


class Sampling:
    """Rollouts on their way through runners, store, proxy and inference servers."""

    def __init__(self, run: Run, constants: Mapping[str, float], *, cpu: float, gpu: float) -> None:
        self._run, self._constants, self._cpu, self._gpu = run, constants, cpu, gpu
        servers = run.gpus if run.mode != "separate_async" else max(1, run.gpus // 2)
        cores = Station(run.processors * run.gpus)
        agents = cores if run.runners is None else Station(run.runners)
        self.stations = {"agents": agents, "proxy": cores, "store": Station(1)}
        self._front_ends = [Station(1) for _ in range(servers)]
        self._gpus = [Station(1) for _ in range(servers)]
        self.stations |= {"inference server": self._front_ends[0], "inference GPU": self._gpus[0]}
        self._events: list[tuple[float, int, int, Iterator[tuple[Station | None, float]]]] = []
        self._waiting: deque[tuple[float, int]] = deque()
        self._order, self._left = itertools.count(), dict[int, int]()
        self.now, self.submitted, self.ended, self.ended_groups, self._running = 0.0, 0, 0, 0, 0

    def submit(self, at: float) -> None:
        """The groups of one step, at a time that is not in the past."""
        for _ in range(self._run.groups):
            group = self.submitted // GROUP_SIZE
            self._left[group] = GROUP_SIZE
            self._waiting.extend([(at, group)] * GROUP_SIZE)
            self.submitted += GROUP_SIZE
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < (self._run.at_once or self.submitted):
            at, group = self._waiting.popleft()
            heapq.heappush(self._events, (max(at, self.now), next(self._order), group, self._rollout(group)))
            self._running += 1

    def until(self, groups: int) -> float:
        """When so many groups have ended since the start."""
        while self.ended_groups < groups:
            self.now, _, group, rollout = heapq.heappop(self._events)
            job = next(rollout, None)
            if job is None:
                self._end(group)
                continue
            station, seconds = job
            end = self.now + seconds if station is None else station.serve(self.now, seconds)
            heapq.heappush(self._events, (end, next(self._order), group, rollout))
        return self.now

    def _end(self, group: int) -> None:
        self.ended += 1
        self._running -= 1
        self._start()
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            self.ended_groups += 1

    def _rollout(self, group: int) -> Iterator[tuple[Station | None, float]]:
        run, of = self._run, self._constants
        store_s = 0.0 if run.runners is None else of["store_ms"] / 1e3 * self._cpu
        agent_s = (run.agent_ms or of["agent_ms"]) / 1e3 * self._cpu
        proxy_s = of["proxy_ms"] / 1e3 * self._cpu
        server = group % len(self._gpus)
        token_s = run.params * of["decode_us"] / 1e6 * self._gpu
        yield self.stations["store"], store_s / 2
        for _ in range(run.calls[group % len(run.calls)]):
            yield self.stations["agents"], agent_s / 2
            yield self.stations["proxy"], proxy_s / 2
            yield self._front_ends[server], self._cpu / of["calls_per_s"]
            yield self._gpus[server], run.reply * token_s
            yield None, run.reply * of["iteration_ms"] / 1e3 * self._cpu
            yield self.stations["proxy"], proxy_s / 2
            yield self.stations["agents"], agent_s / 2
        yield self.stations["store"], store_s / 2


class Simulator:
    """The calibration, and steps by it."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.constants = {name: float(constant["value"]) for name, constant in table["constants"].items()}
        self._one_gpu = [(0, 0), *table["tokens"]["one_gpu"]]
        self._fullest = {int(gpus): factor for gpus, factor in table["tokens"]["fullest"].items()}
        self.rows: list[dict[str, Any]] = table["row"]
        self.speeds = {row["setup"]: self._speeds(row) for row in self.rows if row["use"] in {"cpu", "gpu"}}

    def _speeds(self, row: Mapping[str, Any]) -> dict[str, float]:
        """The factor of one kind of seconds with which the row's prediction is its measurement, by bisection."""
        low, high = 0.2, 8.0
        for _ in range(16):
            middle = (low + high) / 2
            too_slow = self.step(run_of(row), **{row["use"]: middle}).seconds > row["measured"]
            low, high = (low, middle) if too_slow else (middle, high)
        return {row["use"]: (low + high) / 2}

    def predict(self, row: Mapping[str, Any]) -> float:
        """Seconds of the row's step, on the machine and with the software of its setup."""
        return self.step(run_of(row), **self.speeds.get(row["setup"], {})).seconds

    def step(self, run: Run, *, cpu: float = 1.0, gpu: float = 1.0) -> Step:
        """A step of the run; ``cpu`` and ``gpu`` multiply seconds of processors and of GPUs."""
        sampling = Sampling(run, self.constants, cpu=cpu, gpu=gpu)
        training = self._training(run, cpu=cpu, gpu=gpu)
        train_s, ahead = sum(training.values()), 0 if run.mode == "sync" else 1
        steps = 1 if run.mode == "sync" else 6
        for _ in range(1 + ahead):
            sampling.submit(0.0)
        ends, sampled, paused = [0.0], [0.0], 0.0
        for step in range(1, steps + 1):
            sampled.append(sampling.until(step * run.groups))
            if run.mode == "separate_async":  # the sampling goes on
                start = max(sampled[-1], ends[-1])
                ends.append(start + train_s)
            else:  # rollouts that have not ended wait while the GPU trains
                start, paused = sampled[-1], paused + train_s
                ends.append(sampled[-1] + paused)
            if step + ahead < steps:
                sampling.submit(start)
        last = 3 if steps > 3 else 0
        seconds = (ends[steps] - ends[last]) / (steps - last)
        sampling_s = (sampled[steps] - sampled[last]) / (steps - last)
        busy = {name: station.share(sampled[-1]) for name, station in sampling.stations.items()}
        return Step(seconds, {"sampling": sampling_s, **training}, busy)

    def _training(self, run: Run, *, cpu: float, gpu: float) -> dict[str, float]:
        """Seconds of the parts of a step that follow the sampling."""
        of, rollouts = self.constants, run.groups * GROUP_SIZE
        gpus = run.gpus if run.mode != "separate_async" else max(1, run.gpus // 2)
        update_s = self.tokens(run, gpus) * run.params * of["update_us"] / 1e6 * gpu * (4 / 3 if run.recompute else 1)
        old_s = update_s * of["forward_share"] * (run.old_log_probs or run.mode != "sync")
        return {
            "serial": (of["step_s"] + of["step_ms"] / 1e3 * rollouts) * cpu,
            "rows": of["rows_ms"] / 1e3 * rollouts / gpus * cpu,
            "update": update_s,
            "old log-probabilities": old_s,
            "exchange": of["exchange_s"] * run.params * (gpus - 1) / gpus,
            "weights": of["weights_s"],
        }

    def tokens(self, run: Run, gpus: int) -> float:
        """What the fullest of the GPUs computes in a pass over a step's rows."""
        if run.prompt is not None:
            return run.groups * (run.prompt + GROUP_SIZE * run.reply) / gpus
        points = self._one_gpu
        after = next((place for place, (groups, _) in enumerate(points) if groups >= run.groups), len(points) - 1)
        (few, fewer), (many, more) = points[after - 1 : after + 1]
        one_gpu = fewer + (run.groups - few) * (more - fewer) / (many - few)
        factor = max(factor for number, factor in self._fullest.items() if number <= gpus)
        return (one_gpu + run.groups * GROUP_SIZE * (run.reply - 42)) * factor / gpus


def run_of(row: Mapping[str, Any]) -> Run:
    """The run that a row of the table measured."""
    names = {field.name for field in dataclasses.fields(Run)}
    values: dict[str, Any] = {name: value for name, value in row.items() if name in names}
    return Run(**{**values, "calls": tuple(values.get("calls", (1,)))})


def _print_rows(simulator: Simulator) -> None:
    print("| setup | step | GPUs | measured, s | predicted, s | error | use |")
    print("|---|---|---|---|---|---|---|")
    for row in simulator.rows:
        predicted = simulator.predict(row)
        error = predicted / row["measured"] - 1
        use = row["use"] if row["use"] in {"held out", "constants"} else f"speed of the setup's {row['use'].upper()}"
        cells = [
            row["setup"],
            row["name"],
            row.get("gpus", 1),
            row["measured"],
            f"{predicted:.1f}",
            f"{error:+.0%}",
            use,
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> int:
    """Print the table, or one step."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="print one step on so many GPUs in place of the table")
    parser.add_argument("--groups", type=int, default=256, help=f"of {GROUP_SIZE} rollouts; default: %(default)s")
    parser.add_argument("--params", type=float, default=1.39, help="parameters in 10^9; default: %(default)s")
    parser.add_argument("--reply", type=int, default=42, help="tokens of a reply; default: %(default)s")
    parser.add_argument("--calls", type=int, nargs="+", default=[1], help="of a rollout; groups take turns")
    parser.add_argument("--agent-ms", type=float, help="CPU of an agent for each call; default: of the simplest one")
    parser.add_argument("--runners", type=int, help="runners with an external store; default: the trainer's own")
    parser.add_argument("--mode", default="sync", choices=MODES, help="default: %(default)s")
    options = parser.parse_args()
    numbers = {
        name: value for name, value in vars(options).items() if name not in {"calls", "mode"} and value is not None
    }
    for name, number in [*numbers.items(), *(("calls", calls) for calls in options.calls)]:
        if number <= 0:
            parser.error(f"--{name.replace('_', '-')} {number}: a number above 0")
    simulator = Simulator(TABLE)
    if options.gpus is None:
        _print_rows(simulator)
        return 0
    values = {name: value for name, value in vars(options).items() if name != "calls"}
    step = simulator.step(Run(**values, calls=tuple(options.calls), recompute=True))
    print(f"a step: {step.seconds:.1f} s; " + ", ".join(f"{name} {part:.1f}" for name, part in step.parts.items()))
    print("busy while sampling: " + ", ".join(f"{name} {share:.0%}" for name, share in step.busy.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
