"""What the tests of collectives' orders share."""

import pytest
from stack import split

from workbench import fake_world


@pytest.fixture(scope="module")
def pair():
    """Forward and backward of a few layers with FSDP over two ranks."""
    with fake_world(2) as world:
        yield split(world)
