"""The process that holds vLLM: it samples, sleeps during updates, and takes new weights from the trainer's memory.

The trainer imports nothing of vLLM: an import takes 20 s, and vLLM's Python for each token would compete with the
agents for the interpreter. Messages are ``(number, method, arguments)`` and the answers ``(number, result or error)``.
The engine itself is a process below this one, forked before CUDA is used. All end with the trainer, however it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from groundwire.train.policy.vllm.sampling import structured_outputs

READY = -1
"""The number of the message that the engine has started."""
_WATCH_S = 0.5


class WeightReceiver:
    """vLLM's worker has these methods, too (its ``worker_extension_cls``)."""

    def receive_weights(self, handles: bytes) -> None:
        """Copy tensors of the trainer's into the model: pickled pairs of a name and the arguments of torch's
        ``rebuild_cuda_tensor``. They are read where they are, by CUDA IPC.
        """
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        worker: Any = self
        device = torch.accelerator.current_device_index()
        weights = []
        for name, arguments in pickle.loads(handles):  # noqa: S301 - from our own trainer
            here = list(arguments)
            here[6] = device  # the trainer's number of this GPU may be another
            weights.append((name, rebuild_cuda_tensor(*here)))
        with torch.no_grad():
            check_loaded(worker.get_model(), worker.get_model().load_weights(iter(weights)))
        torch.cuda.synchronize()
        del weights
        torch.cuda.ipc_collect()


def check_loaded(model: Any, loaded: Collection[str] | None) -> None:
    """Raise ``ValueError`` if the trainer's weights leave out some of the model's, which would stay as they were.

    None from a model that does not say what it has ``loaded``; vLLM checks its own loading in the same way.
    """
    if loaded is not None and (missing := sorted({name for name, _ in model.named_parameters()} - set(loaded))):
        raise ValueError(f"the trained model has no weights for {len(missing)} of vLLM's, such as {missing[0]}")


class _Sampler:
    """The methods that the trainer calls, on the event loop of ``engine``, an ``AsyncLLM``."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._numbers = engine, itertools.count()

    async def generate(
        self, prompt_ids: Sequence[int], parameters: Mapping[str, Any], lark: str
    ) -> tuple[list[tuple[int, float]], int, bool]:
        """The sampled ids with log-probabilities, the prompt's cached tokens, and whether the reply is complete."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        constraint = {"structured_outputs": structured_outputs(lark)} if lark else {}
        sampling = SamplingParams(
            **parameters, **constraint, logprobs=0, skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": list(prompt_ids)}
        async for output in self._engine.generate(prompt, sampling, str(next(self._numbers))):
            reply = output.outputs[0]
        sampled = [(token, entry[token].logprob) for token, entry in zip(reply.token_ids, reply.logprobs, strict=True)]
        if not sampled:
            raise ValueError(f"no token was sampled ({reply.finish_reason})")
        return sampled, output.num_cached_tokens or 0, reply.finish_reason == "stop"

    async def sleep(self) -> None:
        """Free the memory of the weights and the cache."""
        await self._engine.sleep(2)

    async def update_weights(self, handles: bytes, asleep: bool) -> None:
        """Take new weights, and forget what the old ones computed."""
        if asleep:
            await self._engine.wake_up(["weights"])
        await self._engine.collective_rpc("receive_weights", args=(handles,))
        if asleep:
            await self._engine.wake_up(["kv_cache"])
        await self._engine.reset_prefix_cache()


def serve(descriptor: int, parent: int, arguments: Mapping[str, Any]) -> None:
    """Answer until the trainer closes its end of the pipe, or the process ``parent`` ends."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with Connection(descriptor) as pipe:
        asyncio.run(_serve(pipe, arguments))


async def _serve(pipe: Connection, arguments: Mapping[str, Any]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    sampler, tasks = _Sampler(engine), dict[int, asyncio.Task[None]]()
    pipe.send((READY, None))

    async def answer(number: int, method: str, values: Sequence[Any]) -> None:
        try:
            result = await getattr(sampler, method)(*values)
        except asyncio.CancelledError:
            return
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")  # vLLM's own types are not the trainer's
        finally:
            del tasks[number]
        pipe.send((number, result))

    loop = asyncio.get_running_loop()
    try:
        while True:
            number, method, values = await loop.run_in_executor(None, pipe.recv)
            if method == "cancel":
                if number in tasks:
                    tasks[number].cancel()
            else:
                tasks[number] = loop.create_task(answer(number, method, values))
    except (EOFError, ConnectionError):
        engine.shutdown()


def _end_with_parent(parent: int) -> None:
    """vLLM's engine is in this process group, and does not notice the death of its parent's parent."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.killpg(0, signal.SIGKILL)
