"""Switching between contexts: LLMS and what its paper compares it with, on the paper's traces.

python bench/contexts.py simulate       # 72 hours on a virtual clock; all of it is simulated
python bench/contexts.py figures 10     # 2, 10, 11, 14, 15b, with the paper's numbers
python bench/contexts.py planning       # how long it takes to choose what is read, what computed
python bench/contexts.py restoring      # where reading a context wins, and where computing it does
python bench/contexts.py measure        # 60 calls of the demo model, beside the same on that clock
python bench/contexts.py trace -c 8 --pattern markov        # as JSON lines; the header says all

Latency is what a call's first token comes later than with the context in place. "Break-even" is the
speed of a disk from which on reading keys and values is faster than computing them.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import finish, integers, new_app, table, timed
from lab.forecasts import ForecastService, learned, oracle, recency
from lab.managers import HETERO, MANAGERS, Manager, contenders
from lab.preparing import preparing
from lab.simulated import Call, Machine, SimulatedService, most_tokens, simulated_codec
from lab.slow_disk import slow_disk
from parts import context_figures
from parts import restoring as restoring_map

from hetero.arguments import check_one_of
from hetero.contexts.codec import CHUNK_TOKENS, HALF, MIXED, NESTED, RAW, ChunkCodec
from hetero.contexts.load_plan import Rates, plan_load
from hetero.contexts.service import AppContext, Service
from hetero.generation.llm import LLM
from hetero.runtime.kv.kv_cache import CacheLayout

app = new_app(__doc__)
HOURS, CALLS_PER_HOUR, WINDOW = 72, 12, 4096
PATTERNS = ("random", "markov", "gaussian")
# Tokens that a call adds (table 3), in thousands.
GROWTH = {"AGnews": (0.2, 0.5), "XSum": (1, 2), "SAMSum": (0.1, 0.3), "CNN/DailyMail": (0.5, 1),
          "WMT17": (0.1, 0.5), "SST-2": (0.01, 0.1)}  # fmt: skip
ANSWER = 0.25  # of what a call adds
LLAMA = CacheLayout(layers=16, kv_heads=8, capacity=WINDOW, head_dim=64)  # Llama-3.2-1B
DISKS = {"phone, 0.735 GB/s": 0.735e9, "NVMe, 2 GB/s": 2e9, "hard disk, 0.1 GB/s": 0.1e9}
STORIES = Path(__file__).parents[1] / "docs/demo-model/samples.md"


def measure_encoding(codec: ChunkCodec) -> float:
    """Return bytes of codes a second that are encoded."""
    shape = codec.layers, 2, codec.heads, 16, codec.size
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    start_s = time.perf_counter()
    nbytes = sum(codec.encode(values, 8).nbytes for _ in range(8))
    return nbytes / max(time.perf_counter() - start_s, 1e-9)


def header(
    pattern: str, contexts: int, window: int, seed: int, per_hour: float = CALLS_PER_HOUR
) -> dict[str, Any]:
    """Everything that a trace depends on."""
    return {"pattern": pattern, "contexts": contexts, "window": window, "seed": seed,
            "hours": HOURS, "calls per hour (Poisson)": per_hour, "growth": GROWTH,
            "growth scaled by": window / WINDOW, "answer": ANSWER,
            "markov": "p(r-th most recent) ~ 2^-r", "gaussian": "over contexts by growth, sd n/4",
            "full window": "the context begins anew; that call is not counted"}  # fmt: skip


def trace(about: dict[str, Any]) -> Iterator[Call]:
    """Equation 5: calls in their order."""
    random, count = np.random.default_rng(about["seed"]), about["contexts"]
    ranges = [list(GROWTH.values())[i % len(GROWTH)] for i in range(count)]
    by_growth = sorted(range(count), key=lambda i: sum(ranges[i]))
    recent, now_s = list(range(count)), 0.0
    while True:
        now_s += random.exponential(3600 / about["calls per hour (Poisson)"])
        if now_s > 3600 * HOURS:
            return
        if about["pattern"] == "markov":
            shares = 0.5 ** np.arange(1, count + 1)
            chosen = recent[random.choice(count, p=shares / shares.sum())]
        elif about["pattern"] == "gaussian":
            at = random.normal((count - 1) / 2, count / 4)
            chosen = by_growth[int(np.clip(round(at), 0, count - 1))]
        else:
            chosen = int(random.integers(count))
        recent.remove(chosen)
        recent.insert(0, chosen)
        grown = 1000 * random.uniform(*ranges[chosen]) * about["growth scaled by"]
        answer = max(1, round(ANSWER * grown))
        yield Call(now_s, chosen, max(1, round(grown) - answer), answer)


def bytes_of_all(calls: Sequence[Call], window: int, codec: ChunkCodec) -> int:
    """Most that keys and values of all contexts take at 16 bits, all at once."""
    return most_tokens(calls, window) * codec.nbytes(CHUNK_TOKENS, HALF) // CHUNK_TOKENS


def shown(latencies: Sequence[float]) -> str:
    return f"{1e3 * statistics.fmean(latencies):.2f}"


def simulated_rates(
    codec: ChunkCodec, disk_bytes_per_s: float, tokens_per_s: float, decode: float = 5e9
) -> Rates:
    """Rates of a machine by four numbers; `decode` is floats into the cache, bytes a second."""
    chunk_s = codec.nbytes(CHUNK_TOKENS, RAW) / decode
    return Rates(
        prefill_s=lambda m, _: 0.02 + m / tokens_per_s,
        read_bytes_per_s=disk_bytes_per_s,
        read_latency_s=0.01 if disk_bytes_per_s < 2e8 else 1e-4,
        read_chunk_s=1e-4,
        chunk_s=dict.fromkeys((*NESTED, HALF, RAW, MIXED), chunk_s),
        run_s=1e-3,
    )


@app.command("trace")
def show_trace(
    contexts: Annotated[int, typer.Option("-c")] = 8, pattern: str = "markov", seed: int = 0
) -> None:
    """A trace as JSON lines, the header first."""
    about = header(pattern, contexts, WINDOW, seed)
    print(json.dumps(about))
    for call in trace(about):
        print(json.dumps(vars(call)))


@app.command("simulate")
def simulate(
    contexts: Annotated[str, typer.Option("-c")] = "2,4,6,8,12,16",
    tokens_per_s: Annotated[float, typer.Option(help="of prompts")] = 600.0,
    without: str = "aot,lctru,compression,recompute",
    part: Annotated[float, typer.Option(help="budget, of all contexts' bytes at 16 bits")] = 0.25,
    hours: float = HOURS,
    decode: Annotated[float, typer.Option(help="floats into the cache, bytes/s")] = 5e9,
) -> None:
    """The whole sweep. A prompt takes 20 ms and what its tokens take; reading a chunk 0.1 ms and
    what its bytes take; writing is half as fast.
    """
    codec, rows, everything = simulated_codec(LLAMA), [], chain.from_iterable
    removed = [x for x in without.split(",") if x]
    for disk, speed in DISKS.items():
        rates = simulated_rates(codec, speed, tokens_per_s, decode)
        machine = Machine(rates=rates, write_bytes_per_s=speed / 2, encode_bytes_per_s=0.2e9)
        for count in integers(contexts):
            for name, manager in contenders(removed).items():
                cells = []
                for pattern in PATTERNS:
                    about = header(pattern, count, WINDOW, 0)
                    calls = [x for x in trace(about) if x.at_s < 3600 * hours]
                    budget = int(part * bytes_of_all(calls, WINDOW, codec))
                    service = SimulatedService(codec, machine, manager, budget)
                    cells.append(service.run(calls, WINDOW))
                even = rates.break_even_bytes_per_s(codec.nbytes(CHUNK_TOKENS, HALF) / CHUNK_TOKENS)
                rows.append([disk, count, name, *map(shown, cells), shown([*everything(cells)]),
                             f"{even / 1e6:.0f}"])  # fmt: skip
    print("simulated, Llama-3.2-1B; mean latency of a call, ms\n")
    table(f"disk|contexts|manager|{'|'.join(PATTERNS)}|mean|break-even at 16 bits, MB/s", rows)
    finish()


@app.command("next")
def next_context(
    contexts: Annotated[str, typer.Option("-c")] = "8",
    part: Annotated[float, typer.Option(help="budget, of all contexts' bytes at 16 bits")] = 0.125,
    hours: float = 10,
    tokens_per_s: float = 600.0,
) -> None:
    """Compare rules that forecast the next context: mean latencies of a call, ms."""
    codec, rows = simulated_codec(LLAMA), []
    for disk, speed in DISKS.items():
        rates = simulated_rates(codec, speed, tokens_per_s)
        machine = Machine(rates=rates, write_bytes_per_s=speed / 2, encode_bytes_per_s=0.2e9)
        for count, pattern in product(integers(contexts), PATTERNS):
            about = header(pattern, count, WINDOW, 0)
            calls = [x for x in trace(about) if x.at_s < 3600 * hours]
            budget = int(part * bytes_of_all(calls, WINDOW, codec))
            llms = MANAGERS["llms"]
            cells = [SimulatedService(codec, machine, x, budget).run(calls, WINDOW)
                     for x in (llms, llms.without("lctru"))]  # fmt: skip
            knows = partial(oracle, calls)
            for forecast, ahead in ((recency, True), (learned, False), (learned, True),
                                    (knows, False), (knows, True)):  # fmt: skip
                service = ForecastService(codec, machine, budget, forecast=forecast(), ahead=ahead)
                cells.append(service.run(calls, WINDOW))
            rows.append([disk, count, pattern, *map(shown, cells)])
    print("simulated, Llama-3.2-1B; mean latency of a call, ms\n")
    names = "lctru|lru|recency, read ahead|learned|learned, read ahead|oracle|oracle, read ahead"
    table(f"disk|contexts|pattern|{names}", rows)
    finish()


@app.command("planning")
def planning(runs: Annotated[int, typer.Option("-r")] = 50) -> None:
    """Time of choosing what is read and what is computed, of contexts of many chunks."""
    codec, rows = simulated_codec(LLAMA), []
    rates = simulated_rates(codec, DISKS["hard disk, 0.1 GB/s"], 600.0)
    for count in (64, 256, 1024, 4096):
        nbytes = codec.nbytes(CHUNK_TOKENS, 8)
        items = [rates.load_item(CHUNK_TOKENS, 8, nbytes * (1 + i % 3)) for i in range(count)]
        times = [
            timed(lambda x=items: plan_load(x, CHUNK_TOKENS, rates, LLAMA.layers))  # type: ignore[misc]
            for _ in range(runs)
        ]
        rows.append([count, f"{1e3 * statistics.median(times):.2f}", f"{1e3 * min(times):.2f}"])
    table("chunks|median, ms|fastest, ms", rows)
    finish()


@app.command("restoring")
def restoring(
    models: str = "llama-3.2-1b,qwen3-4b,llama-3-8b",
    profiles: str = "snapdragon-8-gen-3,snapdragon-8-elite-gen-5,host",
    disks: Annotated[str, typer.Option(help="MB/s")] = "50,100,200,735",
    lengths: Annotated[str, typer.Option(help="of contexts, in tokens")] = "512,2048,4096",
    bits: Annotated[int, typer.Option(help="of keys and values")] = 8,
    cipher: Annotated[float, typer.Option(help="deciphered bytes/s; 0: not encrypted")] = 0.0,
) -> None:
    """The part of a context that is computed again, and what that gains over reading all of it."""
    speeds, rows = integers(disks), list[list[object]]()
    for profile, model in product(profiles.split(","), models.split(",")):
        rows += restoring_map.rows(
            model, profile, [1e6 * x for x in speeds], integers(lengths), bits, cipher
        )
    print(f"simulated; {bits} bits, a prompt of {restoring_map.PROMPT} tokens; the part that is "
          "computed, times as fast as reading all\n")  # fmt: skip
    table(f"profile|model|tokens|break-even, MB/s|{'|'.join(f'{x} MB/s' for x in speeds)}", rows)
    finish()


@app.command("figures")
def figures(
    number: Annotated[str, typer.Argument(metavar="2|10|11|14|15b")],
    hours: float = HOURS,
    profile: Annotated[str, typer.Option(help="of figure 2")] = "snapdragon-8-gen-3",
) -> None:
    """A figure of the paper, of Llama-2-7B, with the paper's numbers; random switches."""

    def calls(contexts: int, window: int, per_hour: float) -> list[Call]:
        about = header("random", contexts, window, 0, per_hour)
        # As many calls, however far apart.
        until_s = 3600 * hours * CALLS_PER_HOUR / per_hour
        return [x for x in trace(about) if x.at_s < until_s]

    names, own = "|".join(MANAGERS), context_figures.Bench(calls)
    heads = {"2": "what|here|paper", "10": f"under|{names}|llms / best other|paper|ratio",
             "11": f"tokens|{names}|llms / best other|paper", "14": "tokens of a chunk|llms, ms",
             "15b": f"minutes between calls|{names}"}  # fmt: skip
    made = {"2": lambda: context_figures.figure_2(profile), "10": own.figure_10,
            "11": own.figure_11, "14": own.figure_14, "15b": own.figure_15b}  # fmt: skip
    check_one_of("figure", number, [*heads])
    print("simulated, but for sizes; Llama-2-7B, a disk of 2 GB/s, 179 tokens/s of prompts\n")
    table(heads[number], made[number]())
    finish()


