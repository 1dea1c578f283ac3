"""The cost of the NPU's memory limits on the simulated chip."""

from __future__ import annotations

from typing import Annotated

import typer
from common import finish, table

from hetero.backends.protocol import PerGraphSize
from hetero.backends.qnn.npu_capabilities import capabilities_of
from hetero.backends.snapdragon import DOMAIN_BYTES, find_chip
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.request import GraphSizes, PlanRequest

CASES: dict[str, tuple[PerGraphSize, int | None, GraphSizes]] = {
    "no limit": ("graph", None, None),
    "as shipped: weights once, all process domains": ("graph", 0, None),
    "weights once, one domain": ("graph", DOMAIN_BYTES, None),
    "weights for each graph size, all domains": ("weights", 0, None),
    "weights for each graph size, one domain": ("weights", DOMAIN_BYTES, None),
    "weights for each graph size, one domain, sizes chosen": ("weights", DOMAIN_BYTES, "auto"),
}


def limited(chip: DeviceProfile, kind: PerGraphSize, limit: int | None) -> DeviceProfile:
    """The profile of a chip whose NPU holds so many bytes (0: what all its domains hold)."""
    npu = chip.devices["npu"]
    if limit == 0:
        sizes = npu.capabilities.graph_sizes
        limit = capabilities_of(find_chip("sm8650"), sizes).memory_limit_bytes
    own = {"per_graph_size": kind, "memory_limit_bytes": limit}
    record = npu.model_copy(update={"capabilities": npu.capabilities.model_copy(update=own)})
    return chip.model_copy(update={"devices": {**chip.devices, "npu": record}})


def limits(
    models: Annotated[str, typer.Option(help="known models")] = "llama-3-8b,llama-3.2-3b",
    profile: str = "snapdragon-8-gen-3",
    p: Annotated[str, typer.Option("-p", help="prompt lengths")] = "64,256,1024",
) -> None:
    """Plans within what one process domain holds, or all; weights once or for each graph size."""
    chip, lengths = DeviceProfile.load(profile), tuple(map(int, p.split(",")))
    rows = []
    for model in models.split(","):
        spec = model_spec(model)
        for name, (kind, limit, sizes) in CASES.items():
            request = PlanRequest(seq_lens=lengths, graph_sizes=sizes, explain=False)
            try:
                plan = make_plan(spec, limited(chip, kind, limit), request)
            except PlanError as error:
                rows.append([model, name, str(error), *("" for _ in lengths), ""])
                continue
            assert plan.memory is not None
            speeds = [f"{total.tokens_per_s:.4g}" for total in plan.totals]
            rows.append([model, name, f"{plan.memory.npu_bytes / 2**30:.2f}", *speeds])
    print(f"simulated; {profile}, plans for prompts of {p} tokens, tokens/s\n")
    table("|".join(("model|NPU's memory|GiB there", *map(str, lengths), "decode")), rows)
    finish()
