"""What computes a model: the devices to open, the plan for them, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hetero.backends.opencl import every_core_count
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import EVERY_CORE
from hetero.device_set import DeviceMode, backend_name
from hetero.errors import UserError
from hetero.first_start import forget_if_other, scaled_here
from hetero.planning import ProfileLike, locate_profile
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import ExecutionPlan, NamedStrategy, PlanError
from hetero.solver.planner import Planner, Scenario
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.report.units import duration
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.strategy_plans import strategy_plan

# The work that `--device auto` compares devices by: a prompt and an answer, in tokens.
PROMPT_TOKENS: Final = 256
MARGIN: Final = 0.03
SHORT_PROMPTS: Final = (2, 5, 12, 24)  # that both devices must share as well, for `hetero`
ANSWER_TOKENS: Final = 64


@dataclass(frozen=True)
class Choice:
    """Devices to open, and a plan for them (None: made by rule, `plan_on`).

    `gpu` is a backend to open instead of the one that was asked for (None: that one).
    `reason` says why `auto` chose what it did; `notes` are for people to see once; `profile` is the
    one that was asked for; `solver` answers for prompt lengths that the plan does not have.
    """

    mode: DeviceMode
    plan: ExecutionPlan | None = None
    gpu: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    profile: DeviceProfile | None = None
    solver: PreparedSolver | None = None


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; see `LLM`. `longest` is the longest call of the engine, tokens;
    `weight_budget_bytes` what the weights may take, None for no limit.
    """

    mode: DeviceMode = "hetero"
    gpu: str = "auto"
    npu: str = "auto"
    profile: ProfileLike = None
    plan: ExecutionPlan | None = None
    strategy: NamedStrategy = "auto"
    seq_lens: Sequence[int] = ()
    longest: int = 1024
    max_gpu_share: float = 1.0
    weight_budget_bytes: int | None = None


def choose(spec: ModelSpec, wishes: Wishes) -> Choice:
    """Decide before any device is opened. Raises `UserError`, `PlanError` or `ProfileError` for
    what was asked for by name and cannot be.
    """
    _check_share(wishes)
    if wishes.plan is not None:
        wishes.plan.check_fits(spec)
        return Choice(_mode_of(wishes.plan), wishes.plan)
    if wishes.mode == "auto" and wishes.gpu == EVERY_CORE:
        return Choice("gpu", reason=f"auto: gpu alone, because {EVERY_CORE} leaves no other core")
    if wishes.mode not in ("hetero", "auto"):
        if wishes.profile is not None:
            locate_profile(wishes.profile)  # a name that is wrong is said, needed or not
        return Choice(wishes.mode)
    try:
        profile, notice = _find_profile(wishes)
        found = _choose_by(spec, profile, wishes, (notice,) if notice else ())
        return replace(found, profile=profile) if wishes.profile is not None else found
    except (UserError, PlanError, ProfileError) as error:
        named = wishes.profile is not None or wishes.strategy not in ("auto", "layer")
        if named or wishes.max_gpu_share < 1 or wishes.weight_budget_bytes is not None:
            raise
        auto = wishes.mode == "auto"
        return Choice("hetero", reason=f"auto: layer level, because {error}" if auto else "")


def plan_on(choice: Choice, spec: ModelSpec, devices: Mapping[DeviceKind, Device]) -> ExecutionPlan:
    """The choice's plan on the devices that could be opened; by rule where it needs another.

    Warns (`ProfileWarning`) if the profile that was asked for was taken elsewhere.
    """
    kinds = frozenset(devices)
    if choice.profile is not None:
        choice.profile.warn_if_foreign(devices.values())
    else:
        forget_if_other(devices.values())
    if choice.plan is not None and choice.plan.devices() <= kinds:
        _check_graphs(choice.plan, devices)
        return choice.plan
    if kinds == {"gpu", "npu"}:
        return layer_level(spec)
    (only,) = kinds
    return single_device(spec, only)


