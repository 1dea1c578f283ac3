"""Plans for a MODEL on a PROFILE: what `hetero plan` and `hetero.plan` do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from hetero.arguments import check_one_of, parse_size
from hetero.backends.formats import DEFAULT_CACHE, CacheFormat
from hetero.errors import UserError
from hetero.models import AUTO, LONGEST_NAME, model_path, model_spec, open_model
from hetero.models.manifest import is_quantised
from hetero.placement.first_start import scaled_here
from hetero.placement.where_fastest import with_fastest
from hetero.profiler import profile_files
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.nearest_profile import nearest_shipped
from hetero.profiler.records import DeviceProfile
from hetero.runtime.prefill_mode import with_modes
from hetero.solver.build import make_plan
from hetero.solver.decode_bands import LONGEST
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.kernel_times import Precision
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import GraphSizes, PlanRequest
from hetero.terminal.notices import NO_PROFILE, notify

ProfileLike: TypeAlias = DeviceProfile | str | os.PathLike[str] | None


def plan(
    model: str | Path | ModelGraph,
    profile: ProfileLike = None,
    *,
    seq_lens: Sequence[int] | Mapping[int, float] = (64, 256, 1024),
    graph_sizes: GraphSizes = None,
    graph_memory: str | int | None = None,
    preparation_budget_s: float | None = None,
    objective: Literal["latency", "energy"] = "latency",
    precision: Precision = "auto",
    max_gpu_share: float = 1.0,
    memory_budget: str | int | None = None,
    context: int = 256,
    step_tokens: int | None = None,
    margin: float = 0.03,
    weights: str | None = None,
    kv: str | None = None,
    curves: bool = True,
    fastest: bool = False,
) -> ExecutionPlan:
    """Return the best cut of every matmul of `model` on the device of `profile`.

    `model` is a MODEL or the name of a known one; `profile` a `DeviceProfile`, a file, a shipped
    name, or None for this machine's. `seq_lens` are prompt lengths, or how often a prompt of each
    comes; `kv` is the caches' format (`planned_cache`). `curves` adds what a report draws (a second
    or so), `fastest` where prompts and answers are fastest by depth; the rest is as in `hetero plan
    --help`. Raises `UserError`, `PlanError` or `ProfileError`.
    """
    if isinstance(model, ModelGraph):
        spec, device_profile = model, find_profile(profile)
    else:
        spec, device_profile = spec_on(model, weights, profile, kv)
    request = PlanRequest(
        seq_lens=tuple(seq_lens),
        length_weights=tuple(seq_lens.values()) if isinstance(seq_lens, Mapping) else (),
        graph_sizes=graph_sizes,
        objective=objective,
        precision=precision,
        max_gpu_share=max_gpu_share,
        memory_budget_bytes=None if memory_budget is None else parse_size(memory_budget),
        graph_memory_bytes=None if graph_memory is None else parse_size(graph_memory),
        preparation_budget_s=preparation_budget_s,
        context=context,
        step_tokens=step_tokens,
        margin=margin,
        curves=curves,
        third=True,
    )
    finished = planned(spec, device_profile, request)
    return with_fastest(finished, spec, device_profile, request) if fastest else finished


def spec_on(
    model: str | Path, weights: str | None, profile: ProfileLike, kv: str | None = None
) -> tuple[ModelGraph, DeviceProfile]:
    """Return the model graph of a plan, and the profile that it is made on.

    See `spec_of`, `find_profile` and `planned_cache`. The model is checked first: its errors are
    reported alone.
    """
    spec = spec_of(model, weights)
    device_profile = find_profile(profile)
    return spec.with_caches(planned_cache(device_profile, kv)), device_profile


def planned_cache(profile: DeviceProfile, kv: str | None = None) -> CacheFormat:
    """Return the format of caches that a plan is made for.

    It is the requested one, else the default where the profile timed attention on it, else the one
    that it timed (f32). Raises `UserError`.
    """
    if kv is not None:
        check_one_of("kv", kv, [*CacheFormat])
        return CacheFormat(kv)
    timed = {x.op for x in profile.other_predictors}
    return DEFAULT_CACHE if f"Attention+{DEFAULT_CACHE}" in timed else CacheFormat.F32


def spec_of(model: str | Path, weights: str | None = None) -> ModelGraph:
    """Return the model graph of a plan, with caches of floats, of a MODEL or a known model's name.

    The default format is that of a GGUF file, all that a quantised directory has, else w4a16.
    Raises `ModelError`.
    """
    if weights in (None, AUTO):
        path = model_path(model)
        if len(path.name) <= LONGEST_NAME and is_quantised(path):
            return open_model(model).spec()
    return model_spec(model, None if weights == AUTO else weights)


def planned(spec: ModelGraph, profile: DeviceProfile, request: PlanRequest) -> ExecutionPlan:
    """Return the plan of a request and the prefill modes of its prompts.

    A model that is stored in several formats is planned in those that it would be run in, which a
    note names. Raises `PlanError` or `ProfileError`.
    """
    cost = CostModel(profile)
    request = replace(request, longest=min(spec.max_position, LONGEST))
    if not spec.also:
        return with_modes(make_plan(spec, profile, request), spec, cost)
    start_s = time.perf_counter()
    solver = prepare_solver(spec, profile, request)
    finished = with_modes(solver.plan, spec, cost, solver)
    prompts, answers = solver.formats
    notes = (f"prompts are computed in {prompts}, answers in {answers}", *finished.notes)
    return finished.model_copy(update={"notes": notes, "solve_s": time.perf_counter() - start_s})


def find_profile(profile: ProfileLike) -> DeviceProfile:
    """Return the named profile, this machine's from the cache, or a shipped one.

    The shipped one is the nearest of this machine's kind, scaled to it where that can be measured,
    with a notice on stderr. Raises `UserError` or `ProfileError`.
    """
    scaled, notice = scaled_here(*locate_profile(profile))
    if notice:
        notify(notice)
    return scaled


def locate_profile(profile: ProfileLike, npu: str | None = None) -> tuple[DeviceProfile, str]:
    """Return the profile as `find_profile` does, but unscaled, and its notice (empty if none).

    `npu` is the backend that is to be opened as NPU, where one is (`nearest_shipped`).
    """
    if isinstance(profile, DeviceProfile):
        return profile, ""
    shipped = profile_files.shipped_names()
    if profile is not None:
        here = os.path.exists(profile)  # false where it cannot be looked for
        if not here and str(profile) not in shipped:
            raise UserError(
                f"profile {str(profile)!r}: there is no such file; give one written by "
                f"`hetero profile` or one of: {', '.join(shipped)}"
            )
        return DeviceProfile.load(Path(profile) if here else str(profile)), ""
    problem = f"{NO_PROFILE} (`hetero profile` takes one)"
    cached = profile_files.taken_profile_path()
    if os.path.exists(cached):
        try:
            return DeviceProfile.load(cached), ""
        except ProfileError as error:  # caches are disposable
            problem = str(error)
    if (nearest := nearest_shipped(npu)) is not None:
        notice = f"{problem}, so the shipped profile `{nearest.name}` is used ({nearest.why})"
        return nearest.load(), notice
    raise UserError(
        "this machine has no profile: take one with `hetero profile`, or name a shipped one with "
        f"--profile: {', '.join(shipped)}"
    )


def parse_tokens(value: str, option: str) -> tuple[int, ...]:
    """Return `64,256` as numbers. Raises `UserError`."""
    try:
        counts = tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UserError(f"{option} {value!r}: give token counts like 64,256,1024")
    return counts


def parse_lengths(value: str, option: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return `64:3,256:1` as lengths and their weights, `64,256` as lengths alone.

    Raises `UserError`.
    """
    parts = [part.partition(":") for part in value.split(",") if part.strip()]
    lengths = parse_tokens(",".join(length for length, _, _ in parts), option)
    if not any(colon for _, colon, _ in parts):
        return lengths, ()
    try:
        weights = tuple(float(weight) if colon else 1.0 for _, colon, weight in parts)
    except ValueError:
        weights = ()
    if len(weights) != len(lengths) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(
            f"{option} {value!r}: the weight of a length is a number above 0, as in 64:3,256:1"
        )
    return lengths, weights


def load_either(path: str) -> ExecutionPlan | DeviceProfile:
    """Return a saved plan or profile, or a shipped profile by name.

    Raises `UserError` or their errors.
    """
    if path in profile_files.shipped_names() and not os.path.exists(path):
        return DeviceProfile.load(path)
    if not os.path.exists(path):
        raise UserError(
            f"{path}: there is no such file, and no shipped profile of this name: those are "
            f"{', '.join(profile_files.shipped_names())}"
        )
    text, document = profile_files.read_profile(path), None
    with contextlib.suppress(ValueError, RecursionError):  # what is wrong is said below
        document = json.loads(text)
    if isinstance(document, dict) and "ops" in document:
        return ExecutionPlan.parse(text, path)
    if isinstance(document, dict) and "schema_version" not in document:
        raise UserError(
            f"{path} is neither a profile nor a plan: give what `hetero profile`, or "
            "`hetero plan --out`, wrote"
        )
    return DeviceProfile.parse(text, path)
