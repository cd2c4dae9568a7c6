"""``python -m chaos.model_server``: the policy server with a small random model, and the proxy in front of it.

Both run on one event loop with a store in memory, as in a run of the local trainer.
"""

from __future__ import annotations

import asyncio
import signal
import sys

_WORDS = "database question query name select from where singer age count order by tool sql result correct the of a is"


async def main() -> None:
    """Print the ports and the path of an attempt, then serve until SIGTERM."""
    import torch
    from dev.pretrain.model import new_policy
    from dev.pretrain.tokenizer import train_tokenizer

    from groundwire.adapters.tracing.proxy import LLMProxy
    from groundwire.train.policy.engine import LocalEngine
    from groundwire.train.policy.server import PolicyServer
    from groundwire.train.store.memory import MemoryStore
    from groundwire.train.store.rollout import Rollout

    torch.set_num_threads(1)
    tokenizer = train_tokenizer([_WORDS] * 30, words=_WORDS.split(), min_count=2)
    engine = LocalEngine(new_policy(tokenizer, context=512, seed=1), tokenizer, max_model_len=400)
    store, server = MemoryStore(), PolicyServer(engine)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await store.enqueue([Rollout(task={})])
    [taken] = await store.dequeue(1)
    try:
        async with server, LLMProxy(sink=store, policy=server, drain_timeout_s=5.0) as proxy:
            base_url = proxy.base_url(taken.rollout_id, taken.attempts[-1].attempt_id)
            print(server.port, proxy.port, base_url.removeprefix(proxy.url), flush=True)
            await stopped.wait()
    finally:
        engine.close()


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
