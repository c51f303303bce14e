"""Inductor's code is followed statement by statement: what is allocated, what takes whose place, what is alive when."""

import pytest

from workbench.errors import WorkbenchError
from workbench_lessons.l12_inside_inductor.buffers import read_buffers

HEAD = "def call(self, args):\n    x, w = args\n    args.clear()\n    assert_size_stride(x, (4, 8), (8, 1), 'input')\n"
REUSED = """
    buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
    extern_kernels.mm(x, w, out=buf0)
    del x
    buf1 = buf0; del buf0  # reuse
    cpp_fused_relu_0(buf1)
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf2 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        triton_0.run(buf1, buf2, 32, stream=stream0)
    del buf1
    return (buf2, )
"""
SIZES = {f"buf{i}": 128 for i in range(3)}


def test_a_buffer_in_place_of_another():
    found = read_buffers(HEAD + REUSED, SIZES)
    assert [(b.name, b.memory, b.how, b.first, b.last) for b in found.buffers] == [
        ("buf0", 0, "allocated", 0, 0), ("buf1", 0, "reuses", 1, 2), ("buf2", 1, "allocated", 2, 2)]
    assert found.calls == ("extern_kernels.mm", "cpp_fused_relu_0", "triton_0")
    assert (found.alive, found.allocations, found.asked, found.peak) == ((128, 128, 256), 2, 256, 256)


def test_a_pool_and_what_eager_returns():
    found = read_buffers(HEAD + """
    pool0 = empty_strided_cpu((256,), (1,), torch.uint8)
    buf0 = alloc_from_pool(pool0, 0, torch.float32, (4, 8), (8, 1))
    buf1 = alloc_from_pool(pool0, 128, torch.float32, (4, 8), (8, 1))
    cpp_fused_0(x, buf0, buf1)
    buf2 = torch.ops.aten.exp.default(buf0)
    del pool0, buf0, buf1
    extern_kernels.mm(buf2, w, out=buf2)
    return (buf2, )
""", SIZES)
    assert [(b.memory, b.how) for b in found.buffers] == [(0, "from a pool"), (0, "from a pool"), (1, "by eager")]
    assert (found.alive, found.asked) == ((256, 384, 128), 384)


def test_sizes_that_a_run_decides_are_named_and_count_for_nothing():
    found = read_buffers(HEAD + """
    buf0 = torch.ops.aten.nonzero.default(x)
    u0 = buf0.size(0)
    buf1 = buf0
    buf2 = empty_strided_cpu((u0, 8), (8, 1), torch.float32)
    cpp_fused_0(buf1, buf2, u0)
    return (buf2, )
""", {"buf0": 0, "buf1": None, "buf2": None})
    assert [(b.name, b.bytes, b.how) for b in found.buffers] == [
        ("buf0", None, "by eager"), ("buf2", None, "allocated")]
    assert (found.unknown, found.memory, found.peak) == (("buf0", "buf2"), (None, None), 0)
    assert found.summary() == "2 buffers, 2 allocations, of sizes known at run time"
    some = read_buffers(HEAD + REUSED, SIZES | {"buf2": None})
    assert some.summary().endswith("peak 256, without the 1 whose size is known at run time")
    with pytest.raises(WorkbenchError, match="no function `call`"):
        read_buffers("def forward(x): return x", {})
    # a size that is known by a second name counts while the operator runs
    found = read_buffers(HEAD + """
    buf0 = torch.ops.aten.exp.default(x)
    buf1 = buf0
    cpp_fused_0(buf1, buf1)
    return (buf1, )
""", {"buf0": 0, "buf1": 128})
    assert (found.alive, found.asked) == ((128, 128), 128)
