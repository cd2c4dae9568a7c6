"""What has to be seen on a real GPU, in one script: ``python -m benchmarks.gpu --out OUT``.

Each part is a program of its own with a time limit; its output goes to ``OUT/logs`` and its figures, as soon as it has
ended, to ``OUT/results.json`` and ``OUT/results.md``. Parts can be chosen, and run again, one by one:

    model   a model with random weights (then --model OUT/model is used by the others)
    agree   vLLM and the embedded server: the same ids, the same logprobs
    ci      --ci-fast (or --ci) with three backends; the checkpoint loads in transformers; resume goes on
    spider  a run on real Spider with validation on dev (--spider FOLDER)
    speed   the external store's path against verl's own agent loop, same model, prompts and tokens
    uneven  colocate_async against sync, on rollouts of uneven length
    lora    adapters: they train, resume, and are exported as a model that transformers loads
    stop    SIGTERM in the middle: what is kept, what is left running, and whether --resume goes on
    local   the embedded trainer on the GPU

For two GPUs against one, run ``--parts speed --only-ours --speed-size 3b --batch 128`` on one and on both, and compare
``step_s``: a small model's step waits for the replies' tokens, one after the other, on any number of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.spider import learnable
from benchmarks.gpu.suite import (
    MARK,
    ROOT,
    Suite,
    environment,
    figures,
    last_line,
    marked_processes,
    read_json,
    steps_of,
)

SIZES: dict[str, dict[str, int]] = {
    "30m": {"width": 512, "layers": 9, "heads": 8, "intermediate": 1408},
    "100m": {"width": 768, "layers": 14, "heads": 12, "intermediate": 2048},
    "300m": {"width": 1024, "layers": 24, "heads": 16, "intermediate": 2816},
    "1b": {"width": 2048, "layers": 20, "heads": 16, "intermediate": 5632},
    "3b": {"width": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "intermediate": 8192},
}
"""Shapes of models with random weights, by their number of parameters."""
_VERL = ("--trainer", "verl", "--config", "starter")
_BESIDE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=20000000000"
"""Where a GPU is shared: vLLM's start fails if another program gives memory back while it measures what is free."""
_TEMPERATURES = {"0": "1", "1": "2"}
"""At which models are measured, and how often each question is asked there."""


def part_model(suite: Suite) -> dict[str, Any]:
    """Make a model with random weights."""
    return {"size": suite.options.size, "model": _random_model(suite, suite.options.size, suite.out / "model")}


def part_agree(suite: Suite) -> dict[str, Any]:
    """Compare the two servers."""
    out = suite.out / "agree.json"
    result = suite.run("agree", [sys.executable, "-m", "benchmarks.gpu.agreement", suite.model, str(out)], 400)
    return {**result, **(json.loads(out.read_text()) if out.exists() else {})}


def part_ci(suite: Suite) -> dict[str, Any]:
    """Each backend's one step, or twenty; then what the first run left behind."""
    results: dict[str, Any] = {}
    folder = None
    for backend in suite.options.backends.split(","):
        arguments = [*_VERL, "--model", suite.model, "--backend", backend]
        fast = ["--ci-fast", "trainer.save_freq=1", "actor_rollout_ref.rollout.enforce_eager=True"]
        arguments += ["--ci"] if suite.options.full_ci else fast
        arguments += suite.options.overrides
        results[backend], run = suite.train(f"ci-{backend}", arguments, suite.options.limit)
        folder = folder or run
    if folder is not None and (folder / "model").exists():
        results["loads"] = _loads(suite, "ci-loads", folder)
        results["resume"] = suite.resume("ci-resume", folder)
    return results


