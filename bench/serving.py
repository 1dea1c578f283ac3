"""Measure the cost of HTTP: a server and the library's service take turns on one machine.

python bench/serving.py demo --device gpu -r 15
python bench/serving.py random:qwen2.5-0.5b --device gpu -r 5

Ratios mean something, times only within a run. The first token's time is compared for the same
call: the second one of a text whose beginning is in the cache. "parser" is what taking an answer
with a thought and calls apart adds to a token, as a share of the time in which one is decoded.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from common import Rounds, Tokens, finish, one_command, spread, table

from hetero import Service
from hetero.contexts.recent import RecentTexts
from hetero.serving.answer_parser import AnswerForm, AnswerParser
from hetero.serving.grammars import GrammarConstraint, TokenBytes, json_grammar

PROMPT = list(range(100, 140))
CROWDS = (1, 2, 4, 8)
LENGTH = 512
SCHEMA = json_grammar({"type": "array", "minItems": 99, "items": {"type": "string"}})
START_S = 600.0  # of a server
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Paris", "days": [1, 2, 3]}}\n</tool_call>'
)
ANSWER = f"<think>\n{'Two cities. ' * 40}\n</think>\n\n{'I look there. ' * 40}{CALL}\n{CALL}"
PIECE = 4  # characters of a token


class Taken(NamedTuple):
    """When an answer was asked for, and when each of its tokens came."""

    start_s: float
    times: list[float]

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start_s

    @property
    def rest_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.times[-1] - self.times[0]


def prompt_of(i: int) -> list[int]:
    """One that begins as no other does."""
    return [300 + i % 1500, 20 + i % 70, *PROMPT]


def timed(start: Callable[[], Iterator[object]], tokens: int) -> Taken:
    """Return the seconds until an iterator's first token and those of the others."""
    start_s, times = time.perf_counter(), list[float]()
    for _ in start():
        times.append(time.perf_counter())
    assert len(times) > 0.9 * tokens, len(times)
    return Taken(start_s, times)


def library(recent: RecentTexts, prompt: list[int], tokens: int, constraint: Any = None) -> Taken:
    """An answer of a service in this process."""
    options: dict[str, Any] = {"max_tokens": tokens, "logit_bias": {1: -100.0}}
    options["constraint"] = constraint

    def deltas() -> Iterator[object]:
        at = recent.choose(prompt)
        found = recent.stream(at, prompt, [], **options)
        return (delta for delta in found if delta is not None and delta.text)

    return timed(deltas, tokens)


def over_http(client: httpx.Client, prompt: list[int], tokens: int) -> Taken:
    """The same through the server."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    asked |= {"logit_bias": {"1": -100}}

    def events() -> Iterator[object]:
        with client.stream("POST", "/v1/completions", json=asked) as got:
            for line in got.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    yield line

    return timed(events, tokens)


def together(clients: list[httpx.Client], first: int, tokens: int) -> tuple[float, float]:
    """Tokens/s of several clients that ask at the same time: while all of them decode, and of all.

    The second counts from the call to the last token, prompts included.
    """
    found: list[Taken] = []

    def one(client: httpx.Client, prompt: list[int]) -> None:
        found.append(over_http(client, prompt, tokens))

    threads = [
        threading.Thread(target=one, args=(client, prompt_of(first + i)))
        for i, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start_s, end_s = max(x.times[0] for x in found), min(x.times[-1] for x in found)
    decoded = sum(start_s < at <= end_s for x in found for at in x.times)
    whole_s = max(x.times[-1] for x in found) - min(x.start_s for x in found)
    return decoded / (end_s - start_s), sum(len(x.times) for x in found) / whole_s


def parsing_s() -> float:
    """Seconds that a token of an answer with a thought and calls takes to be taken apart."""
    form = AnswerForm(thoughts=(("<think>", "</think>"),))
    pieces = [ANSWER[i : i + PIECE] for i in range(0, len(ANSWER), PIECE)]
    parser = AnswerParser(form, {"look": {}}, closes="", bare=False)
    start_s = time.perf_counter()
    for i, piece in enumerate(pieces):
        parser.feed(piece, last=i == len(pieces) - 1)
    took_s = time.perf_counter() - start_s
    assert [part.kind for part in parser.parts] == ["thought", "text", "call", "call"]
    return took_s / len(pieces)


@contextmanager
def serving(model: str, device: str, folder: str, *options: str) -> Iterator[str]:
    """The address of a server in its own processes; `options` are of `hetero serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "serve",
        model,
        "--device",
        device,
        "--port",
        str(port),
        "--directory",
        folder,
        *options,
    ]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "hetero.start", *words],
        stdout=sys.stderr,
    )
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while process.poll() is None and time.monotonic() < give_up_s:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            raise SystemExit("the server did not start: see its message above")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def measure(
    recent: RecentTexts, clients: list[httpx.Client], rounds: int, tokens: int
) -> dict[str, list[float]]:
    """Each figure's values, of so many rounds after two that warm up."""
    model, values = recent.app.service.llm.model, defaultdict[str, list[float]](list)
    known = TokenBytes(model)
    ends = bool(model.eos_ids)  # a grammar needs one, random models may have none
    for i in range(-2, rounds):
        prompt = prompt_of(i)
        library(recent, prompt, tokens), over_http(clients[0], prompt, tokens)
        own, http = library(recent, prompt, tokens), over_http(clients[0], prompt, tokens)
        if ends:
            constraint = GrammarConstraint(known, SCHEMA, model.config.vocab_size)
            guided = library(recent, prompt, tokens, constraint)
        speeds = {n: together(clients[:n], 1000 * n + 20 * i, tokens) for n in CROWDS}
        if i < 0:
            continue
        token_s = own.rest_s / (tokens - 1)
        values["library: first token, ms"].append(own.first_s * 1e3)
        values["library: decode, tokens/s"].append(1 / token_s)
        values["first token over HTTP, + ms"].append((http.first_s - own.first_s) * 1e3)
        values["decode over HTTP / library's"].append(own.rest_s / http.rest_s)
        if ends:
            values["decode under a JSON schema / free"].append(own.rest_s / guided.rest_s)
        values["parser / decode, %"].append(100 * parsing_s() / token_s)
        for count in CROWDS[1:]:
            for k, what in enumerate(("decoding", "with prompts")):
                ratio = speeds[count][k] / speeds[1][k]
                values[f"{count} clients / one, tokens/s, {what}"].append(ratio)
    return values


def bench(
    model: Annotated[str, typer.Argument()] = "demo",
    device: Annotated[str, typer.Option(help="as of `hetero serve`")] = "npu",
    tokens: Tokens = 100,
    rounds: Rounds = 15,
) -> None:
    """Measure what HTTP adds to the library, and what several clients gain."""
    options: dict[str, Any] = {"kv_bits": "8", "max_seq_len": LENGTH, "device": device}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, device, f"{folder}/server", "--max-seq-len", str(LENGTH)) as url,
        Service(model, directory=Path(folder) / "library", **options) as service,
    ):
        recent = RecentTexts(service.bind("bench"), 8)
        clients = [httpx.Client(base_url=url, timeout=600) for _ in range(max(CROWDS))]
        values = measure(recent, clients, rounds, tokens)
    table("figure|median|least|most", ([name, *spread(each)] for name, each in values.items()))
    finish(f"{rounds} rounds of {model} on {device}, answers of {tokens} tokens, in turns")


app = one_command(bench)

if __name__ == "__main__":
    app()
