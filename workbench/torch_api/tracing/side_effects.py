"""What a traced forward reads and changes in Python. Dynamo guards and replays it, and a capture for export does not.

Source: torch/_dynamo/output_graph.py (`OutputGraph.get_replayed_side_effect_source_refs`),
torch/_dynamo/side_effects.py (`SideEffects.store_attr_mutations`), torch/_dynamo/variables/dicts.py
(`SideEffectsProxyDict`), torch/_dynamo/variables/user_defined.py (`UserDefinedObjectVariable.var_getattr`).
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple
from unittest import mock

from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, TensorVariable, dicts, user_defined
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from workbench.torch_api.module_paths import MODULES, clean_path
from workbench.torch_api.tracing.own_code import LEAF, is_own, is_weight
from workbench.torch_api.tracing.watched import named_sources

_REFS = "get_replayed_side_effect_source_refs"
_GRADIENT, _VERSION = "method_attr_grad", "method_attr__version"
_GET = "var_getattr" if hasattr(VariableTracker, "var_getattr") else "tp_getattro_impl"  # by torch version
_ARRAY = "___from_numpy("
_HELD = re.compile(rf"^L\['\w+'\]((?:{MODULES})*)(?:\.(\w+))?")
_WHOLE = ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "DICT_VERSION")
_IMPORTED = re.compile(r"^G\['__import_\w+'\]")
_TORCHS = "G['__import_torch_"


class SideEffect(NamedTuple):
    """What a forward does beside its result, in a module, which is given by its path.

    kind: "buffer" or "attribute", assigned to `name`. "contents": a container or object that attribute `name` holds
    is changed. "outside": `name` is a global variable, a variable of another function, or an argument, and is changed.
    "on tensor": attribute `name` of a tensor is looked for, and then assigned.
    "tensor": a tensor's attribute `name`, "grad" or "_version", is read, which the step changes, or "is_leaf" or
    "grad_fn" of a weight that is gathered. "setting": torch's
    settings of these names, such as "default_dtype", are others after the forward.
    """

    module: str
    name: str
    kind: str


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Inside, collects the sources of the attributes that a traced forward looks for before it assigns them.

    Dynamo guards the attributes that are there, and not all that are absent: `"seen" in vars(self)` and the
    AttributeError of `self.seen` leave no guard. `source.*` stands for all attributes of an object.
    """
    read: set[str] = set()

    def note(variable: Any, effects: Any, name: str) -> None:
        if variable.source is not None and not effects.has_pending_mutation_of_attr(variable, name):
            read.add(f"{variable.source.name}.{name}")

    table: Any = getattr(dicts, "SideEffectsProxyDict", dict)  # not in every torch
    contains, item, names = table.__contains__, table.__getitem__, table.__iter__
    get: Callable[..., Any] = getattr(user_defined.UserDefinedObjectVariable, _GET)

    def noted_contains(self: Any, key: Any) -> Any:
        note(self.item, self.side_effects, self._maybe_unwrap_key(key))
        return contains(self, key)

    def noted_item(self: Any, key: Any) -> Any:
        note(self.item, self.side_effects, self._maybe_unwrap_key(key))
        return item(self, key)

    def noted_names(self: Any) -> Any:
        note(self.item, self.side_effects, "*")
        return names(self)

    def noted_get(self: Any, tx: Any, name: str) -> Any:
        note(self, tx.output.side_effects, name)
        return get(self, tx, name)

    build: Callable[..., Any] = VariableBuilder.__call__

    def noted_build(self: Any, value: Any) -> Any:  # also what Dynamo does not guard, such as in Python's own modules
        read.add(_name(self.source))
        return build(self, value)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(VariableBuilder, "__call__", noted_build))
        stack.enter_context(mock.patch.object(user_defined.UserDefinedObjectVariable, _GET, noted_get))
        if table is not dict:
            stack.enter_context(mock.patch.multiple(
                table, __contains__=noted_contains, __getitem__=noted_item, __iter__=noted_names))
        yield read


