"""A map of where reading a context wins, where computing it does, and what a mixture gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from hetero.contexts.codec import CHUNK_TOKENS, RAW, ChunkCodec
from hetero.contexts.load_plan import Rates, plan_load
from hetero.contexts.prompt_times import PredictedTimes, predict_prompts
from hetero.models import model_spec
from hetero.models.random_models import known_config
from hetero.profiler.records import DeviceProfile
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.solution import Scenario

CALL = 512  # tokens of a prompt's calls
PROMPT = 32  # tokens behind the context
DECODE_BYTES_PER_S = 5e9  # floats into the cache
RUN_S, READ_CHUNK_S = 1e-3, 1e-4  # of a run of tokens to compute, and of a chunk besides its bytes


def prompt_seconds(model: str, profile: str) -> Callable[[int, int], float]:
    """Return predicted seconds of a prompt after so many tokens, in calls of `CALL`."""
    planner = Planner(model_spec(model), DeviceProfile.load(profile), PlannerSettings())

    @cache
    def call_s(tokens: int, before: int) -> float:
        return planner.solve(Scenario("prefill", tokens, before or None)).seconds

    def seconds(tokens: int, before: int) -> float:
        starts = range(0, tokens, CALL)
        return sum(call_s(min(CALL, tokens - at), before + at) for at in starts)

    return seconds


def rows(
    model: str,
    profile: str,
    disks: Sequence[float],
    lengths: Sequence[int],
    bits: int,
    cipher_bytes_per_s: float,
) -> Iterator[list[object]]:
    """Yield for each length of a context what is computed, and what that gains over reading all.

    `cipher_bytes_per_s` is how fast chunks are deciphered, 0 where they are not encrypted.
    """
    config = known_config(model)
    layout = CacheLayout(
        layers=len(config.cached_layers), kv_heads=config.kv_heads, capacity=max(lengths) + 64,
        head_dim=config.head_dim,
    )  # fmt: skip
    codec = ChunkCodec(layout)
    prefill_s = PredictedTimes(
        [(int(m), int(n), s) for m, n, s in predict_prompts(prompt_seconds(model, profile), 4096)]
    )
    chunk_bytes = codec.nbytes(CHUNK_TOKENS, bits)
    work_s = codec.nbytes(CHUNK_TOKENS, RAW) / DECODE_BYTES_PER_S
    for length in lengths:
        cells = []
        for disk in disks:
            speed = 1 / (1 / disk + (1 / cipher_bytes_per_s if cipher_bytes_per_s else 0))
            rates = Rates(
                prefill_s=prefill_s, read_bytes_per_s=speed, read_latency_s=1e-3,
                read_chunk_s=READ_CHUNK_S, chunk_s={bits: work_s}, run_s=RUN_S,
            )  # fmt: skip
            item = rates.load_item(CHUNK_TOKENS, bits, chunk_bytes)
            items = [item] * (length // CHUNK_TOKENS)
            best, read = (
                plan_load(items, PROMPT, rates, layout.layers, recompute=x) for x in (True, False)
            )
            computed = 1 - sum(best.load) / len(items)
            cells.append(f"{computed:.0%}, {read.predicted_s / best.predicted_s:.2f}")
        even = rates.break_even_bytes_per_s(chunk_bytes / CHUNK_TOKENS, CALL) / 1e6
        yield [profile, model, length, f"{even:.0f}", *cells]
