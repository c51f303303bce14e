"""What each pass promises: its stage, its numerics, its options and its place in the list.

No torch here: recipes are read, and their pass lists checked, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Stage(StrEnum):
    """When a pass runs."""

    JOINT = "joint"
    PARTITIONED = "partitioned"
    LOWERING = "lowering"
    REPLAY = "replay"


class Numerics(StrEnum):
    """How far a pass may move results from those of the graph it received."""

    EXACT = "exact"
    REDUCTION_ORDER = "reduction_order"
    LOSSY = "lossy"


class Options(BaseModel):
    """Base of every pass's option model: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DecompositionOptions(Options):
    at: Literal["pass", "capture"] = "pass"


class CheckpointOptions(Options):
    policy: Literal["none", "selective", "full"] = "selective"
    save: tuple[str, ...] = ()
    every_nth_matmul: PositiveInt = 2


class ReshardOptions(Options):
    policy: Literal["always", "never"] = "always"


class EstimateOptions(Options):
    device: str = "h100"
    estimates: Literal["analytical", "measured"] = "analytical"
    estimates_file: str = ""


class AutobucketingOptions(EstimateOptions):
    max_in_flight_gb: float = Field(5.0, gt=0)
    max_compute_pre_fetch: PositiveInt = 200
    bucket_cap_mb: float | None = Field(None, gt=0)


class BlockBucketingOptions(Options):
    buckets: tuple[str | tuple[str, ...], ...] = ()
    separate_gather_group: bool = True


class OverlapOptions(EstimateOptions):
    horizon: float = Field(8.0, gt=0)


class InductorOptions(Options):
    keep_order: bool = True
    config: dict[str, bool | int | float | str] = {}


class RegionalOptions(Options):
    regions: tuple[str, ...] = ()
    config: dict[str, bool | int | float | str] = {}
    region_config: dict[str, dict[str, bool | int | float | str]] = {}
    fallback: tuple[str, ...] = ()


class CudagraphOptions(Options):
    warmup: PositiveInt = 2
    debug: bool = False


@dataclass(frozen=True)
class PassContract:
    """The promise of one pass.

    `after` names passes that must stand earlier in the list where both are listed; `needs` names
    what the recipe or the machine must have: "fsdp", "cuda", "compiler", "static_shapes".
    `tolerance` is the norm-relative bound of a LOSSY pass on the loss and each gradient. `fewer_bytes`: the pass may
    take bytes out of the step's collectives, as one does that gathers a weight once and not twice.
    """

    name: str
    stage: Stage
    numerics: Numerics
    changes: str
    options: type[Options] = Options
    tolerance: float | None = None
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    fewer_bytes: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if (self.numerics is Numerics.LOSSY) != (self.tolerance is not None):
            raise ValueError(f"pass {self.name!r}: a LOSSY pass states a tolerance, and only a LOSSY pass does")


CONTRACTS: dict[str, PassContract] = {}


def declare(contract: PassContract) -> PassContract:
    """Add a contract to the table that recipes are checked against; a second one replaces the first."""
    CONTRACTS[contract.name] = contract
    return contract