def _choose_by(
    spec: ModelSpec, profile: DeviceProfile, wishes: Wishes, notes: tuple[str, ...]
) -> Choice:
    npu = profile.devices.get("npu")
    sizes = npu.capabilities.graph_sizes if npu is not None else ()
    lengths = tuple(wishes.seq_lens) or spread_lengths(sizes, wishes.longest)
    request = PlanRequest(
        seq_lens=lengths,
        explain=False,
        max_gpu_share=wishes.max_gpu_share,
        memory_budget_bytes=wishes.weight_budget_bytes,
    )
    if wishes.strategy != "auto":
        plan = strategy_plan(spec, profile, wishes.strategy, lengths, request)
        return Choice(_mode_of(plan), plan, notes=notes)
    promised = wishes.mode == "hetero" and wishes.max_gpu_share >= 1
    solver = prepare_solver(spec, profile, replace(request, shared=promised))
    plan = solver.plan
    both = Choice("hetero", plan, notes=notes, solver=solver)
    if wishes.mode == "auto":
        return _fastest(Planner(spec, profile), both, wishes)
    if promised and not all(
        _shares_every_prompt(p) for p in (plan, *map(solver.plan_for, SHORT_PROMPTS))
    ):
        return Choice("hetero", notes=notes)  # at least layer level, which is made by rule
    return both


def _check_share(wishes: Wishes) -> None:
    """Raise `UserError` where the GPU could not be left the time that was asked for."""
    share = wishes.max_gpu_share
    if not 0 <= share <= 1:
        raise UserError(f"--max-gpu-share is between 0 and 1, got {share:g}")
    if share == 1:
        return
    if wishes.mode == "gpu" and wishes.plan is None:
        raise UserError(
            f"the GPU alone cannot leave {1 - share:.0%} of its time to others: choose --device "
            "hetero or npu with --max-gpu-share"
        )
    if wishes.plan is not None and wishes.plan.max_gpu_share > share:
        raise UserError(
            f"the plan {wishes.plan.plan_id} was made for a GPU share of up to "
            f"{wishes.plan.max_gpu_share:g}: make one with `hetero plan --max-gpu-share {share:g}`"
        )


def _shares_every_prompt(plan: ExecutionPlan) -> bool:
    """Whether both devices work in prompts of every length, as `hetero` promises."""
    kinds: dict[int | None, set[DeviceKind]] = {}
    for entry in plan.ops:
        if entry.phase == "prefill" and entry.op != "lm_head":
            found = kinds.setdefault(entry.m, {plan.rest.prefill})
            found.update(tile.device for tile in entry.tiles)
    return all(len(found) == 2 for found in kinds.values())


def _fastest(planner: Planner, both: Choice, wishes: Wishes) -> Choice:
    """The plan for both devices, or one device alone where that is predicted to be as fast: the
    GPU, the NPU, or on a PC the GPU with the NPU's core and all others.
    """
    assert both.plan is not None
    prompt = Scenario("prefill", min(PROMPT_TOKENS, planner.step_tokens or PROMPT_TOKENS))
    kinds: tuple[DeviceKind, ...] = ("gpu", "npu") if wishes.max_gpu_share >= 1 else ("npu",)
    level = "tensor level"
    steps: dict[str, Steps | None] = {kind: _alone_s(planner, prompt, kind) for kind in kinds}
    if (one := steps.get("gpu")) is not None and wishes.gpu == "auto":
        steps[EVERY_CORE] = _every_core_s(planner, one)
    steps[level] = Steps(_step_s(both, prompt), _step_s(both, DECODE))
    seconds = {name: found.work_s for name, found in steps.items() if found is not None}
    # A single device is simpler: both must be faster by a margin, as a cut must be.
    best = min(seconds, key=lambda name: seconds[name] / (1 - MARGIN if name == level else 1.0))
    times = ", ".join(f"{name} {duration(s)}" for name, s in seconds.items())
    reason = (
        f"auto: {best if best == level else best + ' alone'}, predicted for a prompt of {prompt.m} "
        f"tokens and {ANSWER_TOKENS} more: {times} (profile {planner.profile.name})"
    )
    if EVERY_CORE in steps and every_core_count() == 0 and planner.profile.every_core:
        reason += f"; {EVERY_CORE} needs a process in which OpenCL does not run yet"
    if best == level:
        return replace(both, reason=reason)
    if best == EVERY_CORE:
        return Choice("gpu", gpu=EVERY_CORE, reason=reason, notes=both.notes)
    return Choice("gpu" if best == "gpu" else "npu", reason=reason, notes=both.notes)


