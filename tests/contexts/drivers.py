"""What must hold for contexts as a service, at length. Each command exits with 1 where it does not.

python -m tests.contexts.drivers operations --count 100000
python -m tests.contexts.drivers switches --count 10000
python -m tests.contexts.drivers restart --contexts 100
python -m tests.contexts.drivers first-token --tokens 4096
python -m tests.contexts.drivers speed --rounds 7
HETERO_KILLS=200 pytest tests/contexts/test_context_kills.py
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import finish, new_app, table
from hetero import LLM, Service
from tests.contexts.test_chunk_machine import Machine

app = new_app(__doc__)


def random_operations(count: int, seed: int) -> int:
    """So many operations of the chunk machine, on a new service every 500; how many were done."""
    chance, done = random.Random(seed), 0
    while done < count:
        machine: Any = Machine()
        machine.begin(
            bits=chance.choice([32, 8, 4, 2]),
            memory=chance.choice([3, 9, 40]),
            disk=chance.choice([0, 6, 30, 400]),
            policy=chance.choice(["lctru", "lctru-paper", "lru"]),
            recompute=chance.random() < 0.5,
            disk_s=chance.choice([150.0, 1e9]),
            run_s=chance.choice([None, 0.0, 1.0]),
            read_ahead=chance.random() < 0.5,
        )
        for _ in range(min(500, count - done)):
            operation(machine, chance)
            machine.accounts_are_right()
            done += 1
        machine.teardown()
    return done


def operation(machine: Any, chance: random.Random) -> None:
    """One, of a random kind. Raises `AssertionError` where something does not hold."""

    def tokens(least: int, most: int) -> list[int]:
        return [chance.randrange(4) for _ in range(chance.randint(least, most))]

    number = chance.randrange(100)
    kinds: dict[str, Callable[[], Any]] = {
        "call": lambda: machine.call(number, tokens(1, 40), tokens(0, 6)),
        "go_back": lambda: machine.go_back(number, chance.random(), tokens(1, 40)),
        "fork": lambda: machine.fork(number),
        "delete": lambda: machine.delete(number),
        "lower": lambda: machine.lower(number, chance.choice([8, 4, 2])),
        "press": lambda: machine.press(chance.random()),
        "damage": lambda: machine.damage(
            number, chance.random(), chance.choice(["bit", "cut", "gone"])
        ),
        "reopen": machine.reopen,
        "make_haste": machine.make_haste,
    }
    weights = {"call": 8, "go_back": 3, "press": 3, "damage": 1, "reopen": 1}
    if not machine.texts or chance.random() < 0.1:
        machine.new(app=chance.choice("ab"))
        return
    kind = chance.choices(list(kinds), [weights.get(kind, 2) for kind in kinds])[0]
    kinds[kind]()


@app.command("operations")
def operations(count: int = 100_000, seed: int = 0) -> None:
    """Random operations with a fake engine that knows every value: after each, accounts are
    compared with what is held; budgets, leaks, values and references.
    """
    start_s = time.monotonic()
    done = random_operations(count, seed)
    print(f"{done} operations, seed {seed}, {time.monotonic() - start_s:.0f} s: all held")
    finish()


def switches_between(llm: LLM, folder: Path, count: int, seed: int = 0) -> tuple[int, int, int]:
    """Random calls of two apps' contexts, in little memory; how many loaded something, and how many
    found keys and values that are not those that this very context had: to the bit where nothing
    was computed again, within what another order of sums makes where something was.
    """
    chance, loaded, exact, wrong = random.Random(seed), 0, 0, 0
    options: dict[str, Any] = {"kv_bits": "raw", "recompute": False, "context_memory": "2MiB"}
    with Service(llm, directory=folder, context_disk="64MiB", **options) as service:
        apps = {name: service.bind(name) for name in "ab"}
        kept: dict[Any, Any] = {}
        contexts = {(name, i): apps[name].new_context(chat=False) for name in "ab" for i in (0, 1)}
        for _ in range(count):
            key = name, number = chance.choice("ab"), chance.randrange(2)
            if len(contexts[key]) > 200:
                contexts[key].delete()
                contexts[key] = apps[name].new_context(chat=False)
                kept.pop(key)
            context = contexts[key]
            secret = "The code is " + " ".join(chance.choices(["fox", "hen", "owl", "bear"], k=4))
            context.call(f"{secret} {name}{number}", max_tokens=1)
            active = service._active
            if key in kept:
                before, switch = kept[key], context.last_switch
                assert switch is not None
                found = active.cache.read(0, before.shape[3])
                again = 1e-3 if switch.recomputed_tokens else 0.0
                wrong += not np.allclose(found, before, rtol=0, atol=again)
                exact += not switch.recomputed_tokens
                loaded += switch.loaded_tokens > 0
            kept[key] = active.cache.read(0, active.cached)
        service.swap.drain()
        service.memory.check()
    return loaded, exact, wrong


@app.command("switches")
def switches(count: int = 10_000, model: str = "demo", device: str = "npu") -> None:
    """Two apps with secrets in their texts: what is computed on is to the bit an app's own."""
    with LLM(model, device=device) as llm, tempfile.TemporaryDirectory() as folder:
        loaded, exact, wrong = switches_between(llm, Path(folder), count)
    table("calls|loaded|nothing computed again|wrong values", [[count, loaded, exact, wrong]])
    finish()
    sys.exit(wrong > 0 or loaded == 0)


