"""The cost of tracing a call: our proxy and Agent Lightning's own (LiteLLM).

Upstream, proxies and store are separate processes; the calls come from this one. "memory" is a store in the proxy's
process, "http" is Agent Lightning's store server; with it, its proxy runs in its default mode, as another process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._results import record
from benchmarks.tracing._setup import Load, Process, load, started

CLIENTS = (1, 16, 64)
APIS = ("responses", "messages")
WARM_UP_CALLS = 16
SECONDS = 1.5
_THEIRS = "Agent Lightning's LLMProxy"


def main() -> None:
    """Print the table."""
    with started("upstream") as upstream, started("store") as store:
        url = upstream.ready["url"]
        print(f"{'':22}" + "".join(f"{f'c={c}: calls/s':>16}{'median ms':>11}" for c in CLIENTS), end="")
        print(f"{'CPU ms':>9}{'spans':>7}{'kB':>6}   (CPU, spans and bytes are per call)")
        direct = [load([url], clients=clients, seconds=SECONDS) for clients in CLIENTS]
        _print_row("direct", direct, "")
        for kind, store_url in (("memory", ""), ("http", store.ready["url"])):
            loads, others = {}, {}
            for which in ("ours", "theirs"):
                with started("proxy", which, url, store_url) as proxy:
                    loads[which] = _measure(f"{which}, {kind} store", proxy)
                    if kind == "memory":
                        others |= {(api, which): _measure_api(f"{which}, {api}", proxy, api) for api in APIS}
            for api in APIS if others else ():
                _record_api(api, direct[0], others[api, "ours"], others[api, "theirs"])
            for clients, ours, theirs in zip(CLIENTS, loads["ours"], loads["theirs"], strict=True):
                figure = f"proxy, {kind} store, {clients} clients"
                record(figure, ours.per_s, unit="calls/s", against=_THEIRS, theirs=theirs.per_s)
            added_ms, their_ms = (loads[which][0].median_ms - direct[0].median_ms for which in ("ours", "theirs"))
            figure = f"time that the proxy adds to a call, {kind} store"
            record(figure, added_ms, unit="ms", against=_THEIRS, theirs=their_ms, less_is_better=True)
            figure = f"proxy and no proxy, {kind} store, {CLIENTS[1]} clients"
            record(figure, loads["ours"][1].per_s, unit="calls/s", against="no proxy", theirs=direct[1].per_s)


def _measure(name: str, proxy: Process) -> list[Load]:
    urls, key = proxy.ready["urls"], proxy.ready["key"]
    warm = load(urls, key=key, clients=1, seconds=60.0, at_most=WARM_UP_CALLS)
    with tempfile.TemporaryDirectory() as folder:
        stored = proxy.ask(str(Path(folder) / "spans"))
    cpu_s = proxy.cpu_s()
    loads = [load(urls, key=key, clients=clients, seconds=SECONDS) for clients in CLIENTS]
    cpu_ms = 1000 * (proxy.cpu_s() - cpu_s) / sum(each.calls for each in loads)
    kilobytes = stored["bytes"] / warm.calls / 1e3
    _print_row(name, loads, f"{cpu_ms:9.2f}{stored['spans'] / warm.calls:7.1f}{kilobytes:6.1f}")
    return loads


def _measure_api(name: str, proxy: Process, api: str) -> list[Load]:
    urls, key = proxy.ready["urls"], proxy.ready["key"]
    load(urls, key=key, clients=1, seconds=60.0, at_most=WARM_UP_CALLS, api=api)
    loads = [load(urls, key=key, clients=clients, seconds=SECONDS, api=api) for clients in CLIENTS[:2]]
    _print_row(name, loads, "")
    return loads


def _record_api(api: str, direct: Load, ours: list[Load], theirs: list[Load]) -> None:
    """The policy server has chat completions only, so the proxy's own time includes the translation."""
    figure = f"proxy, {api}, {CLIENTS[1]} clients"
    record(figure, ours[1].per_s, unit="calls/s", against=_THEIRS, theirs=theirs[1].per_s)
    added_ms, their_ms = ours[0].median_ms - direct.median_ms, theirs[0].median_ms - direct.median_ms
    figure = f"time that the proxy adds to a call, {api}"
    record(figure, added_ms, unit="ms", against=_THEIRS, theirs=their_ms, less_is_better=True)


def _print_row(name: str, loads: list[Load], rest: str) -> None:
    failed = sum(each.failed for each in loads)
    cells = "".join(f"{each.per_s:16.1f}{each.median_ms:11.2f}" for each in loads)
    print(f"{name:22}{cells}{rest}" + (f"   {failed} calls failed" if failed else ""), flush=True)


if __name__ == "__main__":
    main()
