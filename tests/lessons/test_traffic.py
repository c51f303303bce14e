"""Loads and stores are counted in Inductor's own loops: a fused kernel has fewer, and a second load is seen."""

import pytest
import torch
from torch.nn.functional import silu

from workbench import WorkbenchError
from workbench.lab.inside_inductor import look_inside
from workbench_lessons.l12_inside_inductor.solution import peak, traffic
from workbench_lessons.l12_inside_inductor.traffic import accesses_of, bytes_moved, loop_body

pytestmark = pytest.mark.integration
A, B = torch.randn(64, 96), torch.randn(64, 96)


def gate(a, b):
    return silu(a) * b


def loss(x, weight, target):
    capped = 30 * torch.tanh(x @ weight / 30)
    return torch.logsumexp(capped, 1, keepdim=True) - capped.gather(1, target)


def test_fusion_saves_a_load_and_a_store():
    fused, apart = look_inside(gate, A, B), look_inside(gate, A, B, eager=["mul"])
    assert accesses_of(fused) == {"loads": 2, "stores": 1}
    assert (bytes_moved(fused), bytes_moved(apart)) == (3 * A.nbytes, 5 * A.nbytes)
    lines = loop_body(fused)
    assert [access for _, access in lines if access] == ["load", "load", "store"]
    assert not [line for line, _ in lines if "static_cast" in line or "auto" in line or ";" in line]


def test_a_matmul_loads_its_operands_once_and_a_row_that_is_needed_twice_is_loaded_twice():
    weight = torch.randn(96, 32)
    assert bytes_moved(look_inside(torch.mm, A, weight)) == A.nbytes + weight.nbytes + 64 * 32 * 4
    twice = bytes_moved(look_inside(lambda a: a - a.sum(1, keepdim=True), A))
    assert 3 * A.nbytes <= twice < 3 * A.nbytes + 4 * 64 * 96 * 4 // 3


def test_a_loss_in_parts_of_its_rows_loads_the_weight_again_and_one_in_parts_of_its_columns_does_not():
    x, weight, target = A, torch.randn(96, 1024), torch.randint(1024, (64, 1))
    whole, rows, columns = (bytes_moved(look_inside(each, x, weight, target))
                            for each in (loss, peak(loss), traffic()))
    assert rows - whole == 3 * weight.nbytes
    assert columns < whole * 6 // 5 < rows
    torch.testing.assert_close(traffic()(x, weight, target), loss(x, weight, target), atol=1e-4, rtol=0)


def test_code_without_a_loop_is_refused():
    with pytest.raises(WorkbenchError, match="has no C\\+\\+ kernel"):
        loop_body(look_inside(torch.mm, A, B.T))
