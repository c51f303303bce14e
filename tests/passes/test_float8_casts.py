"""float8_matmul: which casts are saved and gathered, and which kernels compute them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from on_ranks import calls, insert, small, user_pass

from workbench.authoring.author import author
from workbench.graph.callables import kernels_of
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import kind_of
from workbench.pipeline.run_passes import capture_decompositions
from workbench.recipe.sections import PassSpec

pytestmark = pytest.mark.integration
NAME = "float8_matmul"
WO, TOKENS = "layers.0.attention.wo", 2 * 16
DECOMPOSE = PassSpec(name="inductor_decomposition")
NO_WORK = ("view", "bookkeeping")


@pytest.fixture(scope="module")
def bfloat16(fake4):
    """llama3 of one layer on dp_shard 4, without values."""
    return author(small({"dp_shard": 4}).override({"precision.param": "bfloat16"}), fake4)


def converted(through, authored, **options):
    return through(authored, [{"name": NAME, "smallest": 16, **options}] if options else [])


def saved_for(pair, module, rows):
    """(dtypes of the matrices of `rows` rows that a layer saves, but for its own result; all bytes that are saved)."""
    saved = saved_tensors(*pair.graphs)
    return ({row.dtype for row in saved if row.module == module and row.shape[:1] == (rows,) and "mm" not in row.name},
            sum(row.held_bytes for row in saved))


def test_both_scalings_save_their_activations_in_float8(bfloat16, through):
    plain = saved_for(converted(through, bfloat16)[1], WO, TOKENS)
    whole, rows = (saved_for(converted(through, bfloat16, scaling=scaling)[1], WO, TOKENS)
                   for scaling in ("tensorwise", "rowwise"))
    assert (plain[0], whole[0], rows[0]) == ({"bfloat16"}, {"float8_e4m3fn"}, {"float8_e4m3fn"})
    assert whole[1] < rows[1] < 1.01 * whole[1] < 0.7 * plain[1]  # rowwise saves a scale for each column


def test_the_activations_of_a_product_that_stays_are_saved_as_they_are(bfloat16, through):
    """The fault that the test of saved activations must see: the weight gradient reads bfloat16."""
    every, some = (saved_for(converted(through, bfloat16, scaling="rowwise", products=products)[1], WO, TOKENS)
                   for products in (("forward", "input_gradient", "weight_gradient"), ("forward", "input_gradient")))
    assert some[0] == {"bfloat16"} and some[1] > 1.05 * every[1]


def test_rowwise_gathers_bfloat16_and_saves_float8_of_it(bfloat16, through):
    found = converted(through, bfloat16, scaling="rowwise")
    assert {c.dtype for c in list_collectives(found[2]) if c.kind == "all_gather"} == {"bfloat16"}
    assert found[0][NAME].verdict("collectives").outcome == "PASS"
    assert saved_for(found[1], WO, 128)[0] == {"float8_e4m3fn"}  # its weight, as the input gradient reads it


# kernels: Inductor's C++ code for both graphs, on a fake world


@pytest.fixture(scope="module")
def compiled(bfloat16, through):
    """`compiled(*joint passes)`: (a graph, its kernels) of forward and backward; each list of passes once."""
    kept = {}

    def of(*passes):
        if (key := str(passes)) not in kept:
            record = through(bfloat16, [DECOMPOSE, *passes], ["full_inductor_compilation"],
                             decompositions=capture_decompositions([DECOMPOSE]))[0]["full_inductor_compilation"]
            kept[key] = list(zip(record.before, kernels_of(record.before, record.after), strict=True))
        return kept[key]

    return of


def float8(scaling):
    return {"name": NAME, "smallest": 16, "scaling": scaling}


def casts(graph):
    """Each cast to float8, and the operator that computes what it casts, before views."""
    for cast in calls(graph, "prims.convert_element_type"):
        if cast.meta["val"].dtype is torch.float8_e4m3fn:
            source = cast.args[0].args[0].args[0]  # a float32 copy is multiplied by the reciprocal of the scale
            while kind_of(source) in NO_WORK:
                source = source.all_input_nodes[0]
            yield cast, source


def apart(found):
    """The casts that no kernel computes together with what they cast, by what computes that."""
    return Counter(kind_of(source) for graph, kernels in found for cast, source in casts(graph)
                   if not any({cast.name, source.name} <= set(kernel.nodes) for kernel in kernels.kernels))


def generated(found):
    return [kernel for _, kernels in found for kernel in kernels.kernels if kernel.kind == "cpp"]


def casts_alone(found, plain):
    """The kernels that cast, and compute nothing that is in the graphs without float8."""
    old = {node.name for graph, _ in plain for node in graph.graph.nodes if kind_of(node) not in NO_WORK}
    new = {cast.name for graph, _ in found for cast, _ in casts(graph)}
    return [kernel for kernel in generated(found) if new & set(kernel.nodes) and not old & set(kernel.nodes)]


ALONE = {"tensorwise": {"attention": 2}, "rowwise": {"attention": 4, "wait": 14}}
"""Library kernels compute attention's output and the gradient of its values, and collectives gather the seven weights:
a cast has no kernel to join. Rowwise casts each of them twice.
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("scaling", "every", "kernels", "only_cast"), [
    ("tensorwise", 21, 45, 4), pytest.param("rowwise", 36, 46, 5, marks=pytest.mark.nightly)])
def test_casts_fuse_into_their_producers_where_a_kernel_is_generated(compiled, scaling, every, kernels, only_cast):
    plain, found = compiled(), compiled(float8(scaling))
    assert sum(len(list(casts(graph))) for graph, _ in found) == every
    assert apart(found) == ALONE[scaling]
    # a tensor's scale is known only after its last element: the kernel that casts follows the one that finds the amax
    assert len(generated(plain)) == 31 and len(generated(found)) <= kernels
    assert len(casts_alone(found, plain)) <= only_cast


@torch.library.custom_op("float8_casts::barrier", mutates_args=())
def barrier(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


barrier.register_fake(torch.empty_like)


def cast_behind_a_barrier(gm):
    """The cast of the first product's input reads it through an operator that Inductor cannot fuse."""
    wide = calls(gm, "aten._scaled_mm")[0].args[0].args[0].args[0]
    given = wide.args[0]
    wide.replace_input_with(given, insert(gm, given, torch.ops.float8_casts.barrier.default, given))
    return gm


@pytest.mark.nightly  # a compilation
def test_a_cast_behind_a_barrier_is_found(compiled):
    with user_pass("cast_behind_a_barrier", cast_behind_a_barrier, numerics="lossy", tolerance=0.4) as name:
        found = compiled(float8("tensorwise"), name)
    assert apart(found) - Counter(ALONE["tensorwise"]) and len(generated(found)) > 45