def part_spider(suite: Suite) -> dict[str, Any]:
    """The curve on dev; with real Spider, trained on questions that the model answers now and then."""
    options = suite.options
    data, tokens, found = learnable(suite) if options.spider else ([], "64", {})
    arguments = [*_VERL, "--model", suite.model, *data, f"data.max_response_length={tokens}"]
    arguments += ["--steps", str(options.steps), "--val-tasks", str(options.val_tasks), _BESIDE, *options.overrides]
    with ThreadPoolExecutor() as threads:  # the GPU has room, and verl takes two minutes to start
        measured = partial(_measured, suite, threads, ["--max-tokens", tokens, *data])
        before = measured("before", suite.model)
        result, folder = suite.train(options.name, arguments, options.limit)
        result |= {"asked": found}
        if folder is None or not (folder / "metrics.jsonl").exists():
            return result
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        measured = [(line["step"], line.get("validation") or line.get("validation_sampled")) for line in lines]
        result["curve"] = [(step, each["accuracy"]) for step, each in measured if each]
        result["rewards"] = [line["reward"] for line in lines if line.get("reward") is not None]
        result["run"] = str(folder)
        after = measured("after", str(folder / "model")) if (folder / "model").exists() else {}
    for temperature in after:
        pair = [str(each[temperature].result()) for each in (before, after)]
        name = f"{options.name}-compare-{temperature}"
        suite.run(name, [sys.executable, "-m", "train.evaluate", "--compare", *pair, "--format", "json"], 120)
        result[f"before and after, temperature {temperature}"] = read_json(suite.out / "logs" / f"{name}.log")
    return result


def _measured(
    suite: Suite, threads: ThreadPoolExecutor, asked: Sequence[str], when: str, model: str
) -> dict[str, Future[Path | None]]:
    """Evaluations of a model, by temperature, as they run beside everything else."""
    runs = {}
    for temperature, samples in _TEMPERATURES.items():
        arguments = [*asked, "--model", model, "--temperature", temperature, "-n", samples]
        runs[temperature] = threads.submit(suite.evaluate, f"{suite.options.name}-{when}-{temperature}", arguments)
    return runs


_SAME = (
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "actor_rollout_ref.rollout.n=8",
)


def part_speed(suite: Suite) -> dict[str, Any]:
    """Every reply has the same tokens, every rollout one call, on both sides; weights are random."""
    options, limit = suite.options, suite.options.limit
    gpus, model = _gpus(), _random_model(suite, options.speed_size)
    result: dict[str, Any] = {"gpus": gpus, "size": options.speed_size, "batch": options.batch, "reply": options.reply}
    same = [*_SAME, f"data.train_batch_size={options.batch}", f"data.max_response_length={options.reply}"]
    same += options.overrides
    steps = str(options.speed_steps)
    arguments = [*_VERL, "--model", model, "--backend", "custom"]
    arguments += ["--agent", "benchmarks.gpu.agents:once", "--steps", steps]
    if (store := options.external_store_address) is not None:
        arguments += ["--external-store-address", store, "--n-runners", "0", *same]
    else:
        arguments += ["--n-runners", str(8 * options.batch), *same]
    ours, _ = suite.train("speed-ours", arguments, limit)
    result["ours"] = ours
    if suite.options.only_ours:
        return result
    baseline = suite.out / "runs" / "speed-verl"
    command = [sys.executable, "-m", "benchmarks.gpu.verl_baseline", model, str(baseline), steps, *same]
    command.append(f"trainer.n_gpus_per_node={gpus}")
    theirs = suite.run("speed-verl", command, limit)
    theirs["figures"] = figures(baseline) if (baseline / "verl.jsonl").exists() else {}
    result["verl"] = theirs
    if "step_s" in ours.get("figures", {}) and "step_s" in theirs["figures"]:
        result["ours_over_verl_step_time"] = round(ours["figures"]["step_s"] / theirs["figures"]["step_s"], 3)
    return result


def _random_model(suite: Suite, size: str, folder: Path | None = None) -> str:
    """A model with random weights: the cost of a step does not depend on them."""
    folder = folder or suite.out / f"random-{size}"
    if not (folder / "config.json").exists():
        from groundwire.train.policy import STARTER
        from groundwire.train.policy.model import load_policy, new_policy, save_policy

        _, tokenizer = load_policy(STARTER)
        save_policy(new_policy(tokenizer, **SIZES[size]), tokenizer, folder)
    return str(folder)


