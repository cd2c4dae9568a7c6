"""The cost of tracing a call: our proxy and Agent Lightning's own (LiteLLM).

Upstream, proxies and store are separate processes; the calls come from this one. "memory" is a store in the proxy's
process, "http" is Agent Lightning's store server; with it, its proxy runs in its default mode, as another process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._results import record
from benchmarks.tracing._setup import Load, Process, load, started

CLIENTS = (1, 16, 64)
APIS = ("responses", "messages")
WARM_UP_CALLS = 16
SECONDS = 1.5
ROUNDS = 3
"""Each figure is the median of so many measurements; the two proxies take turns."""
_THEIRS = "Agent Lightning's LLMProxy"


def main() -> None:
    """Print the table."""
    print(f"{'':22}" + "".join(f"{f'c={c}: calls/s':>16}{'median ms':>11}" for c in CLIENTS), end="")
    print(f"{'CPU ms':>9}   (CPU is per call)")
    with started("upstream") as upstream:
        url = upstream.ready["url"]
        direct = [_median([load([url], clients=c, seconds=SECONDS) for _ in range(ROUNDS)]) for c in CLIENTS]
        _print_row("direct", direct, "")
        with _proxies(url) as proxies:
            _record_chat("memory", direct, _measure(proxies, "memory store", CLIENTS))
        for api in APIS:
            with _proxies(url) as proxies:
                _record_api(api, direct[0], _measure(proxies, api, CLIENTS[:2], api=api))
        with started("store") as our_store, started("store") as their_store:
            stores = {"ours": our_store.ready["url"], "theirs": their_store.ready["url"]}
            with _proxies(url, stores) as proxies:
                _record_chat("http", direct, _measure(proxies, "http store", CLIENTS))


@contextmanager
def _proxies(url: str, stores: Mapping[str, str] | None = None) -> Iterator[dict[str, Process]]:
    """Both proxies, with new stores: both get slower with what they have stored."""
    with ExitStack() as running:
        store = stores or {}
        yield {
            which: running.enter_context(started("proxy", which, url, store.get(which, "")))
            for which in ("ours", "theirs")
        }


def _measure(
    proxies: Mapping[str, Process], name: str, clients: Sequence[int], *, api: str = "chat/completions"
) -> dict[str, list[Load]]:
    """Load the proxies in turn. For each proxy and number of clients the median of the rounds."""
    loads: dict[str, list[Load]] = {which: [] for which in proxies}
    for which, proxy in proxies.items():
        _load(proxy, api, seconds=60.0, clients=1, at_most=WARM_UP_CALLS)
        with tempfile.TemporaryDirectory() as folder:
            stored = proxy.ask(str(Path(folder) / "spans"))
        counts = stored["spans"] / WARM_UP_CALLS, stored["bytes"] / WARM_UP_CALLS / 1e3
        print(f"{which}, {name}: {counts[0]:.1f} spans and {counts[1]:.1f} kB for a call", flush=True)
    for count in clients:
        rounds = [{which: _load(proxies[which], api, clients=count) for which in proxies} for _ in range(ROUNDS)]
        for which, found in loads.items():
            found.append(_median([each[which] for each in rounds]))
    for which, found in loads.items():
        cpu_ms = 1000 * sum(each.cpu_s for each in found) / sum(each.calls for each in found)
        missing = " " * 27 * (len(CLIENTS) - len(found))
        _print_row(f"{which}, {name}", found, f"{missing}{cpu_ms:9.2f}")
    return loads


def _load(proxy: Process, api: str, *, seconds: float = SECONDS, **options: Any) -> Load:
    before_s = proxy.cpu_s()
    measured = load(proxy.ready["urls"], key=proxy.ready["key"], seconds=seconds, api=api, **options)
    return replace(measured, cpu_s=proxy.cpu_s() - before_s)


def _median(rounds: list[Load]) -> Load:
    """The middle one by calls per second, with all failures."""
    middle = sorted(rounds, key=lambda each: each.per_s)[len(rounds) // 2]
    return replace(middle, failed=sum(each.failed for each in rounds))


def _record_chat(kind: str, direct: list[Load], loads: Mapping[str, list[Load]]) -> None:
    for clients, ours, theirs in zip(CLIENTS, loads["ours"], loads["theirs"], strict=True):
        figure = f"proxy, {kind} store, {clients} clients"
        record(figure, ours.per_s, unit="calls/s", against=_THEIRS, theirs=theirs.per_s)
    _record_added(f"{kind} store", direct[0], loads)
    figure = f"proxy and no proxy, {kind} store, {CLIENTS[1]} clients"
    record(figure, loads["ours"][1].per_s, unit="calls/s", against="no proxy", theirs=direct[1].per_s)


def _record_api(api: str, direct: Load, loads: Mapping[str, list[Load]]) -> None:
    """The policy server has chat completions only, so the proxy's own time includes the translation."""
    figure = f"proxy, {api}, {CLIENTS[1]} clients"
    record(figure, loads["ours"][1].per_s, unit="calls/s", against=_THEIRS, theirs=loads["theirs"][1].per_s)
    _record_added(api, direct, loads)


def _record_added(name: str, direct: Load, loads: Mapping[str, list[Load]]) -> None:
    added_ms, their_ms = (loads[which][0].median_ms - direct.median_ms for which in ("ours", "theirs"))
    figure = f"time that the proxy adds to a call, {name}"
    record(figure, added_ms, unit="ms", against=_THEIRS, theirs=their_ms, less_is_better=True)


def _print_row(name: str, loads: list[Load], rest: str) -> None:
    failed = sum(each.failed for each in loads)
    cells = "".join(f"{each.per_s:16.1f}{each.median_ms:11.2f}" for each in loads)
    print(f"{name:22}{cells}{rest}" + (f"   {failed} calls failed" if failed else ""), flush=True)


if __name__ == "__main__":
    main()