@app.command("measure")
def measure(
    count: Annotated[int, typer.Option("-n", help="calls")] = 60,
    contexts: Annotated[int, typer.Option("-c")] = 8,
    pattern: str = "random",
    model: str = "demo",
    device: str = "npu",
    without: str = "",
    length: Annotated[int, typer.Option(help="of contexts, in tokens; 0: MODEL's")] = 0,
    part: Annotated[float, typer.Option(help="budget, of all contexts' bytes at 16 bits")] = 0.25,
    disk: Annotated[float, typer.Option(help="slowed down to it, bytes/s; 0: as it is")] = 0.0,
    answer: Annotated[int, typer.Option(help="most tokens, others are prompted; 0: any")] = 0,
) -> None:
    """Calls of a model, minutes apart by assumption (all is written, the files are not in the
    system's memory), and the same calls on the virtual clock with the rates that were measured.
    """
    rows = []
    with LLM(model, device=device, max_seq_len=length or None) as llm:
        about = header(pattern, contexts, llm.max_seq_len - 8, 0)
        calls = [shorter(call, answer) for call, _ in zip(trace(about), range(count), strict=False)]
        named = contenders([x for x in without.split(",") if x]) | {"hetero": HETERO}
        trial = Trial(llm, calls, about["window"], part, disk)
        for name, manager in named.items():
            with tempfile.TemporaryDirectory() as folder:
                done, latencies, service = trial.run(manager, Path(folder))
                codec, rates = service._codec, service._working.rates
                machine = Machine(rates=rates, write_bytes_per_s=rates.read_bytes_per_s,
                                  encode_bytes_per_s=measure_encoding(codec))  # fmt: skip
                twin = SimulatedService(codec, machine, manager, service.memory.budget.limit
                                        - codec.workspace_bytes)  # fmt: skip
                expected = twin.run(done, about["window"])
                even = rates.break_even_bytes_per_s(codec.nbytes(CHUNK_TOKENS, 8) / CHUNK_TOKENS)
            ratio = statistics.fmean(expected) / statistics.fmean(latencies)
            simulated = ["", ""] if manager.read_ahead else [shown(expected), f"{ratio:.2f}"]
            parts = (f"{1e3 * np.percentile(latencies, x):.2f}" for x in (50, 99))
            rows.append([name, shown(latencies), *parts, *simulated, f"{even / 1e6:.0f}",
                         f"{rates.read_bytes_per_s / 1e6:.0f}"])  # fmt: skip
    slowed = f", a disk slowed down to {disk / 1e6:.0f} MB/s" if disk else ""
    print(f"measured and simulated; {model}, {pattern}, {contexts} contexts of {about['window']} "
          f"tokens, {count} calls, {part:.3f} of the bytes at 16 bits{slowed}; ms\n")  # fmt: skip
    head = "manager|mean|median|p99|simulated mean|ratio|break-even at 8 bits, MB/s|disk, MB/s"
    table(head, rows)
    finish()


