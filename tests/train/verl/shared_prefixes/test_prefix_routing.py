"""Which inference server gets a prompt, with verl's load balancer without Ray."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from test_prefix_balance import about_databases
from verl.workers.rollout.router import GlobalRequestLoadBalancer, _resolve_router_class

from groundwire.train.config.resolve import resolve
from groundwire.train.verl.hydra_config import flat_config
from groundwire.train.verl.shared_prefixes.routing import PrefixRouter

PATH = "actor_rollout_ref.rollout.router_config_path"


def made(servers: int) -> PrefixRouter:
    return PrefixRouter({str(server): f"handle {server}" for server in range(servers)}, {})


def distinct(prompts: list[list[int]]) -> int:
    """Tokens that a server computes of these prompts."""
    return len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))})


@pytest.mark.parametrize("servers", [2, 4])
@pytest.mark.parametrize("instructions", [40, 3000])
def test_prompts_that_begin_alike_go_to_one_server_and_all_servers_get_as_many(servers: int, instructions: int) -> None:
    _, _, rows = about_databases(40, 128, instructions)
    prompts = rows[::2]

    def most_tokens(router: GlobalRequestLoadBalancer, **sent: bool) -> int:
        random.seed(0)
        parts: dict[str, list[list[int]]] = {str(server): [] for server in range(servers)}
        for number, prompt in enumerate(prompts):
            server, handle = router.acquire_server(f"key {number}", **({"prompt_ids": prompt} if sent else {}))
            assert handle == f"handle {server}"
            parts[server].append(prompt)
        counts = [len(part) for part in parts.values()]
        assert max(counts) - min(counts) <= 4
        return max(map(distinct, parts.values())) - instructions  # every server has those

    ours = most_tokens(made(servers), prompt_ids=True)
    alone = distinct(prompts) - instructions
    assert ours < 1.5 * alone / servers
    assert most_tokens(GlobalRequestLoadBalancer({str(each): f"handle {each}" for each in range(servers)})) > 1.3 * ours


def test_a_key_stays_on_its_server() -> None:
    router = made(2)
    server, _ = router.acquire_server("a", prompt_ids=[*range(200)])
    for _ in range(9):
        assert router.acquire_server("a", prompt_ids=[*range(300)])[0] == server
    assert router.acquire_server("b", prompt_ids=[*range(200)])[0] != server  # the other one is ten calls behind
    for _ in range(10):
        router.release_server(server)
    assert router.get_total_inflight() == 1


def test_a_beginning_of_less_than_half_of_a_prompt_is_no_reason() -> None:
    router, common = made(2), [*range(100)]
    servers = Counter(
        router.acquire_server(str(n), prompt_ids=[*common, *range(1000 * n, 1000 * n + 200)])[0] for n in range(4)
    )
    assert set(servers.values()) == {2}


def test_without_a_prompt_and_after_a_server_has_left_the_least_busy_server_is_taken() -> None:
    router, prompt = made(2), [*range(200)]
    first, _ = router.acquire_server("a", prompt_ids=prompt)
    assert router.acquire_server("no prompt")[0] != first
    router.remove_servers([first])
    assert router.acquire_server("a", prompt_ids=prompt)[0] == router.acquire_server("b", prompt_ids=prompt)[0] != first
    router.remove_servers(router.get_all_servers())
    with pytest.raises(RuntimeError, match="No available servers"):
        router.acquire_server("c", prompt_ids=prompt)


def test_verl_finds_it_by_the_file_of_the_configuration() -> None:
    config = resolve("starter", trainer="verl", model="starter")
    file = Path(flat_config(config)[PATH])
    assert _resolve_router_class(OmegaConf.load(file).router_class) is PrefixRouter
    fixed = resolve(
        "starter", trainer="verl", model="starter", verl={"actor_rollout_ref.rollout.full_determinism": True}
    )
    assert PATH not in flat_config(fixed)
    own = resolve("starter", trainer="verl", model="starter", verl={PATH: None})
    assert flat_config(own)[PATH] is None
