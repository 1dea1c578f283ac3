"""What HTTP costs: `python -m tests.serving.speed [ROUNDS] [DEVICE] [MODEL]`. A library's service
and the server take turns on one machine, a round each; ratios mean something, times only beside
each other.

The first token's time is compared for the same call: the second one of a text whose beginning is in
the cache, asked of a `Service` in this process and of the server that has one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hetero import Service
from hetero.contexts.recent import RecentTexts
from hetero.serving.grammars import GrammarConstraint, TokenBytes, json_grammar
from tests.serving.servers import serving

TOKENS = 100
PROMPT = list(range(100, 140))
CROWDS = (1, 2, 4, 8)
LENGTH = ("--max-seq-len", "512")
SCHEMA = json_grammar({"type": "array", "minItems": 99, "items": {"type": "string"}})
OPTIONS: dict[str, Any] = {"kv_bits": "8", "max_seq_len": 512}


class Taken(NamedTuple):
    """Seconds to the first token, and from there to the last."""

    first_s: float
    rest_s: float


def prompt_of(i: int) -> list[int]:
    """One that begins as no other does."""
    return [300 + i % 1500, 20 + i % 70, *PROMPT]


def timed(start: Callable[[], Iterator[object]]) -> Taken:
    """What an iterator of tokens takes."""
    start_s, times = time.perf_counter(), list[float]()
    for _ in start():
        times.append(time.perf_counter())
    assert len(times) > 0.9 * TOKENS, len(times)
    return Taken(times[0] - start_s, times[-1] - times[0])


def library(recent: RecentTexts, prompt: list[int], constraint: Any = None) -> Taken:
    """An answer of a service in this process."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "logit_bias": {1: -100.0}}
    options["constraint"] = constraint

    def pieces() -> Iterator[object]:
        at = recent.choose(prompt)
        found = recent.stream(at, prompt, [], **options)
        return (piece for piece in found if piece is not None and piece.text)

    return timed(pieces)


def over_http(client: httpx.Client, prompt: list[int]) -> Taken:
    """The same through the server."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    asked |= {"logit_bias": {"1": -100}}

    def events() -> Iterator[object]:
        with client.stream("POST", "/v1/completions", json=asked) as got:
            for line in got.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    yield line

    return timed(events)


def together(clients: list[httpx.Client], first: int) -> float:
    """Tokens/s of several clients that ask at the same time, while all of them decode."""
    found: list[tuple[float, float]] = []

    def one(client: httpx.Client, prompt: list[int]) -> None:
        taken = over_http(client, prompt)
        found.append((end_s := time.perf_counter(), end_s - taken.rest_s))

    threads = [
        threading.Thread(target=one, args=(client, prompt_of(first + i)))
        for i, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends, starts = zip(*found, strict=True)
    return len(clients) * (TOKENS - 1) / (max(ends) - min(starts))


def median(values: list[float]) -> str:
    """With its quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    device = sys.argv[2] if len(sys.argv) > 2 else "npu"
    model = sys.argv[3] if len(sys.argv) > 3 else "demo"
    added, shares, firsts, rates, guided = [], [], [], [], []
    gains: dict[int, list[float]] = {count: [] for count in CROWDS[1:]}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "server", "--device", device, *LENGTH, model=model) as server,
        Service(model, directory=Path(folder) / "library", device=device, **OPTIONS) as service,
    ):
        recent = RecentTexts(service.bind("notes"), 8)
        clients = [server.client(app) for app in ("notes", "mail") * 4]
        known = TokenBytes(service.llm.model)
        known.check(SCHEMA)
        for i in range(rounds + 2):
            prompt = prompt_of(i)
            library(recent, prompt), over_http(clients[0], prompt)
            own, http = library(recent, prompt), over_http(clients[0], prompt)
            constraint = GrammarConstraint(known, SCHEMA, service.llm.model.config.vocab_size)
            guided.append(own.rest_s / library(recent, prompt, constraint).rest_s)
            speeds = {n: together(clients[:n], 1000 * n + 20 * i) for n in CROWDS}
            if i >= 2:
                added.append((http.first_s - own.first_s) * 1e3)
                shares.append(own.rest_s / http.rest_s)
                firsts.append(own.first_s * 1e3)
                rates.append((TOKENS - 1) / own.rest_s)
                for count, values in gains.items():
                    values.append(speeds[count] / speeds[1])
    print(f"{rounds} rounds of {model} on {device}, measured in turns; medians (quartiles)")
    print(f"library: first token {median(firsts)} ms, decode {median(rates)} tokens/s")
    print(f"first token, of a text that is in the cache: + {median(added)} ms over HTTP")
    print(f"decode over HTTP: × {median(shares)} of the library's")
    print(f"decode that obeys a JSON schema: × {median(guided[2:])} of free decode, in the library")
    for count, values in gains.items():
        print(f"{count} clients together: × {median(values)} of one's tokens/s")


if __name__ == "__main__":
    main()
