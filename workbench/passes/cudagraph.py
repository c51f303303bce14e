"""cudagraph: each direction of the step is recorded once, and replayed with one launch.

Its result is no graph, so the example prints what is known of the recording before the first step:

    >>> example("cudagraph", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
    after:
      forward: 1 input static (64 bytes), 1 input copied (64 bytes); not recorded yet; 3 operators before, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import PositiveInt

from workbench.errors import WorkbenchError
from workbench.graph.callables import Body
from workbench.graph.read.replay import Replay, ReplayInput, count_launches
from workbench.passes.effect import Effect
from workbench.passes.registry import register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api import aot, cuda_graphs
from workbench.torch_api.distributed.nccl import refuse_registered_buffers
from workbench.torch_api.ops import hint, is_random, tensor_bytes


class CUDAGraphRunner:
    """A body that is recorded after its first calls, and replayed from then on. Boxed.

    Results (the loss) are copies. Saved tensors and gradients lie in the graphs' own memory and are overwritten by the
    next replay, which is refused as long as somebody holds them.
    """

    _boxed_call = True

    def __init__(self, body: Body, recorder: cuda_graphs.Recorder, *, warmup: int, debug: bool):
        self.body, self.graph = body, body.graph
        self.other: CUDAGraphRunner | None = None  # the other direction, in the same pool
        self.recorder: cuda_graphs.Recorder | None = recorder
        self.warmup, self.debug = warmup, debug
        self.names = [node.name for node in body.inputs]
        self.fixed = [body.keeps_address(node) for node in body.inputs]
        self.results = 0 if body.backward else body.step.results
        self.warmed = self.replays = 0
        self.pool_bytes: int | None = None
        self._replay: Callable[[], None] | None = None
        self._inputs: list[Any] = []
        self._addresses: list[int] = []
        self._outputs: list[Any] = []
        # what the recording made, how many hold it, and what to say if more do
        self._watched: list[tuple[torch.Tensor, int, str]] = []

    @property
    def where(self) -> str:
        return f"pass 'cudagraph' on the {self.body.part} graph"

    @property
    def facts(self) -> Replay:
        """Inputs, memory and launches; addresses and the pool are known after the recording."""
        inputs = []
        for i, (node, fixed) in enumerate(zip(self.body.inputs, self.fixed, strict=True)):
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                on_gpu = bool(self._addresses) and value.device.type == "cuda"
                inputs.append(ReplayInput(node.name, tuple(map(hint, value.shape)), tensor_bytes(value), fixed,
                                          aot.parameter_of(node) or "", self._addresses[i] if on_gpu else None))
        before, unit = count_launches(self.graph, self.body.kernels)
        return Replay(self.body.part, tuple(inputs), self.pool_bytes, before, unit, self.replays)

    def __call__(self, args: list[Any]) -> list[Any]:
        if self.recorder is None:
            raise WorkbenchError(f"{self.where}: it is closed: build the step again")
        if self._replay is None:
            if self.warmed < self.warmup or (
                self.body.backward and self.other and self.other._replay is None
            ):
                self.warmed += 1
                return list(self.body(args))
            self._record(args)
        else:
            self._take(args)
        args.clear()
        assert self._replay is not None
        self._replay()
        self.replays += 1
        return [self._output(i, value) for i, value in enumerate(self._outputs)]

    def _record(self, args: Sequence[Any]) -> None:
        assert self.recorder is not None
        self._inputs = [value if fixed or not isinstance(value, torch.Tensor) else value.clone()
                        for value, fixed in zip(args, self.fixed, strict=True)]
        self._addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in self._inputs]
        forward = self.other if self.body.backward else None
        saved = [cuda_graphs.holders(value) for value, *_ in forward._watched] if forward else []
        self._replay, self._outputs = self.recorder.record(self.body, self._inputs)
        self.pool_bytes = self.recorder.pool_bytes()
        inputs = {_storage(value) for value in self._inputs}
        outputs = {
            _storage(v): v for v in self._outputs[self.results :] if isinstance(v, torch.Tensor)
        }
        # buffers with fixed addresses are owned by their creator: held here, they would count as held by the last step
        self._inputs = [
            None if fixed else value for value, fixed in zip(self._inputs, self.fixed, strict=True)
        ]
        said = _GRADIENT_HELD if self.body.backward else _SAVED_HELD
        self._watched = [
            (value, cuda_graphs.holders(value), said)
            for at, value in outputs.items()
            if at not in inputs
        ]
        for i, was in enumerate(saved):  # Inductor may write a gradient over what was saved
            assert forward is not None
            value, count, said = forward._watched[i]
            more = cuda_graphs.holders(value) - was
            forward._watched[i] = value, count + more, _GRADIENT_HELD if more else said

    def _take(self, args: Sequence[Any]) -> None:
        """Copy what moves into the memory that was recorded; refuse what the recording does not hold for."""
        # in the memory of one pool
        gradients = self.other._watched if self.other and not self.body.backward else []
        overwritten = {
            said
            for value, count, said in [*self._watched, *gradients]
            if cuda_graphs.holders(value) > count
        }
        for said in (_SAVED_HELD, _GRADIENT_HELD):
            if said in overwritten:
                raise WorkbenchError(f"{self.where}: {said}")
        for name, fixed, ours, arg, address in zip(
            self.names, self.fixed, self._inputs, args, self._addresses, strict=True
        ):
            if not isinstance(arg, torch.Tensor):
                continue
            if fixed:
                if self.debug and arg.data_ptr() != address:
                    raise WorkbenchError(
                        f"{self.where}: input {name} was recorded at address {address:#x} and is at "
                        f"{arg.data_ptr():#x} now: change parameters and buffers in place"
                    )
                continue
            if (arg.shape, arg.dtype, arg.device) != (ours.shape, ours.dtype, ours.device):
                raise WorkbenchError(
                    f"{self.where}: input {name} was recorded as {ours.dtype} {list(ours.shape)} on {ours.device} and "
                    f"is {arg.dtype} {list(arg.shape)} on {arg.device} now: keep it so, or build again"
                )
            ours.copy_(arg)

    def _output(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if index < self.results else value.detach()

    def replay_alone(self) -> None:
        """Launch the recording with the inputs of the last step, to time it: nothing is copied in or given out."""
        if self._replay is None:
            raise WorkbenchError(
                f"{self.where}: nothing is recorded yet: run {self.warmup + 1} steps first"
            )
        self._replay()

    def close(self) -> None:
        """Free the recording; may be called twice."""
        self._replay, self.other = None, None
        self._inputs, self._outputs, self._watched = [], [], []
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = None


_GRADIENT_HELD = (
    "a gradient of the last step is still held, in p.grad or by your code, and a replay writes over it: call "
    "optimizer.zero_grad(set_to_none=True) between the steps, and hold no other reference to it"
)
_SAVED_HELD = (
    "what the last step saved is still held, and a replay writes over it: call backward() on its loss, or drop the "
    "loss, before the next step"
)


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


class CudagraphOptions(Options):
    """warmup: calls before the recording. debug: check in each replay that what is read in place has not moved."""

    warmup: PositiveInt = 2
    debug: bool = False


def replayed(before: Sequence[Body], after: Sequence[Any], options: CudagraphOptions) -> Effect:
    """Both bodies have been recorded and replayed; not known before they have run."""
    counts = [body.replays for body in after]
    evidence = {
        "graphs": sum(n > 0 for n in counts),
        "replays": counts,
        "copied_inputs": [len(body.facts.copied) for body in after],
        "fixed_inputs": [len(body.facts.static) for body in after],
    }
    if all(counts):
        return Effect(True, "", evidence)
    return Effect(
        None,
        f"nothing was replayed yet: the first {options.warmup} steps run as they are",
        evidence,
    )


@register_pass(
    "cudagraph", stage="replay", numerics="exact",
    changes="each direction of the step is recorded once and replayed with one launch",
    options=CudagraphOptions, needs={"cuda", "static_shapes"}, effect=replayed,
    source="torch.cuda.CUDAGraph",
)
def cudagraph(
    body: Body, example_inputs: list[Any], *, options: CudagraphOptions
) -> CUDAGraphRunner:
    """Wrap one direction of the step. Raises WorkbenchError for random numbers, and registered buffers."""
    drawn = [
        node.name
        for node in body.graph.graph.nodes
        if node.op == "call_function" and is_random(node)
    ]
    if drawn:
        raise WorkbenchError(
            f"pass 'cudagraph' on the {body.part} graph: {drawn[0]} draws random numbers, "
            "and a replay would draw the same ones: take the dropout out, or drop the pass"
        )
    refuse_registered_buffers()
    step = body.step
    step.recorder = step.recorder or cuda_graphs.Recorder()
    runner = CUDAGraphRunner(body, step.recorder, warmup=options.warmup, debug=options.debug)
    if not body.backward:
        step.replayed_forward = runner
    elif isinstance(forward := step.replayed_forward, CUDAGraphRunner):
        forward.other, runner.other, step.replayed_forward = runner, forward, None
    return runner
