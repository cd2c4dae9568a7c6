"""Benchmarks and checks of training on GPUs.

Each part runs its programs with a time limit. Logs go to OUT/logs, results to
OUT/results.json after every part. A part can run alone, and again. All parts
except speed, scaling, update, peers and uneven use the model of --model.

  agree   vLLM and the embedded server on one checkpoint: are token ids and
          logprobs equal?
  ci      --ci-fast (or --ci) with each backend; the exported model loads in
          transformers; the run resumes
  spider  a run with evaluations before and after; real Spider with --spider
  speed   the time of a step, of a step of verl's own agent loop, and with
          --trl of TRL's, with random weights of the shape --shape
  scaling the time of our step on the first GPU, and on all
  uneven  the trainer modes --modes with rollouts of uneven length, with random
          weights; separate_async samples on half of the GPUs
  update  the local trainer's update and sampling, and verl's update, at the
          shape of an agent's calls, with random weights
  peers   the update of TRL's AsyncGRPO, of verl and ours on the same rows
  stop    SIGTERM during a run: its files, the remaining processes, and --resume
  architectures  gemma3_text, lfm2 and mistral with random weights learn to choose a digit, with each trainer
  constrained  replies with a JSON schema, and calls of a required tool: their form, and the probabilities of
               sampler and trainer
  learning     supervised fine-tuning on two thirds of Spider's training
          databases, then GRPO on the others, for each agent and seed; beside
          them SFT alone for the time of both; evaluations of all validation
          questions before, between and after, paired
  medical      the same with the medical questions
  async        SFT, then from its model the trainer modes --modes with verl, for the steps --steps and at most --verl-s;
               evaluations of all validation questions, paired
  traces       groundwire learn from traces of the model that learning trains:
          SFT, on-policy distillation, GRPO, for each seed

What a small real model learns, on one GPU:
  --parts learning,medical --model smollm2 --spider FOLDER

LoRA: --parts ci --config lora --model FOLDER

Two GPUs or more compared with one; with long replies a small model measures
the sequential sampling of tokens, which more GPUs do not speed up:
  --parts scaling --shape llama-3072x28 --batch 128

The shape of an agent's calls, long prompts and short replies, needs real Spider:
  --parts speed --spider FOLDER --shape 0.5b,1.5b --reply 42
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._results import commit, read_lines

from dev.gpu.attention import save_tiny_model
from dev.gpu.learning import part_async, part_learning, part_medical
from dev.gpu.options import read_options
from dev.gpu.suite import Suite, gpu_names, last_line, marked_processes, separate_gpus, step_figures, steps_of
from dev.gpu.traces import part_traces
from groundwire.tools.errors import exit_on_user_error
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.evaluation.run_reader import final_rollouts
from groundwire.train.policy.model import check_device

_TEMPERATURES = {"0": "1", "1": "2"}
"""Temperatures of the evaluations before and after training, and the samples of each question."""
_SAME_WORK = (
    "actor_rollout_ref.rollout.ignore_eos=True",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "actor_rollout_ref.rollout.n=8",
)
"""verl's settings for steps of equal work, without validation and checkpoints."""
_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_SPIDER_TOKENS = {"ours": f"{_TOKENS}=16384", "verl": f"{_TOKENS}=32768"}
"""With Spider's prompts ours needs less memory with fewer tokens a micro-batch, and verl's loop is faster with more."""
_COIN = ("--reward", "dev.gpu.agents:coin")


def part_agree(suite: Suite) -> dict[str, Any]:
    """Compare the two servers."""
    out = suite.out / "agree.json"
    result = suite.run("agree", ["-m", "dev.gpu.agreement", suite.model, str(out)])
    return {**result, **(json.loads(out.read_text()) if out.exists() else {})}


def part_ci(suite: Suite) -> dict[str, Any]:
    """Run each backend; then load and resume the first run."""
    results: dict[str, Any] = {}
    first = None
    fast = ["--ci-fast", "trainer.save_freq=1", "actor_rollout_ref.rollout.enforce_eager=True"]
    for backend in suite.options.backends:
        arguments = [*_verl(suite), "--backend", backend, *(["--ci"] if suite.options.full_ci else fast)]
        results[backend], folder = suite.train(f"ci-{backend}", [*arguments, *suite.options.overrides])
        first = first or folder
    return {**results, **_load_and_resume(suite, "ci", first)}