@contextlib.contextmanager
def noted_side_effects(read: set[str]) -> Iterator[list[SideEffect]]:
    """Inside, collects what a traced forward changes in Python, and the gradients that it reads.

    read: the set of `noted_reads`, in which this must run; gets the sources that Dynamo guards.

    A write into a tensor in place is not collected, since a capture contains it. Neither is a tensor or container that
    the forward assigns to an attribute for its caller, unless the forward reads the attribute before, nor a container
    that is empty before and after. Nothing is collected where this torch lacks the method.
    """
    found: list[SideEffect] = []
    refs = getattr(OutputGraph, _REFS, None)
    if refs is None:
        yield found
        return

    settings = GlobalStateGuard()
    cached: list[tuple[str, Any, Any]] = []
    asked: set[tuple[Any, str]] = set()

    def noted(self: Any, **options: Any) -> Any:
        if not settings.check():
            found.append(SideEffect("", " ".join(settings.reason().split()), "setting"))
        found.extend(SideEffect("", name, "outside") for name, value, was in cached if _contents(value) != was)
        found.extend(effect for effect in _of_graph(self, read) if effect not in found)  # asked twice
        return refs(self, **options)

    gradient: Callable[..., Any] = getattr(TensorVariable, _GRADIENT, lambda self, tx: None)
    version: Callable[..., Any] = getattr(TensorVariable, _VERSION)

    get: Callable[..., Any] = getattr(TensorVariable, _GET)
    store: Callable[..., Any] = SideEffects.store_attr
    call: Callable[..., Any] = WrapperUserFunctionVariable.call_function

    def note(tx: Any, name: str) -> None:
        path = next(iter([*tx.nn_module_stack.values()][-1:]), ("",))[0]
        found.append(SideEffect(clean_path(path), name, "tensor"))

    def noted_get(self: Any, tx: Any, name: str) -> Any:
        if not tx.output.side_effects.has_pending_mutation_of_attr(self, name):
            asked.add((self, name))
        if name in LEAF and is_own(tx.f_code.co_filename) and is_weight(self):
            note(tx, name)
        return get(self, tx, name)

    def noted_store(self: Any, item: Any, name: str, *given: Any, **named: Any) -> None:
        if (item, name) in asked:
            found.append(SideEffect("", name, "on tensor"))
        found.extend(SideEffect("", function, "outside") for function, value, _ in cached if value is item)
        store(self, item, name, *given, **named)

    def noted_call(self: Any, tx: Any, *given: Any) -> Any:
        result = call(self, tx, *given).realize()
        if hasattr(self.wrapper_obj, "cache_info"):  # traced as if it had no cache
            cached.append((f"{self.wrapper_obj.__name__}()", result, _contents(result)))
        return result

    def noted_gradient(self: Any, tx: Any) -> Any:
        if (result := gradient(self, tx)) is None and self.requires_grad:
            note(tx, "grad")
        return result

    def noted_version(self: Any, tx: Any) -> Any:
        note(tx, "_version")
        return version(self, tx)

    with (mock.patch.object(OutputGraph, _REFS, noted),
          mock.patch.object(WrapperUserFunctionVariable, "call_function", noted_call),
          mock.patch.object(TensorVariable, _GET, noted_get),
          mock.patch.object(SideEffects, "store_attr", noted_store),
          mock.patch.object(TensorVariable, _GRADIENT, noted_gradient, create=True),
          mock.patch.object(TensorVariable, _VERSION, noted_version)):
        yield found


def _contents(variable: Any) -> list[Any]:
    """What a list, tuple, dictionary or set that the forward made holds, to be compared with what it holds later."""
    if isinstance(variable, ConstDictVariable):
        return [*variable.items.items()]
    return [*variable.items] if isinstance(variable, BaseListVariable) else []


