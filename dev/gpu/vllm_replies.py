"""vLLM's time for the replies of a step: with each token, as verl's own loop asks for them, and once, as ours does.

64 x 8 requests with Spider's prompts, replies of 42 tokens, 0.40 B random weights; the two take turns in one server.

python -m dev.gpu.vllm_replies --spider FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dev.gpu.agents import sql_messages
from dev.gpu.random_model import save_random_model
from groundwire import domains

GROUPS, GROUP_SIZE, REPLY, ROUNDS = 64, 8, 42, 4


async def main(spider: str, model: str) -> None:
    """Print seconds and CPU seconds of each round; the first is not counted."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="bfloat16",
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=12_000_000_000,
            max_model_len=3072,
            max_num_seqs=GROUPS * GROUP_SIZE,
        )
    )
    tokenizer, tasks = AutoTokenizer.from_pretrained(model), iter(domains.get("spider").load(spider).train)
    kinds = {"with each token": RequestOutputKind.CUMULATIVE, "once": RequestOutputKind.FINAL_ONLY}
    for round_number in range(ROUNDS + 1):
        for name, kind in kinds.items():
            prompts = []
            for _ in range(GROUPS):
                task = next(tasks)
                messages = sql_messages(str(task["question"]), str(task["db_path"]), full=True)
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                prompts += [ids] * GROUP_SIZE
            cpu_s, started_s = time.process_time(), time.monotonic()
            await asyncio.gather(*(_reply(engine, ids, kind) for ids in prompts))
            seconds, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
            if round_number:
                print(f"{name:>16}  {seconds:.2f} s, {cpu_s:.2f} s of this process's CPU", flush=True)
    engine.shutdown()


async def _reply(engine: Any, prompt_ids: Sequence[int], kind: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(max_tokens=REPLY, logprobs=0, ignore_eos=True, detokenize=False, output_kind=kind)
    prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
    requested = engine.generate(prompt=prompt, sampling_params=sampling, request_id=uuid.uuid4().hex)
    reply = [output async for output in requested][-1].outputs[0]
    assert len(reply.token_ids) == len(reply.logprobs) == REPLY


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.vllm_replies", description=__doc__)
    parser.add_argument("--spider", required=True, metavar="FOLDER", help="real Spider")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("this needs vLLM (docs/verl.md) and a GPU")
    with tempfile.TemporaryDirectory() as folder:
        save_random_model("0.5b", Path(folder))
        asyncio.run(main(options.spider, folder))