declare(PassContract(
    "inductor_decomposition", Stage.JOINT, Numerics.LOSSY,
    "operators become the primitives that Inductor lowers; every node keeps its metadata",
    DecompositionOptions, tolerance=5e-6, source="torch._inductor.decomposition.select_decomp_table",
))
declare(PassContract(
    "activation_checkpointing", Stage.JOINT, Numerics.EXACT,
    "tagged activations are recomputed in the backward and not saved",
    CheckpointOptions, after=frozenset({"inductor_decomposition"}),
    source="torch.utils.checkpoint.CheckpointPolicy, read by min_cut_rematerialization_partition",
))
declare(PassContract(
    "reshard_after_forward", Stage.JOINT, Numerics.EXACT,
    "always: no saved tensor aliases a gathered parameter; never: no gather is repeated",
    ReshardOptions, needs=frozenset({"fsdp"}),
    after=frozenset({"inductor_decomposition", "activation_checkpointing"}),
    source="arXiv:2411.00284 (SimpleFSDP)",
))
declare(PassContract(
    "autobucketing_reordering", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "fewer all-gather and reduce-scatter launches, the same bytes",
    AutobucketingOptions, conflicts=frozenset({"transformer_block_bucketing"}), needs=frozenset({"fsdp"}),
    source="torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing",
))
declare(PassContract(
    "transformer_block_bucketing", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "one all-gather and one reduce-scatter a bucket, the same bytes",
    BlockBucketingOptions, conflicts=frozenset({"autobucketing_reordering"}), needs=frozenset({"fsdp"}),
    source="torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing",
))
declare(PassContract(
    "overlap_collectives", Stage.PARTITIONED, Numerics.EXACT,
    "the same nodes in another order, in which less of the collectives is exposed",
    OverlapOptions, after=frozenset({"autobucketing_reordering", "transformer_block_bucketing"}),
))
declare(PassContract(
    "graph_cleanup", Stage.PARTITIONED, Numerics.EXACT,
    "no view that changes nothing, no transposes that undo each other, no dead code",
    after=frozenset({"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives"}),
))
declare(PassContract(
    "regional_inductor", Stage.PARTITIONED, Numerics.LOSSY,
    "each named region of the model is one call of a compiled function",
    RegionalOptions, tolerance=5e-6, conflicts=frozenset({"full_inductor_compilation"}),
    after=frozenset({"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives",
                     "graph_cleanup"}), needs=frozenset({"compiler"}),
    source="torch._inductor.standalone_compile, as torch.fx.passes.regional_inductor does",
))
declare(PassContract(
    "full_inductor_compilation", Stage.LOWERING, Numerics.LOSSY,
    "each graph becomes one compiled callable",
    InductorOptions, tolerance=1e-5, requires=frozenset({"inductor_decomposition"}),
    needs=frozenset({"compiler", "static_shapes"}), source="torch._inductor.compile_fx.compile_fx_inner",
))

declare(PassContract(
    "cudagraph", Stage.REPLAY, Numerics.EXACT,
    "each direction of the step is recorded once and replayed with one launch",
    CudagraphOptions, needs=frozenset({"cuda", "static_shapes"}), source="torch.cuda.CUDAGraph",
))

_STAGE_ORDER = {stage: i for i, stage in enumerate(Stage)}


def check_passes(joint_passes: Sequence[str], passes: Sequence[str], *, free_order: bool = False) -> list[str]:
    """Every broken rule of a declared pass list, each as one sentence with the pass, the rule and the fix.

    Names that have no contract yet are left to `build`, which knows the user's own passes. free_order: passes of one
    stage may stand in any order.
    """
    problems: list[str] = []
    listed = [*joint_passes, *passes]
    for name in sorted({n for n in listed if listed.count(n) > 1}):
        problems.append(f"pass {name!r} is listed twice: list it once")
    for where, names in (("joint_passes", joint_passes), ("passes", passes)):
        for name in names:
            contract = CONTRACTS.get(name)
            if contract is None:
                continue
            joint = contract.stage is Stage.JOINT
            if joint != (where == "joint_passes"):
                right = "joint_passes" if joint else "passes"
                problems.append(f"pass {name!r} runs on the {contract.stage} stage: move it from {where} to {right}")
    known = [CONTRACTS[n] for n in dict.fromkeys(listed) if n in CONTRACTS]
    for i, contract in enumerate(known):
        for other in sorted(contract.requires - set(listed)):
            problems.append(f"pass {contract.name!r} requires {other!r}: add it to the list, before it")
        for earlier in known[:i]:
            if earlier.name in contract.conflicts or contract.name in earlier.conflicts:
                problems.append(f"passes {earlier.name!r} and {contract.name!r} conflict: keep one of them")
        for later in known[i + 1:]:
            problems += [] if free_order and later.stage is contract.stage else _misordered(contract, later)
    lowering = [c.name for c in known if c.stage is Stage.LOWERING]
    if len(lowering) > 1:
        problems.append(f"passes {' and '.join(map(repr, lowering))} both lower the graph: keep one of them")
    return problems


def _misordered(first: PassContract, second: PassContract) -> list[str]:
    """The rule broken by `first` standing before `second`, if any."""
    if second.name in first.after | first.requires:
        return [f"pass {second.name!r} must come before {first.name!r}: swap them"]
    # a joint pass in the wrong list is told so already
    if second.stage is not Stage.JOINT and _STAGE_ORDER[second.stage] < _STAGE_ORDER[first.stage]:
        return [f"pass {second.name!r} ({second.stage}) must come before {first.name!r} ({first.stage}): swap them"]
    return []