def _of_graph(output: Any, read: set[str]) -> Iterator[SideEffect]:
    effects = output.side_effects
    for guard in output.guards:
        source, kind = guard.originating_source.name, guard.create_fn
        about = getattr(kind, "keywords", {})
        read |= {source, f"{source}.{about['attr']}"} if "attr" in about else {source}  # of hasattr
        if "key" in about:  # of `in` and `get`
            read.add(f"{source}[{about['key']!r}]")
        if getattr(kind, "__name__", "") in _WHOLE:
            read.add(f"{source}.*")
    read |= {source.removeprefix(_ARRAY)[:-1] for source in read if source.startswith(_ARRAY)}
    for node in output.graph.find_nodes(op="placeholder"):
        source = str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
        if source.startswith(_ARRAY) and node.meta["example_value"]._version:
            yield _placed(source.removeprefix(_ARRAY)[:-1])
    objects = {id(each): each for each in effects.keepalive}
    for key, variable in list(effects.id_to_variable.items()):  # an in-place check adds some
        existed = isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        named = existed and (source := _name(variable.source)) and not source.startswith(_TORCHS)
        if named and effects.is_modified(variable):
            assigned = effects.store_attr_mutations.get(variable, {})
            yield from _effects(variable, objects.get(key), assigned, read)
    read |= {*named_sources(read, output.local_scope, output.global_scope)}


def _name(source: Any) -> str:
    """Where Dynamo found an object; "" for one that it made itself."""
    try:
        return "" if source is None else str(source.name)
    except NotImplementedError:  # of a temporary of its own
        return ""


def _effects(variable: Any, original: Any, assigned: dict[str, Any], read: set[str]) -> Iterator[SideEffect]:
    """original: the object that the variable stands for, as it is before the forward.

    read: the sources whose values at the capture the graph relies on.
    """
    source = str(variable.source.name)
    if source.endswith(("._buffers", "['_buffers']")):
        kept = {key.vt.as_python_constant(): value for key, value in variable.items.items()}
        for name in kept | original:
            if not _is_kept(kept.get(name), original.get(name), f"{source}['{name}']"):
                yield SideEffect(_path(source), name, "buffer")
    elif assigned:
        of_module = isinstance(variable, UnspecializedNNModuleVariable)
        for name, value in assigned.items():
            number = isinstance(value, ConstantVariable)
            if not _has(original, name, value) if number else read & {f"{source}.{name}", f"{source}.*"}:
                yield _placed(source, name, of_module)
    elif not isinstance(original, Sized) or len(original) or getattr(variable, "items", True):
        yield _placed(source)


def _is_kept(value: Any, original: Any, source: str) -> bool:
    """Whether a buffer is still the tensor, or the None, that it was; it may be written in place."""
    if not isinstance(value, TensorVariable):
        return original is None or (value is not None and not isinstance(value, ConstantVariable))
    return str(value.source.name) == source if value.source is not None else _in_place(value.as_proxy().node)


def _placed(source: str, name: str = "", of_module: bool = False) -> SideEffect:
    """What is changed: the object of this source, or its attribute `name`."""
    own = _HELD.match(source)
    if own and own[3]:
        return SideEffect(_path(own[1]), own[3], "contents")
    if own and of_module:
        return SideEffect(_path(own[1]), name, "attribute")
    words = [word for word in re.findall(r"\w+", _IMPORTED.sub("", source)) if word not in ("L", "G")]
    return SideEffect("", ".".join(dict.fromkeys(filter(None, [*words[:1], name]))), "outside")


def _path(source: str) -> str:
    return ".".join(re.findall(MODULES, source))


def _has(original: Any, name: str, value: ConstantVariable) -> bool:
    """Whether an attribute has this value before it is assigned."""
    was, new = inspect.getattr_static(original, name, None), value.as_python_constant()
    return type(was) is type(new) and was == new


def _in_place(node: Any) -> bool:
    """Whether the node's result is a tensor that it wrote to, as in `x.add_(1)` and `torch.mv(a, b, out=x)`."""
    return "out" in node.kwargs or (node.op == "call_method" and node.target.endswith("_"))
