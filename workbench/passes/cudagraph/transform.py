"""Both directions of the step are wrapped, and record into one memory pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.graph.callables import Body
from workbench.passes.cudagraph import CONTRACT, CudagraphOptions
from workbench.passes.cudagraph.recording import Replayed
from workbench.passes.effect import Effect
from workbench.passes.registry import RegisteredPass
from workbench.torch_api import cuda_graphs
from workbench.torch_api.distributed.nccl import refuse_registered_buffers
from workbench.torch_api.ops import draws


def replayed(before: Sequence[Body], after: Sequence[Any], options: CudagraphOptions) -> Effect:
    """Both bodies have been recorded and replayed; not known before they have run."""
    counts = [body.replays for body in after]
    evidence = {"graphs": sum(n > 0 for n in counts), "replays": counts, "copied_inputs": [b.copied for b in after],
                "fixed_inputs": [sum(b.fixed) for b in after]}
    if all(counts):
        return Effect(True, "", evidence)
    return Effect(None, f"nothing was replayed yet: the first {options.warmup} steps run as they are", evidence)


def cudagraph(body: Body, example_inputs: list[Any], *, options: CudagraphOptions) -> Replayed:
    """Wrap one direction of the step. Raises WorkbenchError for random numbers, and registered buffers."""
    drawn = [node.name for node in body.graph.graph.nodes if node.op == "call_function" and draws(node)]
    if drawn:
        raise WorkbenchError(f"pass 'cudagraph' on the {body.part} graph: {drawn[0]} draws random numbers, "
                             "and a replay would draw the same ones: take the dropout out, or drop the pass")
    refuse_registered_buffers()
    step = body.step
    step.recorder = step.recorder or cuda_graphs.Recorder()
    replayed = Replayed(body, step.recorder, warmup=options.warmup, debug=options.debug)
    if not body.backward:
        step.replayed_forward = replayed
    elif isinstance(forward := step.replayed_forward, Replayed):
        forward.other, replayed.other, step.replayed_forward = replayed, forward, None
    return replayed


PASS = RegisteredPass(CONTRACT, cudagraph, replayed)