def part_uneven(suite: Suite) -> dict[str, Any]:
    """Waiting for the slowest, and not: calls of 64 tokens, eight for one question in eight, one for the others."""
    result: dict[str, Any] = {}
    model = _random_model(suite, "100m")
    for mode in suite.options.modes.split(","):
        arguments = [*_VERL, "--model", model, "--backend", "custom"]
        arguments += ["--agent", "benchmarks.gpu.agents:uneven", "--steps", str(suite.options.speed_steps)]
        arguments += ["--n-runners", "1024", *_SAME]
        arguments += ["data.train_batch_size=64", "data.max_response_length=64", f"trainer.v1.trainer_mode={mode}"]
        # Without flash-attn rows are padded to the longest of their micro-batch: of one call and of eight, to 140 GB.
        arguments += ["actor_rollout_ref.model.enable_gradient_checkpointing=True", *suite.options.overrides]
        result[mode], _ = suite.train(f"uneven-{mode}", arguments, suite.options.limit)
    times = [result.get(mode, {}).get("figures", {}).get("step_s") for mode in ("sync", "colocate_async")]
    if all(times):
        result["sync_over_async_step_time"] = round(times[0] / times[1], 3)
    return result


_LORA = (
    "actor_rollout_ref.model.lora_rank=32",
    "actor_rollout_ref.model.lora_alpha=32",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.rollout.load_format=safetensors",
)
_LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM as M, AutoTokenizer as T
model, before = (M.from_pretrained(path, dtype=torch.float32) for path in sys.argv[1:3])
T.from_pretrained(sys.argv[1])
old = dict(before.named_parameters())
moved = [float((value - old[name]).abs().max()) for name, value in model.named_parameters()]
print(sum(p.numel() for p in model.parameters()), "parameters,", sum(each > 0 for each in moved), "of", len(moved),
      "tensors differ, at most by", max(moved))
"""


def _loads(suite: Suite, name: str, folder: Path) -> dict[str, Any]:
    """The exported model in transformers, beside the one that it began as."""
    result = suite.run(name, [sys.executable, "-c", _LOADS, str(folder / "model"), suite.model], 120)
    return {**result, "said": last_line(suite.out / "logs" / f"{name}.log")}


def part_lora(suite: Suite) -> dict[str, Any]:
    """Adapters from sampling to export."""
    arguments = [*_VERL, "--model", suite.model, "actor_rollout_ref.actor.optim.lr=5e-4"]
    arguments += ["--steps", "4", "--val-tasks", "64", "trainer.save_freq=2", "trainer.test_freq=2", *_LORA]
    result, folder = suite.train("lora", arguments, suite.options.limit)
    if folder is not None and (folder / "model").exists():
        result["loads"] = _loads(suite, "lora-loads", folder)
        result["resume"] = suite.resume("lora-resume", folder)
    return result


def part_stop(suite: Suite) -> dict[str, Any]:
    """A scheduler's SIGTERM after the second step."""
    runs = suite.out / "runs" / "stop"
    command = [sys.executable, "-m", "train.run", "--output-dir", str(runs), *_VERL]
    command += ["--model", suite.model, "--steps", "100", "--val-tasks", "32", "trainer.save_freq=1"]
    command += suite.options.overrides
    with open(suite.out / "logs" / "stop.log", "w") as log:
        marked = {**environment(), MARK: str(runs)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=marked)
        started, folder = time.monotonic(), None
        while process.poll() is None and time.monotonic() - started < suite.options.limit:
            folder = next(iter(sorted(runs.glob("2*"))), None)
            if folder is not None and len(steps_of(folder)) > 2:  # the validation before training, and two steps
                break
            time.sleep(0.5)
        result: dict[str, Any] = {"steps_when_stopped": steps_of(folder) if folder else []}
        process.terminate()
        stopped = time.monotonic()
        try:
            result["exit"] = process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            result["exit"] = "killed after 120 s"
        result["seconds_to_stop"] = round(time.monotonic() - stopped, 1)
    result["said"] = last_line(suite.out / "logs" / "stop.log")
    time.sleep(5)
    result["processes_left"] = marked_processes(str(runs))
    if folder is not None:
        result["kept"] = sorted(path.name for path in folder.iterdir())
        result["resume"] = suite.resume("stop-resume", folder)
    return result