def part_spider(suite: Suite) -> dict[str, Any]:
    """Train, and compare evaluations of the model before and after."""
    options = suite.options
    data = ["--data-dir", options.spider] if options.spider else []
    arguments = [*_verl(suite), *data, "--steps", str(options.steps), "--val-tasks", str(options.val_tasks)]
    result, folder = suite.train("spider", [*arguments, *options.overrides])
    if folder is None or not (lines := read_lines(folder / "metrics.jsonl")):
        return result
    validations = [(line["step"], line.get("validation") or line.get("validation_sampled")) for line in lines]
    result["curve"] = [(step, validation["accuracy"]) for step, validation in validations if validation]
    result["rewards"] = [line["reward"] for line in lines if line.get("reward") is not None]
    result["run"] = str(folder)
    if not (folder / "model").exists():
        return result
    for temperature, samples in _TEMPERATURES.items():
        evaluations = []
        for name, model in (("before", suite.model), ("after", str(folder / "model"))):
            sampling = ["--temperature", temperature, "-n", samples]
            _, evaluation = suite.evaluate(f"spider-{name}-{temperature}", ["--model", model, *sampling, *data])
            evaluations.append(str(evaluation))
        name = f"spider-compare-{temperature}"
        suite.run(name, ["-m", "groundwire.train.evaluate", "--compare", *evaluations, "--format", "json"])
        text = suite.log(name).read_text(errors="replace")
        try:
            comparison = json.loads(text[text.index("{") :])
        except ValueError:
            comparison = text[-500:]
        result[f"before and after, temperature {temperature}"] = comparison
    return result


def part_speed(suite: Suite) -> dict[str, Any]:
    """Compare with verl's own agent loop: on both sides one call per rollout, and the same number of tokens."""
    options = suite.options
    result: dict[str, Any] = {"batch": options.batch, "reply": options.reply, "gpus": max(1, len(gpu_names()))}
    for shape in options.shape:
        result[shape] = _speed(suite, shape)
    return result


def part_scaling(suite: Suite) -> dict[str, Any]:
    """Compare our step on one GPU and on all."""
    gpus = gpu_names()
    if len(gpus) < 2:
        return {"note": f"not measured: it needs several GPUs, and torch finds {len(gpus)}"}
    result: dict[str, Any] = {"batch": suite.options.batch, "reply": suite.options.reply, "gpus": len(gpus)}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    for shape in suite.options.shape:
        parts = {
            "one": _our_speed(suite, f"scaling-one-{shape}", shape, {"CUDA_VISIBLE_DEVICES": first}),
            "all": _our_speed(suite, f"scaling-all-{shape}", shape),
        }
        result[shape] = parts | _ratio("one_over_all_step_time", parts)
    return result


def _speed(suite: Suite, shape: str) -> dict[str, Any]:
    options = suite.options
    result = {"ours": _our_speed(suite, f"speed-ours-{shape}", shape)}
    if options.only_ours:
        return result
    out, model = suite.out / "runs" / f"speed-verl-{shape}", _random_model(suite, shape)
    command = ["-m", "dev.gpu.verl_baseline", model, str(out), str(options.speed_steps)]
    command += [*(["--spider", options.spider] if options.spider else []), *_speed_settings(suite, "verl")]
    theirs = suite.run(f"speed-verl-{shape}", [*command, f"trainer.n_gpus_per_node={max(1, len(gpu_names()))}"])
    result["verl"] = theirs | {"figures": step_figures(out)}
    return result | _ratio("ours_over_verl_step_time", result)


