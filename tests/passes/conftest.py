import pytest

from workbench.world.fake import fake_world
from workbench.world.ranks import ranks


@pytest.fixture
def fake4():
    with fake_world(4) as world:
        yield world


@pytest.fixture
def fake8():
    with fake_world(8) as world:
        yield world


@pytest.fixture(scope="module")
def pool4():
    with ranks(4, backend="gloo", timeout=200, echo="none") as pool:
        yield pool
