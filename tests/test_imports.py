"""The readers of imports, which other tests of the package's shape use, can find what they look for."""

import pytest
from imports import imported_modules, private_torch


def test_modules_are_named_from_the_package_on() -> None:
    for bad in ("from . import doctor", "import lessons.x"):
        with pytest.raises(ValueError, match="line 1 imports"):
            list(imported_modules(bad, []))


def test_private_names_of_torch_are_found_and_operators_are_none() -> None:
    for bad in ("import torch._dynamo", "from torch._inductor import config", "import torch\ntorch._C.x()",
                "from torch.distributed.tensor import _api", "import torch.distributed as d\nd._symm(1)",
                "from torch.testing._internal.distributed import fake_pg", "from torch import fx\nfx._x"):
        assert private_torch(bad, "m"), bad
    for good in ("import torch\ntorch.ops.aten._to_copy.default", "import torch\ntorch.Tensor.__add__", "x._y"):
        assert private_torch(good, "m") == [], good