def shorter(call: Call, most: int) -> Call:
    """The same call with an answer of at most so many tokens, if any; the prompt has the rest."""
    answer = min(call.answer, most) if most else call.answer
    return Call(call.at_s, call.context, call.prompt + call.answer - answer, answer)


class Trial:
    """The same calls of a model, by one manager after another."""

    def __init__(
        self, llm: LLM, calls: Sequence[Call], window: int, part: float, disk: float
    ) -> None:
        self.llm, self.calls, self.window, self.part, self.disk = llm, calls, window, part, disk
        self._in_place_s = dict[tuple[int, int], float]()

    def run(self, manager: Manager, folder: Path) -> tuple[list[Call], list[float], Service]:
        """The calls as they were (answers may end early), and their latencies."""
        llm, window = self.llm, self.window
        story, contexts = llm.encode(STORIES.read_text("utf-8")), dict[int, AppContext]()
        done, later = list[Call](), list[tuple[bool, float, float]]()
        opened = Service(llm, directory=folder, contexts_per_app=99, **manager.options())
        # The disk is slow once the rates are measured: those of chunks do without their bytes.
        with opened as service, slow_disk(self.disk), preparing() as prepared:
            codec, working = service._codec, service._working
            if self.disk:
                working.rates = replace(working.rates, read_bytes_per_s=self.disk)
            whole = bytes_of_all(self.calls, window, codec)
            service.memory.budget.limit = codec.workspace_bytes + int(whole * self.part)
            bound, at = service.bind("bench"), 0
            for call in self.calls:
                context = contexts.get(call.context) or bound.new_context(chat=False)
                words = llm.model.tokenizer.decode(story[at : at + call.prompt])
                at = (at + call.prompt) % (len(story) - window)
                prompt = llm.encode(words)
                if len(context) + len(prompt) + call.answer > window:
                    context.delete()
                    context = bound.new_context(chat=False)
                contexts[call.context], before = context, len(context)
                service.swap.drain()
                if service.ahead is not None and not service.ahead.wait(600):
                    raise SystemExit("reading ahead has not ended within 600 s")
                for path in folder.glob("apps/*/*.kv"):
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                ready_s = self.in_place_s(context.tokens, prompt)
                start_s, before_s, first_s = time.perf_counter(), prepared.seconds, 0.0
                for _ in context.stream(words, max_tokens=call.answer):
                    now_s = time.perf_counter() - start_s
                    first_s = first_s or now_s - (prepared.seconds - before_s)
                switch = context.last_switch
                if before and switch is not None:
                    loads = bool(switch.loaded_tokens or switch.recomputed_tokens)
                    later.append((loads, first_s - ready_s, switch.switch_s))
                answered = len(context) - before - len(prompt)
                done.append(Call(call.at_s, call.context, len(prompt), answered))
            # A call of a service takes longer than one of a model, whatever is loaded. A prompt's
            # own time varies more than a switch takes for which nothing is loaded.
            in_place = [later_s for loads, later_s, _ in later if not loads]
            usual_s = statistics.median(in_place) if in_place else 0.0
            latencies = [
                later_s - usual_s if loads else switch_s for loads, later_s, switch_s in later
            ]
            return done, latencies, service

    def in_place_s(self, before: Sequence[int], prompt: Sequence[int]) -> float:
        """Return the seconds to the first token of a prompt behind a text that is in the cache.

        The median of three runs after the one that prepares steps of its length, which does not
        count in calls either. Measured once for each pair of lengths.
        """
        lengths, llm = (len(before), len(prompt)), self.llm
        if lengths in self._in_place_s:
            return self._in_place_s[lengths]
        with llm.new_context() as context:
            if before:
                llm.engine.prefill(context, before)
            times, text = list[float](), [*before, *prompt]
            for _ in range(4):
                context.truncate(max(len(before) - 1, 0))  # an answer's last token was not read
                start_s = time.perf_counter()
                with llm.stream(text, context=context, reuse=True, max_tokens=1) as answer:
                    for _ in answer:
                        break
                times.append(time.perf_counter() - start_s)
            self._in_place_s[lengths] = statistics.median(times[1:])
        return self._in_place_s[lengths]


if __name__ == "__main__":
    app()