class Steps(NamedTuple):
    """Seconds of the prompt and of a decoding step."""

    prompt_s: float
    decode_s: float

    @property
    def work_s(self) -> float:
        """The prompt and the answer."""
        return self.prompt_s + ANSWER_TOKENS * self.decode_s


def _every_core_s(planner: Planner, one: Steps) -> Steps | None:
    """With the OpenCL device on every core, from its steps on one; None where that was not
    measured, or on more cores than there are here.
    """
    spec, here = planner.spec, every_core_count()
    found = {
        x.phase: x
        for x in planner.profile.every_core
        if x.weight_format == spec.weight_format and x.cores <= here
    }
    if len(found) < 2:
        return None
    return Steps(
        found["prefill"].seconds(one.prompt_s, spec.layers),
        found["decode"].seconds(one.decode_s, spec.layers),
    )


def _alone_s(planner: Planner, prompt: Scenario, kind: DeviceKind) -> Steps | None:
    """With everything on one device; None if it cannot."""
    prefill, decode = planner.single(prompt, kind), planner.single(DECODE, kind)
    if prefill is None or decode is None:
        return None
    if {prefill.rests.device, decode.rests.device} != {kind}:
        return None
    return Steps(prefill.seconds, decode.seconds)


def _step_s(choice: Choice, scenario: Scenario) -> float:
    if choice.solver is not None:
        return choice.solver.solution_for(scenario).seconds
    assert choice.plan is not None
    return next(t.predicted_s for t in choice.plan.totals if t.phase == scenario.phase)


def _find_profile(wishes: Wishes) -> tuple[DeviceProfile, str]:
    """The profile and what to say about it; unless asked for, it must be of these backends."""
    profile, notice = locate_profile(wishes.profile)
    if wishes.profile is None:
        wanted: dict[DeviceKind, str] = {
            "gpu": backend_name("gpu", wishes.gpu),
            "npu": backend_name("npu", wishes.npu),
        }
        for kind, name in wanted.items():
            record = profile.devices.get(kind)
            if record is None or record.backend != name:
                raise ProfileError(
                    f"profile {profile.name} says nothing of {name} as {kind.upper()}: take one "
                    "with `hetero profile`, or name another with --profile"
                )
    return scaled_here(profile, notice)


def _check_graphs(plan: ExecutionPlan, devices: Mapping[DeviceKind, Device]) -> None:
    """Every graph that the plan prepares ahead must be one that the NPU takes."""
    if "npu" not in devices or not devices["npu"].capabilities.static_shapes:
        return
    known = devices["npu"].capabilities.graph_sizes
    wanted = {t.graph_size for op in plan.ops for t in op.tiles if t.graph_size is not None}
    missing = sorted((wanted & set(plan.graph_sizes)) - set(known))
    if missing:
        raise UserError(
            f"the plan runs NPU graphs of {', '.join(map(str, missing))} tokens, "
            f"{devices['npu'].info.backend} has {', '.join(map(str, known))}: make a plan with "
            "--graph-sizes of these, or with a profile of this device"
        )


def _mode_of(plan: ExecutionPlan) -> DeviceMode:
    """Devices that a plan needs."""
    kinds = plan.devices()
    if len(kinds) == 2:
        return "hetero"
    (only,) = kinds
    return only