def _our_speed(suite: Suite, name: str, shape: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    options = suite.options
    runners = ["--n-runners", str(8 * options.batch)]
    if options.external_store_address is not None:
        runners = ["--external-store-address", options.external_store_address, "--n-runners", "0"]
    data = ["--data-dir", options.spider, "--max-model-len", "3072"] if options.spider else []
    agent = _agent("once_full" if options.spider else "once")
    arguments = [*_verl(suite, _random_model(suite, shape)), *agent, *_COIN, *data, *runners]
    arguments += ["--steps", str(options.speed_steps), *_speed_settings(suite, "ours")]
    return suite.train(name, arguments, variables=variables)[0]


def _speed_settings(suite: Suite, whose: str) -> list[str]:
    options = suite.options
    chosen = not options.spider or any(each.startswith(_TOKENS) for each in options.overrides)
    batch = [f"data.train_batch_size={options.batch}", f"data.max_response_length={options.reply}"]
    return [*([] if chosen else [_SPIDER_TOKENS[whose]]), *_SAME_WORK, *batch, *options.overrides]


def _ratio(name: str, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The step time of the first part over that of the second, if both have one."""
    times = [part.get("figures", {}).get("step_s") for part in parts.values()]
    return {name: round(times[0] / times[1], 3)} if all(times) else {}


def part_update(suite: Suite) -> dict[str, Any]:
    """The parts of a step at the shape of an agent's calls, each alone on the GPU; their output."""
    settings = {"bf16": True, "tokens_per_forward": 16384, "branches_per_row": 100000, "gradient_checkpointing": True}
    commands = {
        "update": ["--shapes", "135m", "--dense-mask", "--settings", json.dumps(settings)],
        "sampling": [],
        "verl_update": [],
    }
    result = {}
    for name, arguments in commands.items():
        result[name] = suite.run(name, ["-m", f"dev.gpu.{name}", *arguments])
        result[name]["output"] = suite.log(name).read_text(errors="replace").splitlines()[-20:]
    return result


def part_peers(suite: Suite) -> dict[str, Any]:
    """The update of TRL, of verl and ours on the same rows."""
    figures, options = suite.out / "peers.json", suite.options
    command = ["-m", "dev.gpu.peers", "--json", str(figures), "--limit", str(options.limit - 30)]
    command += [*(["--trl", options.trl] if options.trl else [])]
    command += [*(["--spider", options.spider] if options.spider else [])]
    return suite.run("peers", command) | (json.loads(figures.read_text()) if figures.exists() else {})


def part_uneven(suite: Suite) -> dict[str, Any]:
    """Compare trainer modes: calls of 64 tokens, eight for one question in eight and one for the others."""
    options, result = suite.options, dict[str, Any]()
    model = _random_model(suite, options.shape[0])
    arguments = [*_verl(suite, model), *_agent("uneven"), *_COIN, "--steps", str(options.speed_steps)]
    arguments += ["--n-runners", "1024", *_SAME_WORK, "data.train_batch_size=64", "data.max_response_length=64"]
    arguments += ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]
    for mode in options.modes:
        settings = [f"trainer.v1.trainer_mode={mode}", *(separate_gpus() if mode == "separate_async" else [])]
        result[mode], _ = suite.train(f"uneven-{mode}", [*arguments, *settings, *options.overrides])
    sync = result.get("sync", {})
    for mode in [each for each in options.modes if each != "sync"]:
        result |= _ratio(f"sync_over_{mode}_step_time", {"sync": sync, mode: result[mode]})
    return result


def part_stop(suite: Suite) -> dict[str, Any]:
    """Terminate a run after its second step, as a job scheduler does, and resume it."""
    runs = suite.out / "runs" / "stop"
    arguments = [*_verl(suite), "--steps", "100", "--val-tasks", "32", "trainer.save_freq=1", *suite.options.overrides]
    command = ["-m", "groundwire.train.run", "--output-dir", str(runs), *arguments]
    process = suite.start("stop", command, mark=str(runs))
    started, folder = time.monotonic(), None
    while process.poll() is None and time.monotonic() - started < suite.options.limit:
        folder = min(runs.glob("2*"), default=None)
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
    result["last_line"] = last_line(suite.log("stop"))
    time.sleep(5)
    result["processes_left"] = marked_processes(str(runs))
    if folder is not None:
        result["files"] = sorted(path.name for path in folder.iterdir())
        result["resume"] = suite.resume("stop-resume", folder)
    return result


def part_constrained(suite: Suite) -> dict[str, Any]:
    """One step of an agent that fails if a complete reply breaks its schema, or a required call is missing."""
    trainer = _verl(suite) if suite.options.device == "cuda" else ["--trainer", "local", "--model", suite.model]
    arguments = [*trainer, "--ci-fast", *_agent("constrained"), *suite.options.overrides]
    result, folder = suite.train("constrained", arguments)
    if folder is not None:
        rollouts = final_rollouts(RunDir.open(folder))
        result["complete"] = f"{sum(bool(rollout.outcome.answer) for rollout in rollouts)} of {len(rollouts)}"
        lines = [line["data"] for line in read_lines(folder / "verl.jsonl")] if suite.options.device == "cuda" else []
        names = ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max")
        result["differences"] = [{name: line[name] for name in names if name in line} for line in lines]
    return result


def part_architectures(suite: Suite) -> dict[str, Any]:
    """Model types outside of Llama and Qwen: the mean reward of each step, which begins at 0.5, with each trainer."""
    chosen = ["--agent", "dev.gpu.agents:choose_digit", "--reward", "dev.gpu.agents:chosen_digit"]
    local = ["--trainer", "local", "--device", suite.options.device, "--config", "hf", "learning_rate=1e-3"]
    local += ["steps=10", "tasks_per_step=8", "group_size=16", "val_tasks=8", "val_every=0", "warmup_steps=0"]
    verl = ["--trainer", "verl", "--config", suite.options.config, "--steps", "10", "--val-tasks", "8"]
    verl += ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=16", "actor_rollout_ref.actor.optim.lr=1e-3"]
    trainers = {"embedded": [*local, "sampler=embedded"]}
    if suite.options.device == "cuda":
        trainers |= {"vllm": [*local, "sampler=vllm"], "verl": verl}
    result: dict[str, Any] = {}
    for kind in ("gemma3_text", "lfm2", "mistral"):
        model = suite.out / f"tiny-{kind}"
        save_tiny_model(kind, model)
        for trainer, settings in trainers.items():
            name = f"architectures-{kind}-{trainer}"
            arguments = [*settings, *chosen, "--model", str(model), "--rollout-process", "off"]
            result[f"{kind}, {trainer}"], folder = suite.train(name, [*arguments, *suite.options.overrides])
            lines = read_lines(folder / "metrics.jsonl") if folder is not None else []
            rewards = [line["reward"] for line in lines if line.get("reward") is not None]
            result[f"{kind}, {trainer}"]["rewards"] = [round(reward, 3) for reward in rewards]
            suite.results["architectures"] = result
            suite.write()
    return result


PARTS: dict[str, Callable[[Suite], dict[str, Any]]] = {
    "agree": part_agree,
    "ci": part_ci,
    "spider": part_spider,
    "speed": part_speed,
    "scaling": part_scaling,
    "update": part_update,
    "peers": part_peers,
    "uneven": part_uneven,
    "stop": part_stop,
    "architectures": part_architectures,
    "constrained": part_constrained,
    "learning": part_learning,
    "medical": part_medical,
    "async": part_async,
    "traces": part_traces,
}


def _random_model(suite: Suite, shape: str) -> str:
    folder = suite.out / f"random-{shape}"
    if not (folder / "config.json").exists():
        from dev.gpu.random_model import save_random_model

        save_random_model(shape, folder)
    return str(folder)


def _verl(suite: Suite, model: str | None = None) -> list[str]:
    return ["--trainer", "verl", "--config", suite.options.config, "--model", model or suite.model]


def _agent(name: str) -> list[str]:
    return ["--backend", "custom", "--agent", f"dev.gpu.agents:{name}"]


_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM as M, AutoTokenizer as T
model, before = (M.from_pretrained(path, dtype=torch.float32) for path in sys.argv[1:3])
T.from_pretrained(sys.argv[1])
old = dict(before.named_parameters())
changes = [float((value - old[name]).abs().max()) for name, value in model.named_parameters()]
print(sum(p.numel() for p in model.parameters()), "parameters,", sum(each > 0 for each in changes), "of", len(changes),
      "tensors differ, at most by", max(changes))
"""


def _load_and_resume(suite: Suite, name: str, folder: Path | None) -> dict[str, Any]:
    """Compare a run's exported model in transformers with the initial one; resume the run for a step."""
    if folder is None or not (folder / "model").exists():
        return {}
    loads = suite.run(f"{name}-loads", ["-c", _LOAD, str(folder / "model"), suite.model])
    loads["last_line"] = last_line(suite.log(f"{name}-loads"))
    return {"loads": loads, "resume": suite.resume(f"{name}-resume", folder)}


def _machine() -> dict[str, Any]:
    import torch

    return {"gpus": gpu_names(), "torch": torch.__version__, "cpus": os.cpu_count(), "commit": commit()}


def main() -> int:
    """Run the chosen parts; the exit status is the number of parts that raised an error."""
    options = read_options(__doc__ or "", PARTS)
    with exit_on_user_error():
        if {"async", "learning", "medical", "traces"} & set(options.parts):
            check_device(options.device)
        suite = Suite(options)
    suite.results["machine"] = _machine()

    def stop(*_: Any) -> None:
        suite.stop()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    failed = 0
    try:
        for name in options.parts:
            failed += _run_part(suite, name)
    except KeyboardInterrupt:
        print(f"stopped; results so far: {suite.out / 'results.json'}", flush=True)
        return 130
    return failed


def _run_part(suite: Suite, name: str) -> bool:
    """Run a part and write its results. Whether it raised an error."""
    started, failed = time.monotonic(), False
    print(f"\n== {name}", flush=True)
    try:
        suite.results[name] = PARTS[name](suite)
    except Exception as error:  # the other parts still run
        suite.results[name] = {"error": f"{type(error).__name__}: {error}"}
        failed = True
    suite.results[name]["part_s"] = round(time.monotonic() - started, 1)
    suite.write()
    print(json.dumps(suite.results[name], indent=2)[:3000], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
