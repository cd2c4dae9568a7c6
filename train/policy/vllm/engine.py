"""The sampler of ``sampler=vllm``: the trainer's side of :mod:`groundwire.train.policy.vllm.process`."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoConfig

from groundwire.tools.secrets import mask_secrets
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.errors import ContextLengthError, EngineClosedError, EngineError
from groundwire.train.policy.model import key_value_bytes
from groundwire.train.policy.types import Completion, OnToken, Sampling
from groundwire.train.policy.vllm.process import READY
from groundwire.train.policy.vllm.sampling import completion, vllm_grammar, vllm_parameters
from groundwire.train.step_timer import StepTimer

ASLEEP_BYTES = 2_400_000_000
"""What vLLM keeps of the GPU's memory when it sleeps."""
_CACHE_SHARE = 0.2  # of the GPU's memory: the most for keys and values
_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)  # batch sizes with a CUDA graph; others take the next one's
_CLOSE_S = 10.0
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")


class VLLMEngine:
    """Samples with vLLM (:class:`groundwire.train.policy.types.Engine`). Its process starts at once and takes half a
    minute: make it first, and :meth:`attach` the model when that is loaded.

    Args:
        folder: of the model, for its architecture; the weights come with :meth:`update_weights`.
        device: ``cuda`` or ``cuda:N``.
        max_model_len: most tokens of prompt and reply together; at most the model's number of positions.
        max_batch: most requests that are decoded together; further ones wait.
        dtype: of weights and cache, ``bfloat16`` or ``float32``.
        log: the file with vLLM's messages.
    """

    def __init__(self, folder: Path, *, device: str, max_model_len: int, max_batch: int, dtype: str, log: Path) -> None:
        shape = AutoConfig.from_pretrained(folder).get_text_config()
        positions = getattr(shape, "max_position_embeddings", None) or max_model_len
        self.max_model_len = max_model_len = min(max_model_len, positions)
        self.weights_version, self.generated_tokens = 0, 0
        self._log, self._closed, self._asleep = log, False, False
        self._lock, self._numbers = threading.RLock(), 0
        self._error: EngineError | None = None  # why vLLM has ended by itself
        self._ready: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {READY: self._ready}
        self._holds, self._held = True, list[tuple[int, str, Any]]()  # until the first weights
        arguments = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_batch,
            "kv_cache_memory_bytes": cache_bytes(
                shape,
                size=getattr(torch, dtype).itemsize,
                tokens=max_batch * max_model_len,
                available=torch.cuda.get_device_properties(device).total_memory,
            ),
            "gpu_memory_utilization": 0.05,  # vLLM's check at its start; the memory of the cache is given
            "enable_sleep_mode": True,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "groundwire.train.policy.vllm.process.WeightReceiver",
            "scheduler_cls": "groundwire.train.policy.vllm.scheduler.WholeReplies",
            # Without torch.compile: ready in 9 s instead of 96 s, and sampling is as fast.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted({min(size, max_batch) for size in _GRAPHS}),
            },
            "disable_log_stats": True,
        }
        self._process = self._start(arguments, device)
        threading.Thread(target=self._receive, name="vllm-replies", daemon=True).start()

    def _start(self, arguments: Mapping[str, Any], device: str) -> subprocess.Popen[bytes]:
        self._pipe, other_end = Pipe()
        index = device.partition(":")[2] or "0"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment = {
            "CUDA_VISIBLE_DEVICES": visible[int(index)] if visible != [""] else index,
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first start compiles kernels for minutes
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with other_end, self._log.open("ab") as log:
            descriptor = other_end.fileno()
            called = f"serve({descriptor}, {os.getpid()}, {dict(arguments)!r})"
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", f"from groundwire.train.policy.vllm.process import serve; {called}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
                start_new_session=True,
                env={**os.environ, **environment},
            )

    def attach(self, model: Any, tokenizer: Any, *, timer: StepTimer | None = None) -> None:
        """The trained model, whose weights :meth:`update_weights` hands over, and its tokenizer.

        ``timer`` attributes the time of requests to ``sampling``.
        """
        self._model, self.tokenizer, self._timer = model, tokenizer, timer

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """See :meth:`groundwire.train.policy.types.Engine.submit`; ``on_token`` gets all tokens at the end."""
        available = self.max_model_len - len(prompt_ids)
        if available < 1:
            raise ContextLengthError(len(prompt_ids), self.max_model_len)
        parameters = vllm_parameters(sampling, min(available, sampling.max_tokens or available))
        lark = vllm_grammar(self.tokenizer, sampling.grammar) if sampling.grammar else ""
        future: Future[Completion] = Future()
        number, answered = self._ask("generate", list(prompt_ids), parameters, lark)
        if self._timer:
            self._timer.enter("sampling")

        def finish(done: Future[Any]) -> None:
            if self._timer:
                self._timer.leave("sampling")
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                if error := done.exception():
                    future.set_exception(error)
                    return
                sampled, cached, stopped = done.result()
                self.generated_tokens += len(sampled)
                told = {"stopped": stopped, "on_token": on_token, "cached_tokens": cached}
                version = self.weights_version
                future.set_result(
                    completion(self.tokenizer, sampling, tuple(prompt_ids), sampled, weights_version=version, **told)
                )

        answered.add_done_callback(finish)
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def sleep(self) -> None:
        """Free the GPU's memory until the next :meth:`update_weights`; requests wait for it."""
        self._hold()
        self._ask("sleep")[1].result()
        self._asleep = True

    def update_weights(self, version: int) -> None:
        """Hand the model's present weights over; blocks until the running requests have finished with the old ones.

        Raises :class:`ConfigError` if vLLM could not start, and :class:`EngineError` if it has ended.
        """
        try:
            self._ready.result()
        except EngineError as error:
            raise ConfigError(f"sampler is vllm, which did not start: {error}") from error
        self._hold()
        weights = [  # those of LoRA's adapters are merged
            (name.replace(".base_layer.", "."), weight.detach().contiguous())
            for name, weight in self._model.named_parameters()
            if ".lora_" not in name
        ]
        torch.cuda.synchronize(self._model.device)
        handles = pickle.dumps([(name, reduce_tensor(weight)[1]) for name, weight in weights])
        self._ask("update_weights", handles, self._asleep)[1].result()
        torch.cuda.ipc_collect()
        self.weights_version, self._asleep = version, False
        with self._lock:
            self._holds = False
            for message in self._held:
                self._send(message)
            self._held.clear()

    def close(self) -> None:
        """End vLLM. Unfinished requests fail with :class:`EngineClosedError`. May be called again."""
        with self._lock:
            self._closed = True
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _hold(self) -> None:
        """Keep new requests back, and wait for the running ones."""
        with self._lock:
            self._holds = True
            held = {number for number, _method, _values in self._held}
            running = [answered for number, answered in self._waiting.items() if number not in held]
        wait(running)

    def _ask(self, method: str, *values: Any) -> tuple[int, Future[Any]]:
        """Send a message, or keep it back; returns its number and the future of its answer."""
        answered: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise self._error or EngineClosedError("the engine is closed")
            self._numbers += 1
            number, message = self._numbers, (self._numbers, method, values)
            self._waiting[number] = answered
            if self._holds and method == "generate":
                self._held.append(message)
            else:
                self._send(message)
        return number, answered

    def _send(self, message: tuple[int, str, Any]) -> None:
        with contextlib.suppress(OSError):  # the process has ended: what waits is told why
            self._pipe.send(message)

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._held = [message for message in self._held if message[0] != number]
            if self._waiting.pop(number, None) is not None:
                self._send((number, "cancel", ()))

    def _receive(self) -> None:
        """In a thread: pass the answers on, and fail what waits when the process has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, result = self._pipe.recv()
                with self._lock:
                    answered = self._waiting.pop(number, None)
                if answered is None:  # cancelled
                    continue
                if isinstance(result, Exception):
                    answered.set_exception(EngineError(f"vLLM failed: {mask_secrets(str(result))[:500]}"))
                else:
                    answered.set_result(result)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)  # it writes its error after the pipe is closed
        lines = self._log.read_text("utf-8", "replace").splitlines()
        errors = [found[0] for line in lines if (found := _ERROR.search(line))] or lines[-1:] or ["it wrote nothing"]
        with self._lock:
            message = "the engine was closed before the request finished"
            closed: EngineError = EngineClosedError(message)
            if not self._closed:  # the first error is the cause of the others
                closed = self._error = EngineError(f"vLLM ended: {errors[0]} ({self._log})")
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered.set_exception(closed)


def check_vllm(device: str) -> None:
    """Raise :class:`ConfigError` if :class:`VLLMEngine` cannot sample on ``device``."""
    if not find_spec("vllm"):
        raise ConfigError("sampler is vllm, which is not installed here: pip install 'groundwire[verl]'")
    if not device.startswith("cuda"):
        raise ConfigError(f"sampler is vllm, which needs a GPU, and device is {device}: use sampler=embedded")


def cache_bytes(shape: Any, *, size: int, tokens: int, available: int) -> int:
    """The memory of the keys and values of ``tokens``, in numbers of ``size`` bytes, for a model of this Hugging Face
    config; but at most a fifth of what is ``available``.
    """
    return int(min(tokens * key_value_bytes(shape, size), _CACHE_SHARE * available))
