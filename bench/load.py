"""Load a server with many clients: what is refused, mixed up or late.

python bench/load.py demo --device npu -r 5

Clients of three applications ask four APIs, half of them for streams, of which some are left after
a few events. Every whole answer is compared with that of the same call made alone (greedy, caches
of f32), and what was read of a stream that was left with its beginning. `/health` is asked all the
while by a caller of its own.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from common import Rounds, finish, one_command, table
from serving import serving

APPS = ("notes", "mail", "code")
STORY = "Once upon a time there was a little girl who had a red ball and a big dog"
TOKENS = 24
LEFT = 0.4  # of all calls
EVENTS = 3  # that are read of an answer that is left


class Api(NamedTuple):
    """Where to ask, what, and how to read an answer and a stream's event."""

    path: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[Any], str]
    delta: Callable[[Any], str]


def chat_body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


APIS = (
    Api(
        "/v1/completions",
        lambda text: {"prompt": text, "max_tokens": TOKENS},
        lambda got: got["choices"][0]["text"],
        lambda event: event["choices"][0]["text"] if event.get("choices") else "",
    ),
    Api(
        "/v1/chat/completions",
        chat_body,
        lambda got: got["choices"][0]["message"]["content"] or "",
        lambda event: (
            (event["choices"][0]["delta"].get("content") or "") if event.get("choices") else ""
        ),
    ),
    Api(
        "/v1/responses",
        lambda text: {"input": text, "max_output_tokens": TOKENS, "store": False},
        lambda got: "".join(
            part["text"]
            for item in got["output"]
            if item["type"] == "message"
            for part in item["content"]
        ),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    Api(
        "/v1/messages",
        lambda text: {"model": "hetero", **chat_body(text)},
        lambda got: "".join(x["text"] for x in got["content"] if x["type"] == "text"),
        lambda event: (
            event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
        ),
    ),
)


class Call(NamedTuple):
    """One call; `streams` and perhaps `leaves` after some events."""

    api: int
    prompt: str
    app: str
    streams: bool
    leaves: bool


class Outcome(NamedTuple):
    """The outcome of a call; `first_s` is the time to a stream's first text."""

    call: Call
    status: int
    text: str
    first_s: float | None
    whole_s: float


def ask(client: httpx.Client, call: Call) -> Outcome:
    """Make a call and read its answer, or the beginning of it."""
    api, start_s = APIS[call.api], time.perf_counter()
    body = {**api.body(call.prompt), "temperature": 0, "stream": call.streams}
    headers = {"Authorization": f"Bearer key-of-{call.app}"}
    if not call.streams:
        got = client.post(api.path, json=body, headers=headers)
        text = api.text(got.json()) if got.status_code == 200 else got.text
        return Outcome(call, got.status_code, text, None, time.perf_counter() - start_s)
    text, events, first_s = "", 0, None
    with client.stream("POST", api.path, json=body, headers=headers) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            if delta := api.delta(json.loads(line[6:])):
                first_s = first_s or time.perf_counter() - start_s
                text, events = text + delta, events + 1
            if call.leaves and events >= EVENTS:
                break
    return Outcome(call, stream.status_code, text, first_s, time.perf_counter() - start_s)


def calls(count: int, rng: random.Random) -> list[Call]:
    """So many calls, of a few dozen prompts."""
    words = STORY.split()
    prompts = [" ".join(words[i % 5 : i % 5 + 4 + i % 9]) for i in range(45)]
    made = []
    for _ in range(count):
        leaves = rng.random() < LEFT
        streams = leaves or rng.random() < 0.5
        made.append(
            Call(rng.randrange(len(APIS)), rng.choice(prompts), rng.choice(APPS), streams, leaves)
        )
    return made


def watched(url: str, ended: threading.Event, took: list[float]) -> None:
    """Ask `/health` until the end, and note how long each answer took."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while not ended.wait(0.02):
            start_s = time.perf_counter()
            assert client.get("/health").status_code == 200
            took.append(time.perf_counter() - start_s)


def quantiles(values: list[float], scale: float = 1.0) -> tuple[str, str, str]:
    """Cells: median, 99 %, most."""
    ordered = sorted(values)
    picked = (statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1])
    first, second, third = (f"{scale * value:.2f}" for value in picked)
    return first, second, third


def load(
    model: Annotated[str, typer.Argument()] = "demo",
    device: Annotated[str, typer.Option(help="as of `hetero serve`")] = "npu",
    clients: Annotated[int, typer.Option(help="at the same time")] = 32,
    count: Annotated[int, typer.Option(help="calls in a round")] = 200,
    rounds: Rounds = 5,
) -> None:
    """Measure a server that many clients ask at once."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        digests = {app: hashlib.sha256(f"key-of-{app}".encode()).hexdigest() for app in APPS}
        keys.write_text("".join(f"{app} {digest}\n" for app, digest in digests.items()))
        keys.chmod(0o600)
        options = ("--keys", str(keys), "--kv", "f32", "--alias", "hetero", "--queue", "256")
        with (
            serving(model, device, f"{folder}/server", *options) as url,
            httpx.Client(base_url=url, timeout=600) as client,
        ):
            alone, alone_s, outcomes = dict[tuple[int, str], str](), list[float](), []
            speeds, health, ended = list[float](), list[float](), threading.Event()
            made = [calls(count, random.Random(i)) for i in range(rounds)]
            for call in (call for part in made for call in part):
                if (key := (call.api, call.prompt)) not in alone:
                    got = ask(client, call._replace(streams=False, leaves=False))
                    assert got.status == 200, got
                    alone[key] = got.text
                    alone_s.append(got.whole_s)
            watcher = threading.Thread(target=watched, args=(url, ended, health))
            watcher.start()
            with ThreadPoolExecutor(clients) as pool:
                for part in made:
                    start_s = time.perf_counter()
                    came = list(pool.map(lambda call: ask(client, call), part))
                    whole = sum(not x.call.leaves for x in came)
                    speeds.append(whole / (time.perf_counter() - start_s))
                    outcomes += came
            ended.set()
            watcher.join()
    report(outcomes, alone, alone_s, speeds, health)
    finish(f"{rounds} rounds of {count} calls by {clients} clients: {model} on {device}, measured")


def report(
    outcomes: list[Outcome],
    alone: dict[tuple[int, str], str],
    alone_s: list[float],
    speeds: list[float],
    health: list[float],
) -> None:
    """Print what was counted, then what was timed."""
    answered = [x for x in outcomes if x.status == 200]
    whole = [x for x in answered if not x.call.leaves]
    left = [x for x in answered if x.call.leaves]
    same = sum(x.text == alone[x.call.api, x.call.prompt] for x in whole)
    begun = sum(alone[x.call.api, x.call.prompt].startswith(x.text) for x in left)
    table(
        "calls|count",
        [
            ["refused or failed", len(outcomes) - len(answered)],
            ["whole answers equal those made alone", f"{same} of {len(whole)}"],
            ["left answers are a beginning of those", f"{begun} of {len(left)}"],
            ["whole answers a second, medians of rounds", f"{statistics.median(speeds):.2f}"],
            ["the same one by one", f"{1 / statistics.median(alone_s):.2f}"],
        ],
    )
    print()
    firsts = [x.first_s for x in outcomes if x.first_s is not None]
    table(
        "times|median|99 %|most",
        [
            ["whole answer, s", *quantiles([x.whole_s for x in whole])],
            ["first text of a stream, s", *quantiles(firsts)],
            [f"/health, {len(health)} calls, ms", *quantiles(health, 1e3)],
        ],
    )


app = one_command(load)

if __name__ == "__main__":
    app()
