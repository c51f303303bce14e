"""The joint graph as make_fx traces it: inputs and gradients are this rank's shards, and there is no partitioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.authoring.authored import Authored
from workbench.graph.capture import JointGraph
from workbench.graph.facts import Known
from workbench.graph.input_check import InputCheck
from workbench.graph.model_contract import NotCaptured, named, not_captured, require_parameters
from workbench.lab.traced_capture import checks
from workbench.lab.traced_capture.cut import cut
from workbench.lab.traced_capture.torch_api import Untraceable, trace_step
from workbench.torch_api import aot
from workbench.torch_api.determinism import deterministic


def traced(authored: Authored, args: tuple[Any, ...],
           decompositions: dict[Any, Callable[..., Any]] | None) -> JointGraph:
    """What `capture(authored, by="traced")` calls. Raises WorkbenchError where the module cannot be traced."""
    require_parameters(authored)
    try:
        with deterministic(authored.deterministic), aot.capture_settings():
            step = trace_step(authored.module, args, decompositions)
    except Untraceable as error:
        raise NotCaptured(f"{named(authored)}: {error}") from None
    except Exception as error:
        raise not_captured(authored, error) from error
    inputs = InputCheck.of(args, authored.module.forward)
    return JointGraph(authored, step, aot.Contexts(), step.tracing_context, inputs, by="traced by make_fx",
                      cut=cut, known=Known(checks=(checks.check,)))
