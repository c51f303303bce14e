"""The private state of torch that stamping rewrites: fake tensors, descriptors and the records of AOTAutograd.

After stamping, AOTAutograd's records must look as if it had traced all blocks. They are lists with one entry for each
argument, input or output, and each list is extended by copies of one block's entries. The alternative, a partition and
an autograd function of our own, would have to repeat what torch does around them: subclasses, written buffers, saved
tensors, checks of the tangents.
Source: torch/_functorch/_aot_autograd/schemas.py (AOTState, AOTGraphCapture, ViewAndMutationMeta, SubclassMeta).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors, subclass_utils
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from workbench.errors import NotAlike
from workbench.torch_api.aot import like, put
from workbench.torch_api.ops import is_symbolic

Key = tuple[str, str | None]
"""The meaning of a list's entry: its kind, and its parameter or buffer, or None."""
Places = Sequence[tuple[int, int | None]]
Order = Callable[[Sequence[Key]], Places]
"""From the keys of a list to the entries of the longer one, each a place in the list and a copy's number or None."""
Rename = Callable[[str, int | None], str]
"""The name in the large module of a path of the small one, in that copy."""


def key_of(desc: Any) -> Key:
    """The kind of a descriptor, without wrappers for subclasses, and its parameter or buffer."""
    kinds = []
    while desc is not None:
        if not isinstance(desc, descriptors.SubclassGetAttrAOTInput | descriptors.SubclassGetAttrAOTOutput):
            kinds.append(type(desc).__name__)
        if isinstance(desc, descriptors.ParamAOTInput | descriptors.BufferAOTInput):
            return " of ".join(kinds), desc.target
        desc = next((getattr(desc, k) for k in ("base", "grad_of", "mutated_input") if hasattr(desc, k)), None)
    return " of ".join(kinds), None


def renamed(desc: Any, rename: Callable[[str], str]) -> Any:
    """The descriptor with another name for its parameter or buffer."""
    if not isinstance(desc, descriptors.AOTInput | descriptors.AOTOutput):
        return desc
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(desc):  # type: ignore[arg-type]
        value = getattr(desc, field.name)
        changes[field.name] = rename(value) if field.name == "target" else renamed(value, rename)
    return dataclasses.replace(desc, **changes)  # type: ignore[type-var]


def copy_of(desc: Any, rename: Rename, turn: int | None) -> Any:
    """The descriptor for a copy of its block."""
    return renamed(desc, lambda name: rename(name, turn))


Storage = torch.UntypedStorage


def storages(value: Any) -> list[Storage]:
    """The storages of all tensors in a value, in their order."""
    if type(value) is FakeTensor:
        return [value.untyped_storage()]
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def new_storage(like: Storage) -> Storage:
    """A storage of the same size, without memory."""
    return Storage(like.nbytes(), device="meta")


