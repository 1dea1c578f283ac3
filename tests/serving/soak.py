"""A day of a server, as fast as it goes: `python -m tests.serving.soak [ROUNDS]`.

A round is what a few people do in some minutes: chats that go on, conversations made and deleted,
completions side by side, streams that are left, bodies that are refused, a slot saved and erased,
metrics. After a warm-up, memory and descriptors of both processes must stay as they are. A day of
one round every five minutes is 288 rounds.
"""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.serving.servers import Server, serving

MAX_GROWN: dict[str, float] = {"MiB": 24.0, "descriptors": 4.0}  # medians, first to last quarter


def processes(server: Server) -> list[int]:
    """The HTTP process, and the engine that it started."""
    own = server.process.pid
    return [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]


def held(server: Server) -> dict[str, float]:
    """Resident memory and open descriptors of both."""
    nbytes = descriptors = 0
    for pid in processes(server):
        status = Path(f"/proc/{pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        nbytes += int(line.split()[1]) << 10
        descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"MiB": nbytes / 2**20, "descriptors": float(descriptors)}


def ask(client: httpx.Client, path: str, body: Any, status: int = 200) -> Any:
    """The answer, which has this status."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, (path, answer.status_code, answer.text[:300])
    return answer.json()


def one_round(server: Server, number: int) -> None:
    """What a few people do."""
    with server.client("notes") as notes, server.client("mail") as mail:
        name = ask(notes, "/v1/conversations", {})["id"]
        for text in (f"Story {number}", "And then?"):
            body = {"input": text, "conversation": name, "max_output_tokens": 12}
            ask(notes, "/v1/responses", body)
        said = [{"role": "user", "content": f"Round {number}"}]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            body = {"messages": said, "max_tokens": 16}
            list(pool.map(lambda c: ask(c, "/v1/chat/completions", body), (notes, mail, mail)))
        long = {"prompt": f"Once {number}", "max_tokens": 200, "stream": True}
        with mail.stream("POST", "/v1/completions", json=long) as got:
            next(got.iter_lines())  # and goes
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False
        body = {"prompt": "x", "guided_json": schema, "max_tokens": 20}
        json.loads(ask(mail, "/v1/completions", body)["choices"][0]["text"])
        ask(mail, "/v1/completions", {"prompt": [10**6]}, 400)
        assert mail.post("/v1/completions", content=b"x" * (5 << 20)).status_code == 413
        assert mail.get("/v1/responses/resp_0").status_code == 404
        ask(mail, "/slots/0?action=save", {"filename": "kept"})
        ask(mail, "/slots/0?action=erase", {})
        assert notes.delete(f"/v1/conversations/{name}").status_code == 200
        assert notes.get("/metrics").status_code == 200


def main() -> None:
    """Print what is held; fail where it grows."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 288
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        start_s = time.monotonic()
        for number in range(rounds):
            one_round(server, number)
            found.append(held(server))
            if number % max(rounds // 12, 1) == 0:
                print(number, {k: round(v, 1) for k, v in found[-1].items()}, flush=True)
        took_s = time.monotonic() - start_s
    warm = found[rounds // 4 :]
    quarter = max(len(warm) // 4, 1)
    for what, most in MAX_GROWN.items():
        first, last = (
            statistics.median(x[what] for x in part) for part in (warm[:quarter], warm[-quarter:])
        )
        print(f"{what}: {first:.1f}, at the end {last:.1f}")
        assert last - first <= most, what
    print(f"{rounds} rounds in {took_s:.0f} s, measured")


if __name__ == "__main__":
    main()
