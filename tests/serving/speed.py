"""What HTTP costs: `python -m tests.serving.speed [ROUNDS]`. Library and server take turns, a round
each, on one machine; ratios mean something, times only beside each other.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from hetero import LLM
from tests.serving.servers import serving

TOKENS = 100
PROMPT = list(range(100, 140))


def prompt_of(i: int) -> list[int]:
    """One that begins as no other does."""
    return [300 + i, *PROMPT]


def library(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and tokens/s after it."""
    start_s, times = time.perf_counter(), list[float]()
    for _ in llm.stream(prompt, max_tokens=TOKENS, logit_bias={1: -100.0}):
        times.append(time.perf_counter())
    return times[0] - start_s, (len(times) - 1) / (times[-1] - times[0])


def over_http(client: httpx.Client, prompt: list[int]) -> tuple[float, float]:
    """The same through the server."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    start_s, times = time.perf_counter(), list[float]()
    with client.stream("POST", "/v1/completions", json=asked | {"logit_bias": {"1": -100}}) as got:
        for line in got.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
    return times[0] - start_s, (TOKENS - 1) / (times[-1] - times[0])


def together(clients: list[httpx.Client], first: int) -> float:
    """Tokens/s of several clients that ask at the same time."""
    threads = [
        threading.Thread(target=over_http, args=(client, prompt_of(first + i)))
        for i, client in enumerate(clients)
    ]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(clients) * TOKENS / (time.perf_counter() - start_s)


def main() -> None:
    """Print medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    one, two, crowd = [], [], list[list[float]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder)) as server,
        LLM("demo", device="npu") as llm,
        server.client() as client,
        server.client("mail") as other,
    ):
        for i in range(rounds + 2):
            prompt = prompt_of(i)
            found = library(llm, prompt), over_http(client, prompt)
            speeds = [together(clients, 100 + 4 * i) for clients in ([client], [client, other])]
            if i >= 2:
                one.append(found[0])
                two.append(found[1])
                crowd.append(speeds)
    added = statistics.median(b[0] - a[0] for a, b in zip(one, two, strict=True))
    share = statistics.median(b[1] / a[1] for a, b in zip(one, two, strict=True))
    gain = statistics.median(b / a for a, b in crowd)
    print(f"{rounds} rounds, measured: first token + {added * 1e3:.1f} ms; decode × {share:.2f}")
    print(f"two clients together: × {gain:.2f} of one's tokens/s")


if __name__ == "__main__":
    main()
