"""A compiled model: the directory that `hetero compile` writes and `hetero generate` runs.

It is a directory of `hetero quantize` (weights for the GPU, configuration, tokenizer) with

    plan.json       what runs where
    graphs/         compiled graphs for one chip
    profile.json    the chip's times, where it was compiled with some: by them prompts of any length
                    are planned, and calls ordered
    compiled.json   `BundleManifest`; written last, so that its absence means an unfinished bundle
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero.backends.host.files import read_document
from hetero.backends.host.folders import expand_user
from hetero.errors import ModelError, UserError
from hetero.models import model_path
from hetero.models.sliding import Sliding
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan

if TYPE_CHECKING:
    from hetero.profiler.records import DeviceProfile
    from hetero.solver.prepared import PreparedSolver
    from hetero.solver.request import PlanRequest

BUNDLE_FILE = "compiled.json"
PLAN_FILE = "plan.json"
PROFILE_FILE = "profile.json"
GRAPHS_DIRECTORY = "graphs"
SCHEMA_VERSION: Final = 1
_REMEDY = "run hetero compile again"


MAX_TOKENS: Final = 1 << 20
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class GraphRecord(BaseModel):
    """An entry below `graphs/`: the nodes it serves, its token counts, SHA-256 of its files."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    nodes: tuple[str, ...]
    tokens: tuple[Tokens, ...]
    context: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    entry: str
    size_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    files: dict[str, str]


class SolverRecord(BaseModel):
    """The part of a `PlanRequest` that a bundle was solved with.

    `adapts`: it has every graph that plans for devices of other speeds may use, too.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    seq_lens: Annotated[tuple[Tokens, ...], Field(min_length=1)]
    step_tokens: Tokens
    shared: bool = False
    adapts: bool = True

    @property
    def request(self) -> PlanRequest:
        """Return the request, of the profile's graph sizes."""
        from hetero.solver.request import PlanRequest  # compiled models alone need the solver

        return PlanRequest(
            seq_lens=self.seq_lens, step_tokens=self.step_tokens, shared=self.shared, explain=False
        )


class BundleManifest(BaseModel):
    """Contents of `compiled.json`.

    `licence` is the text of the model's own files, `sdk` and `provider` are the compiler's; a
    device needs the same provider to open the graphs. `whole_caches`: attention is compiled for
    caches that keep all tokens, also those outside of its windows, as a service has them.
    `profile_sha256` is that of the chip's profile, by which the calls of a prompt are ordered;
    empty without one. `solver` is there if the plan was solved by that profile: lengths that the
    plan does not list are solved in the same way.
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    kind: Literal["hetero-compiled"] = "hetero-compiled"
    schema_version: Literal[1] = SCHEMA_VERSION
    model: str
    licence: str
    soc: str
    htp_arch: Annotated[int, Field(ge=0, lt=2**31)]
    sdk: str
    provider: str
    max_seq_len: Tokens
    graph_sizes: tuple[Tokens, ...]
    plan_id: str
    plan_sha256: str
    profile_sha256: str = ""
    solver: SolverRecord | None = None
    whole_caches: bool = False
    graphs: tuple[GraphRecord, ...]

    @property
    def graphs_bytes(self) -> int:
        """Return the bytes of all compiled graphs."""
        return sum(graph.size_bytes for graph in self.graphs)

    def document(self) -> str:
        """Return the file's contents, in an old schema where that can express them."""
        later = ("whole_caches", "profile_sha256", "solver")
        added = {name for name in later if not getattr(self, name)}
        return self.model_dump_json(indent=1, exclude=added) + "\n"

    def check_caches(self, model: str, windows: Sequence[int], *, whole: bool) -> None:
        """Raise `UserError` where no graph attends to caches of all tokens."""
        written = max(self.graph_sizes, default=0)
        sliding = Sliding.of(windows, self.max_seq_len + written, written)
        slides = sliding is not None and sliding.rows < self.max_seq_len + written
        attends = any(graph.context for graph in self.graphs)
        if attends and whole and slides and not self.whole_caches:
            raise UserError(
                f"{model}: was compiled for caches that forget what its windows have left, and is "
                "opened with those that keep all, as a service has them: compile it with "
                "--whole-caches"
            )

    def npu_options(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the options of `hetero.backends.qnn.opening.open` for a bundle in `directory`."""
        graphs = expand_user(directory) / GRAPHS_DIRECTORY
        return {
            "soc": self.soc,
            "graph_sizes": self.graph_sizes,
            "cache": graphs,
            "shared_weights": any(len(graph.tokens) > 1 for graph in self.graphs),
        }

    def load_plan(self, directory: str | os.PathLike[str]) -> ExecutionPlan:
        """Return the plan that the graphs were compiled for. Raises `ModelError` for another."""
        path = expand_user(directory) / PLAN_FILE
        text = _verified(path, self.plan_sha256, "another plan with --plan")
        return ExecutionPlan.parse(text, path)

    def load_profile(self, directory: str | os.PathLike[str]) -> DeviceProfile | None:
        """Return the profile of the chip, if it was compiled with one. Raises as `load_plan`."""
        if not self.profile_sha256:
            return None
        from hetero.profiler.records import DeviceProfile

        path = expand_user(directory) / PROFILE_FILE
        text = _verified(path, self.profile_sha256, "another profile with --profile")
        return DeviceProfile.parse(text, path)

    def load_solver(
        self, spec: ModelGraph, profile: DeviceProfile, plan: ExecutionPlan
    ) -> PreparedSolver | None:
        """Return the solver of the plan, prepared again for the model as it was compiled.

        None where it was not solved, or this version would solve it otherwise.
        """
        if self.solver is None:
            return None
        from hetero.solver.prepared import prepare_solver

        try:
            solver = prepare_solver(spec, profile, self.solver.request)
        except (PlanError, ProfileError):
            return None
        # The plan keeps the prefill modes that its prompts use (`with_modes`).
        same = solver.plan.model_copy(update={"in_flight": plan.in_flight})
        if same.plan_id != plan.plan_id:
            return None
        solver.plan = plan
        return solver


def _verified(path: Path, sha256: str, instead: str) -> str:
    """Return the text of a bundle's file that has the SHA-256. Raises `ModelError`."""
    try:
        data = read_document(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ModelError(
            f"{path}: does not have the SHA-256 that {BUNDLE_FILE} names; {_REMEDY}, or give "
            f"{instead}"
        )
    return data.decode("utf-8", "replace")


def find_bundle(model: str | os.PathLike[str]) -> BundleManifest | None:
    """Return the manifest if MODEL is a compiled directory. Raises `ModelError` if damaged."""
    path = model_path(model) / BUNDLE_FILE
    if not os.path.isfile(path):
        return None
    try:
        return BundleManifest.model_validate_json(read_document(path))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "document"
        raise ModelError(f"{path}: {field}: {first['msg']}; {_REMEDY}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