def part_local(suite: Suite) -> dict[str, Any]:
    """The embedded trainer."""
    arguments = ["--trainer", "local", "--device", "cuda", "--config", "fast", "--model", suite.model]
    arguments += ["--steps", "5", "--val-tasks", "50"]
    runs = suite.out / "runs" / "local"
    result = suite.run("local", [sys.executable, "-m", "train.run", "--output-dir", str(runs), *arguments], 400)
    summaries = sorted(runs.glob("2*/summary.json"))
    return {**result, **({"summary": json.loads(summaries[-1].read_text())} if summaries else {})}


PHASES: dict[str, Callable[[Suite], dict[str, Any]]] = {
    "model": part_model,
    "agree": part_agree,
    "ci": part_ci,
    "spider": part_spider,
    "speed": part_speed,
    "uneven": part_uneven,
    "lora": part_lora,
    "stop": part_stop,
    "local": part_local,
}


def _machine() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return {"gpus": names, "torch": torch.__version__, "cpus": os.cpu_count(), "commit": commit.stdout.strip()}


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def main() -> int:
    """Run the chosen parts; the exit status is how many of their programs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for models, runs, logs and results")
    parser.add_argument("--parts", default=",".join(PHASES), help="comma-separated")
    parser.add_argument("--model", help="a checkpoint instead of OUT/model")
    parser.add_argument("--spider", help="folder of real Spider; without it, the bundled data")
    parser.add_argument("--size", default="30m", choices=SIZES, help="of the model that is made")
    parser.add_argument("--backends", default="langgraph,openai-agents,mcp", help="of the part ci")
    parser.add_argument("--full-ci", action="store_true", help="of the part ci: --ci (20 steps) instead of --ci-fast")
    parser.add_argument("--steps", type=int, default=40, help="of the part spider")
    parser.add_argument("--val-tasks", type=int, default=200, help="of the part spider; 0 is all")
    parser.add_argument("--name", default="spider", help="of the part spider's run, where there are several")
    parser.add_argument("--speed-size", default="300m", choices=SIZES, help="speed: of the model with random weights")
    parser.add_argument("--batch", type=int, default=64, help="speed: prompts a step, eight rollouts each")
    parser.add_argument("--reply", type=int, default=256, help="speed: tokens of a reply")
    parser.add_argument("--speed-steps", type=int, default=8, help="speed, uneven: steps, of which two warm up")
    parser.add_argument("--modes", default="sync,colocate_async", help="of the part uneven")
    parser.add_argument("--external-store-address", help="speed: a store with runners, not the run's own")
    parser.add_argument("--only-ours", action="store_true", help="speed: without verl's own agent loop")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each training run")
    parser.add_argument(
        "overrides", nargs="*", help="verl settings of the parts ci, spider, speed, uneven and stop, KEY=VALUE"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.parts.split(",") if name not in PHASES]:
        parser.error(f"--parts has {', '.join(unknown)}; there are {', '.join(PHASES)}")
    suite = Suite(options)
    suite.results["machine"] = _machine()
    failed = 0
    for name in suite.options.parts.split(","):
        started = time.monotonic()
        print(f"\n== {name}", flush=True)
        try:
            suite.results[name] = PHASES[name](suite)
        except Exception as error:  # one part's trouble is not the next one's
            suite.results[name] = {"error": f"{type(error).__name__}: {error}"}
            failed += 1
        suite.results[name]["part_s"] = round(time.monotonic() - started, 1)
        suite.write()
        print(json.dumps(suite.results[name], indent=2)[:3000], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