@app.command("restart")
def restart(contexts: int = 100, model: str = "demo", device: str = "npu") -> None:
    """A folder of contexts is opened and its app bound, with an open model: at most a second."""
    options: dict[str, Any] = {"contexts_per_app": contexts, "context_disk": "2GiB"}
    times = []
    with LLM(model, device=device) as llm, tempfile.TemporaryDirectory() as folder:
        with Service(llm, directory=folder, **options) as service:
            bound = service.bind("a")
            for i in range(contexts):
                context = bound.new_context(chat=False)
                context.call(f"{i} Once upon a time there was a fox", max_tokens=120, seed=i)
        for _ in range(5):
            start_s = time.perf_counter()
            with Service(llm, directory=folder, **options) as service:
                assert len(service.bind("a").contexts()) == contexts
                times.append(time.perf_counter() - start_s)
    table("contexts|seconds, median|most", [[contexts, f"{statistics.median(times):.3f}",
                                             f"{max(times):.3f}"]])  # fmt: skip
    finish()
    sys.exit(statistics.median(times) > 1)


@app.command("first-token")
def first_token(
    tokens: int = 4096, model: str = "random:qwen2.5-0.5b", device: str = "npu", rounds: int = 2
) -> None:
    """A context that is on the disk alone, restored to the bit, beside prefilling it again: at
    least 20 times faster to the first token of 8 new ones, by medians of turns.
    """
    options: dict[str, Any] = {"kv_bits": "raw", "context_memory": "2GiB", "recompute": False}
    with (
        LLM(model, device=device, max_seq_len=tokens + 64) as llm,
        tempfile.TemporaryDirectory() as folder,
        Service(llm, directory=folder, **options) as service,
    ):
        context = service.bind("a").new_context(chat=False)
        text = np.random.default_rng(0).integers(10, 1000, tokens - 1).tolist()
        context._cached.tokens = context._log.text.tokens = text
        found: dict[str, list[float]] = {"again": [], "restored": []}
        exact: Any = None
        whole = [*text, *range(20, 28)]
        for turn in range(rounds + 1):
            if turn:  # the first finds nothing anywhere
                service._working.forget()
            service.memory.reclaim(service.memory.budget.used - service._codec.workspace_bytes)
            start_s = time.perf_counter()

            def run(_: Any) -> Any:
                yield service._prefill(whole[service._active.cached :])

            for _ in service._working.answering(context._cached, whole, run):
                found["restored" if turn else "again"].append(time.perf_counter() - start_s)
            values = service._active.cache.read(0, tokens - 1)
            assert exact is None or np.array_equal(values, exact), "restored to the bit"
            exact = values
            if not turn:
                service._working.tick()
                context._leave(next(iter(service._slots)))
                service.swap.drain()
        again, restored = (statistics.median(x) for x in found.values())
    table("tokens|prefilled again, s|restored, s|ratio",
          [[tokens, f"{again:.2f}", f"{restored:.3f}", f"{again / restored:.1f}"]])  # fmt: skip
    finish()
    sys.exit(again < 20 * restored)


@app.command("speed")
def speed(model: str = "demo", device: str = "npu", rounds: int = 7, kv_bits: str = "8") -> None:
    """Prompts and decoding with contexts as a service beside without, in turns (at least 0.95 x);
    and what a call's return waits for its swap-out (at most 1 ms).
    """
    prompt = "Once upon a time there was a fox who lived in a wood with a hen. " * 12
    ratios: dict[str, list[float]] = {"prompt": [], "decoding": []}
    returns = []
    with (
        LLM(model, device=device) as llm,
        tempfile.TemporaryDirectory() as folder,
        Service(llm, directory=folder, kv_bits=kv_bits) as service,  # type: ignore[arg-type]
    ):
        bound = service.bind("a")
        for turn in range(rounds + 1):
            with llm.new_context() as alone:
                first = llm.generate(prompt, context=alone, max_tokens=100).stats
            context = bound.new_context(chat=False)
            second = context.call(prompt, max_tokens=100).stats
            start_s = time.perf_counter()
            context._leave(next(iter(service._slots)))
            returns.append(time.perf_counter() - start_s)
            context.delete()
            if turn:
                ratios["prompt"].append(second.prefill_tokens_per_s / first.prefill_tokens_per_s)
                ratios["decoding"].append(second.decode_tokens_per_s / first.decode_tokens_per_s)
    medians = [statistics.median(x) for x in (*ratios.values(), returns)]
    table("prompt, x without|decoding, x without|return waits, ms",
          [[f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{1e3 * medians[2]:.2f}"]])  # fmt: skip
    finish()
    sys.exit(min(medians[:2]) < 0.95 or medians[2] > 1e-3)


if __name__ == "__main__":
    app()
