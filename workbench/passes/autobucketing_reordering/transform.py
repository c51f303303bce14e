"""torch's own scheduler merges the collectives and places them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.graph.read.measured_costs import estimates_of
from workbench.graph.read.timeline import Costs, costs_of
from workbench.passes.autobucketing_reordering import CONTRACT, AutobucketingOptions
from workbench.passes.merged_collectives import launches_saved, without_region
from workbench.passes.registry import RegisteredPass
from workbench.torch_api.devices.estimators import device_specs
from workbench.torch_api.inductor import bucketing


def autobucketing_reordering(
    gm: GraphModule, example_inputs: list[Any], *, options: AutobucketingOptions
) -> GraphModule:
    """Bucket and reorder by cost. Estimates follow from shapes, or are rank 0's: every rank schedules alike."""
    names = {node.name for node in gm.graph.nodes}
    with device_specs(options.device, estimates_of(gm, options)):
        return without_region(bucketing.bucket_by_cost(gm, {
            "max_in_flight_gb": options.max_in_flight_gb,
            "max_compute_pre_fetch": options.max_compute_pre_fetch,
            "collective_bucketing": True,
            "insert_overlap_deps": False,
            "collective_estimator": "analytical",
            "compute_estimator": "analytical",
            "pre_bucketing_fsdp_collectives": options.bucket_cap_mb is not None,
            "pre_bucketing_fsdp_collectives_bucket_cap_mb": options.bucket_cap_mb,
        }), names)


def order_costs(options: AutobucketingOptions, gm: GraphModule) -> Costs:
    """The costs that the order is judged by: torch's scheduler hides behind matmuls, and not behind pointwise work."""
    return costs_of(gm, options.device, fused=True)


PASS = RegisteredPass(CONTRACT, autobucketing_reordering, launches_saved, order_costs=order_costs)
