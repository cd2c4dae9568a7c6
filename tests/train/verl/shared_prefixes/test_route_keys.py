"""The rollouts of a group have one server, and all servers about the same number of rollouts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from groundwire.train.verl.shared_prefixes.prefixes import RouteKeys, rollouts_together


class _Balancer:
    """Chooses a server as verl's ``GlobalRequestLoadBalancer`` does."""

    def __init__(self, servers: int) -> None:
        self.requests = dict.fromkeys(range(servers), 0)
        self._chosen: dict[str, int] = {}

    def server(self, key: str) -> int:
        chosen = self._chosen.setdefault(key, min(self.requests, key=self.requests.__getitem__))
        self.requests[chosen] += 1
        return chosen


@pytest.mark.parametrize("servers", [1, 2, 8])
@pytest.mark.parametrize(("groups", "group_size"), [(64, 8), (128, 8), (12, 8), (4, 16), (1, 64)])
def test_every_server_gets_its_share_of_a_step(servers: int, groups: int, group_size: int) -> None:
    affinity, balancer = RouteKeys(rollouts_together(groups, group_size, servers)), _Balancer(servers)
    rng = random.Random(0)
    for step in range(3):  # of the same questions
        before = Counter(balancer.requests)
        rollouts = [(group, f"{step}-{group}-{number}") for group in range(groups) for number in range(group_size)]
        arrivals = {session: place + rng.uniform(0, 32) for place, (_, session) in enumerate(rollouts)}
        for group, session in sorted(rollouts, key=lambda rollout: arrivals[rollout[1]]):
            balancer.server(affinity.key(session, (group,)))
        share = Counter(balancer.requests)
        share.subtract(before)
        assert max(share.values()) <= 1.1 * groups * group_size / servers


def test_a_group_has_one_server_and_a_rollout_stays_there() -> None:
    affinity, balancer = RouteKeys(rollouts_together(64, 8, 2)), _Balancer(2)
    for step in range(2):
        servers = defaultdict[int, set[int]](set)
        for group in range(64):
            for number in range(8):
                session = f"{step}-{group}-{number}"
                for prompt in ((group,), (group, number), (number,)):
                    servers[group].add(balancer.server(affinity.key(session, prompt)))
        assert {len(each) for each in servers.values()} == {1}
    assert balancer.requests == {0: 64 * 8 * 3, 1: 64 * 8 * 3}


def test_without_other_servers_a_rollout_has_a_key_of_its_own_or_shares_it_with_its_group() -> None:
    affinity = RouteKeys(1)
    assert len({affinity.key(f"{number}", (1, 2)) for number in range(10)}) == 10
    assert affinity.key("0", (9,)) == affinity.key("0", (1, 2))
