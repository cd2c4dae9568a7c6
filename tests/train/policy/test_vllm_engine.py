"""The trainer's side of ``sampler=vllm`` and its process, with a scripted vLLM: vLLM itself needs a GPU
(``dev/gpu/vllm_sampler.py`` asks it the same).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import small_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from groundwire.train.api.training import make_job
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.trainer import TrainingError
from groundwire.train.policy import STARTER
from groundwire.train.policy.errors import EngineClosedError, EngineError
from groundwire.train.policy.types import Sampling
from groundwire.train.policy.vllm import engine as module
from groundwire.train.policy.vllm.engine import VLLMEngine, cache_bytes, check_vllm
from groundwire.train.policy.vllm.process import check_loaded

SCRIPTED = """
import asyncio, types

class AsyncEngineArgs:
    def __init__(self, **arguments):
        self.arguments = arguments

class SamplingParams(types.SimpleNamespace):
    pass
"""
SCRIPTED_ENGINE = '''
import asyncio, os, subprocess, types

class AsyncLLM:
    """Each reply is the number of weights so far, ``max_tokens`` times; prompt 99 never ends, 13 kills the engine."""

    @classmethod
    def from_engine_args(cls, args):
        if args.arguments["max_num_seqs"] == 7:
            raise ValueError("no memory for seven")
        self = cls()
        self.weights, self.asleep, self.log = 0, False, args.arguments["model"] + "/log"
        self.core = subprocess.Popen(["sleep", "600"])
        open(self.log, "w").write(f"core {self.core.pid}\\n")
        return self

    async def generate(self, prompt, sampling, number):
        assert not self.asleep
        if prompt["prompt_token_ids"] == [13]:
            os._exit(3)
        try:
            await asyncio.sleep(600 if prompt["prompt_token_ids"] == [99] else 0.05)
        except asyncio.CancelledError:
            open(self.log, "a").write("aborted\\n")
            raise
        ids = [self.weights] * sampling.max_tokens
        logprobs = [{self.weights: types.SimpleNamespace(logprob=-0.5)}] * len(ids)
        reply = types.SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length")
        yield types.SimpleNamespace(outputs=[reply], num_cached_tokens=0)

    async def sleep(self, level): self.asleep = True
    async def wake_up(self, tags): self.asleep = False
    async def collective_rpc(self, method, args): self.weights += 1
    async def reset_prefix_cache(self): pass
    def shutdown(self): self.core.kill()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, beside a package ``vllm``."""
    package = tmp_path / "site" / "vllm"
    (package / "v1" / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(SCRIPTED)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    FINAL_ONLY = 2\n")
    (package / "v1" / "__init__.py").touch()
    (package / "v1" / "engine" / "__init__.py").touch()
    (package / "v1" / "engine" / "async_llm.py").write_text(SCRIPTED_ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(module, "reduce_tensor", lambda tensor: (None, tuple(tensor.shape)))
    small_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def small_llama() -> LlamaForCausalLM:
    return small_model(LlamaForCausalLM, LlamaConfig)  # type: ignore[no-any-return]


def start(folder: Path, **changes: object) -> VLLMEngine:
    options = {"device": "cuda", "max_model_len": 300, "max_batch": 4, "dtype": "bfloat16", "log": folder / "vllm.log"}
    made = VLLMEngine(folder, **{**options, **changes})  # type: ignore[arg-type]
    made.attach(small_llama(), AutoTokenizer.from_pretrained(STARTER))
    return made


@pytest.fixture
def engine(folder: Path) -> Iterator[VLLMEngine]:
    made = start(folder)
    yield made
    made.close()


def test_requests_wait_for_weights_and_no_reply_mixes_two_versions(engine: VLLMEngine) -> None:
    assert engine.max_model_len == 256  # the model has no more positions
    early = engine.submit([1, 2], Sampling(max_tokens=3))
    engine.update_weights(5)
    before = [early, *(engine.submit([n], Sampling(max_tokens=2)) for n in range(3))]
    engine.sleep()
    assert all(future.done() for future in before)
    during = engine.submit([1], Sampling(max_tokens=2))
    time.sleep(0.2)
    assert not during.done()
    engine.update_weights(6)
    assert [future.result().token_ids for future in before] == [[1] * 3, [1] * 2, [1] * 2, [1] * 2]
    assert during.result(10).token_ids == [2, 2]
    assert (during.result().weights_version, engine.generated_tokens) == (6, 11)
    assert during.result().logprobs == [-0.5, -0.5]


def test_a_cancelled_request_is_aborted(engine: VLLMEngine, folder: Path) -> None:
    engine.update_weights(0)
    endless = engine.submit([99], Sampling())
    assert engine.submit([1], Sampling(max_tokens=1)).result(10).token_ids == [1]
    endless.cancel()
    deadline = time.monotonic() + 600
    while "aborted" not in (folder / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "aborted" in (folder / "log").read_text()
    engine.sleep()  # does not wait for it


def test_an_engine_that_ends_fails_what_waits(engine: VLLMEngine) -> None:
    engine.update_weights(0)
    waiting = [engine.submit([99], Sampling()), engine.submit([13], Sampling())]
    for future in waiting:
        with pytest.raises(EngineError, match="vLLM ended: "):
            future.result(10)
    with pytest.raises(EngineError, match="vLLM ended: "):
        engine.submit([1], Sampling())


def test_an_engine_that_does_not_start_says_why(folder: Path) -> None:
    engine = start(folder, max_batch=7)
    with pytest.raises(ConfigError, match="did not start: vLLM ended: ValueError: no memory for seven"):
        engine.update_weights(0)
    engine.close()


def test_closing_fails_what_waits_and_ends_all_processes(folder: Path) -> None:
    engine = start(folder)
    engine.update_weights(0)
    endless, core = engine.submit([99], Sampling()), int((folder / "log").read_text().split()[1])
    engine.close()
    with pytest.raises(EngineClosedError, match="was closed before"):
        endless.result(10)
    assert has_ended(core)


def test_no_process_outlives_a_killed_trainer(folder: Path) -> None:
    code = (
        "import os, time, sys\n"
        "from groundwire.train.policy.vllm.process import serve\n"
        "from multiprocessing import Pipe\n"
        "here, there = Pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    here.close()\n"
        f"    serve(there.fileno(), os.getppid(), dict(model={str(folder)!r}, max_num_seqs=4))\n"
        "print(here.recv(), flush=True)\n"
        "time.sleep(600)\n"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=path)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"(-1, None)\n"
    core = int((folder / "log").read_text().split()[1])
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert has_ended(core)


def has_ended(process: int) -> bool:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_it_needs_vllm_and_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and device is cpu"):
        check_vllm("cpu")
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    job = make_job({"trainer": "local", "sampler": "vllm"})
    with pytest.raises(ConfigError, match="not installed"):
        job.trainer.check(job)  # before there is a run directory


def test_a_run_whose_sampler_has_ended_says_so_and_closes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failed = start(folder), Future[Any]()
    failed.set_exception(EngineError("vLLM failed: no memory"))
    monkeypatch.setattr("groundwire.train.local._start_vllm", lambda *_: engine)
    engine.update_weights(0)
    monkeypatch.setattr(engine, "_ask", lambda *_: (0, failed))
    job = make_job({"trainer": "local", "sampler": "vllm", "config": "fast"})
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=job.config.to_dict())
    with pytest.raises(TrainingError, match="the sampler ended the run: vLLM failed: no memory"):
        job.trainer.train(job, run, ProgressCallback(), GracefulShutdown())
    assert engine._process.poll() is not None


def test_the_cache_holds_all_requests_or_a_fifth_of_the_memory() -> None:
    shape = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    of_token = 2 * 3 * 2 * 16 * 2
    assert cache_bytes(shape, size=2, tokens=100, available=1 << 30) == 100 * of_token
    assert cache_bytes(shape, size=4, tokens=100, available=1 << 30) == 200 * of_token
    assert cache_bytes(shape, size=2, tokens=1 << 40, available=1000) == 200


def test_weights_that_the_trainer_does_not_have_are_an_error() -> None:
    model = small_llama()
    names = [name for name, _ in model.named_parameters()]
    check_loaded(model, names)
    check_loaded(model, None)
    with pytest.raises(ValueError, match=f"no weights for 1 of vLLM's, such as {names[-1]}"):
        check_loaded(model, names[:-1])
