"""The picture of buffers says who lies in whose memory."""

from __future__ import annotations

from workbench.graph.read.buffers import Buffer, Buffers
from workbench_lessons.l12_inside_inductor.pictures import buffers

FOUND = Buffers((Buffer("buf0", 4096, 0, "allocated", 0, 0), Buffer("buf1", 4096, 0, "reuses", 1, 1)),
                ("extern_kernels.mm", "cpp_fused_relu_0"), (4096, 4096), (4096,))
UNKNOWN = Buffers((Buffer("buf0", None, 0, "by eager", 0, 0),), ("torch.ops.aten.nonzero.default",), (0,), (None,),
                  ("buf0",))


def test_rows_are_memory():
    picture = buffers(FOUND, "two")
    assert picture.text.splitlines() == [
        "two: 2 buffers in 1 allocation of 4,096 bytes, peak 4,096",
        "  4,096 B: buf0 allocated, calls 0 to 0; buf1 reuses, calls 1 to 1"]
    assert picture.png.startswith(b"\x89PNG") and "from call to call" in picture.alt


def test_without_bytes_there_is_no_curve():
    picture = buffers(UNKNOWN)
    assert picture.height < buffers(FOUND).height
    assert picture.text.splitlines()[1] == "  known at run time: buf0 by eager, calls 0 to 0"


def test_a_pool_has_no_buffer_of_its_own():
    assert buffers(Buffers((), (), (), (64,))).text.endswith("64 B: a pool")