def with_storages(value: Any, given: Sequence[Storage]) -> Any:
    """The value with other storages for its fake tensors."""
    if type(value) is FakeTensor:
        return _on(value, given[0])
    leaves, spec = pytree.tree_flatten(value)
    left = iter(given)
    made = [_on(leaf, next(left)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(made, spec)


def _on(value: Any, storage: Storage) -> FakeTensor:
    element = torch.empty(0, dtype=value.dtype, device="meta")
    element.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    return FakeTensor(value.fake_mode, element, value.device)


def face(value: Any) -> list[Any]:
    """What must be equal in two values: the layout of a tensor, the mesh of an object that stands for one."""
    leaves, spec = pytree.tree_flatten(value)
    if is_symbolic(leaves):
        raise NotAlike("a size is read from the device in each step, and each block has its own")
    return [spec, *(
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, type(x))
        if isinstance(x, torch.Tensor) else getattr(x, "real_obj", x) for x in leaves)]


class Builder:
    """A new graph, node by node, from those of another; `module` holds it once it is finished."""

    module: torch.fx.GraphModule

    def __init__(self, old: torch.fx.GraphModule) -> None:
        self.old, self.graph = old, torch.fx.Graph()

    def add(self, old: torch.fx.Node, name: str, args: Any, kwargs: Any, meta: dict[str, Any]) -> torch.fx.Node:
        """A node with the operator of `old`."""
        node = put(self.graph, old, self.graph._graph_namespace.create_name(name, None), args, kwargs, meta)
        if node.op == "placeholder":
            node.target = node.name
        return node

    def finish(self, output: torch.fx.Node, results: list[Any], meta: dict[str, Any], inputs: Places,
               outputs: Places) -> None:
        """Add the output; `inputs` and `outputs` say which of the small graph's each of the new ones is."""
        given = output.args[0]
        self.add(output, "output", (results if isinstance(given, list) else tuple(results),), {}, meta)
        self.module = like(self.old, self.graph)
        info = self.old.graph._codegen.pytree_info  # type: ignore[attr-defined]
        codegen = copy.copy(self.old.graph._codegen)
        codegen.pytree_info = info._replace(  # type: ignore[attr-defined]
            in_spec=_longer(info.in_spec, inputs), out_spec=_longer(info.out_spec, outputs))
        self.graph.set_codegen(codegen)
        self.module.graph.set_codegen(codegen)
        if hasattr(self.old, "shape_env"):
            self.module.shape_env = self.old.shape_env  # type: ignore[assignment]


def _longer(spec: Any, places: Places) -> Any:
    parts = pytree.tree_unflatten(range(spec.num_leaves), spec)
    if any(not isinstance(place, int) for part in parts for place in part):
        raise NotAlike("the joint graph's inputs or outputs are nested")
    longer = [type(part)(place for place, _ in places if place in set(part)) for part in parts]
    return pytree.tree_structure(type(parts)(longer))


def lengthen(
    export: Any, tracing_context: Any, order: Order, rename: Rename, module: torch.nn.Module, inputs: Sequence[Any]
) -> None:
    """Turn the records of `export`, of the small module, into those of `module`. Its graph is the longer one already.

    inputs: the example values of the longer graph's placeholders.
    """
    state, captured = export._aot_state, export._aot_graph_capture
    metadata, subclasses = state.fw_metadata, captured.maybe_subclass_meta
    _refuse_unknown(captured.wrappers, metadata)

    keys = [key_of(d) for d in state.flat_args_descs]
    flat = order(keys)
    state.flat_args = [state.flat_args[place] for place, _ in flat]
    state.flat_args_descs = [copy_of(state.flat_args_descs[place], rename, turn) for place, turn in flat]
    parameters = [key_of(d) for d in state.flat_args_descs]
    export.params_spec = [name for kind, name in parameters if name is not None and kind == "ParamAOTInput"]
    export.buffers_spec = [name for kind, name in parameters if name is not None and kind == "BufferAOTInput"]
    static = [i for i, (_, name) in enumerate(parameters) if name is not None]
    state.aot_config = dataclasses.replace(
        state.aot_config, num_params_buffers=len(static),
        static_input_indices=_moved(state.aot_config.static_input_indices, flat),
    )
    state.fw_metadata = _metadata(metadata, keys, flat, order)

    primals, tangents = captured.updated_flat_args
    descs, theirs = captured.updated_flat_args_descs
    inner_keys = [key_of(d) for d in descs]
    inner = order(inner_keys)
    captured.updated_flat_args = (
        [given if turn and isinstance(given, torch.Tensor) else primals[place]
         for (place, turn), given in zip(inner, inputs, strict=False)], tangents)
    captured.updated_flat_args_descs = ([copy_of(descs[place], rename, turn) for place, turn in inner], theirs)
    if subclasses is not None:
        longer = copy.copy(subclasses)
        longer.fw_metadata = _metadata(subclasses.fw_metadata, inner_keys, inner, order)
        if subclasses.grad_input_metas is not None:
            longer.grad_input_metas = _renumbered([subclasses.grad_input_metas[place] for place, _ in flat])
        captured.maybe_subclass_meta = longer
    _set_parameters(tracing_context, module, [*export.params_spec, *export.buffers_spec])


def _set_parameters(context: Any, module: torch.nn.Module, names: list[str]) -> None:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    context.params_flat = [tensors[name] for name in names]
    with tracing(context):
        split = subclass_utils.unwrap_tensor_subclasses_with_indices_to_original(context.params_flat)
    context.params_flat_unwrap_subclasses, context.params_unwrapped_to_flat_index = split


def _refuse_unknown(wrappers: Sequence[Any], metadata: Any) -> None:
    """Raise NotAlike for records that hold positions and that are empty for this project's models."""
    for wrapper in wrappers:
        if getattr(wrapper, "needs_post_compile", False):
            raise NotAlike(f"inputs share storage: torch's {type(wrapper).__name__} rearranged them")
    for name in ("act_input_indices", "act_input_paths", "tokens", "num_intermediate_bases",
                 "indices_of_inputs_that_requires_grad_with_mutations_in_bw", "num_graphsafe_rng_states"):
        if getattr(metadata, name, None):
            raise NotAlike(f"torch's metadata of the inputs holds {name}")


def _moved(places: Sequence[int], order: Places) -> list[int]:
    wanted = set(places)
    return [i for i, (place, _) in enumerate(order) if place in wanted]


def _metadata(metadata: Any, keys: Sequence[Key], inputs: Places, order: Order) -> Any:
    """ViewAndMutationMeta for more inputs. It recomputes the fields that it derives from them."""
    written = [("written", keys[i][1]) for i in metadata.mutated_inp_runtime_indices]
    results = len(metadata.subclass_fw_graph_out_meta) - len(written)
    outputs = order([*written, *[("result", None)] * results])
    changes: dict[str, Any] = {
        "input_info": [metadata.input_info[place] for place, _ in inputs],
        "subclass_inp_meta": _renumbered([metadata.subclass_inp_meta[place] for place, _ in inputs]),
        "subclass_fw_graph_out_meta": _renumbered([metadata.subclass_fw_graph_out_meta[place] for place, _ in outputs]),
        "static_input_indices": _moved(metadata.static_input_indices, inputs),
    }
    if streams := metadata.mutated_inp_stream_indices:
        changes["mutated_inp_stream_indices"] = [streams[place] for place, _ in outputs if place < len(written)]
    return dataclasses.replace(metadata, **changes)


def _renumbered(metas: Sequence[Any]) -> list[Any]:
    """Copies of the entries with the positions of each subclass's parts among the flat tensors, numbered again."""
    found, at = [], 0
    for meta in metas:
        made = copy.copy(meta)
        if hasattr(made, "flat_tensor_start_idx"):
            _shift(made, at - made.flat_tensor_start_idx)
            at += made.arg_count
        else:
            made.unwrapped_idx, at = at, at + 1
        found.append(made)
    return found


def _shift(meta: Any, by: int) -> None:
    meta.flat_tensor_start_idx += by
    meta.attrs = {name: copy.copy(part) for name, part in meta.attrs.items()}
    for part in meta.attrs.values():
        if hasattr(part, "flat_tensor_start_idx"):
            _shift(part, by)
        elif hasattr(part, "unwrapped_idx"):
            part.unwrapped_idx += by
