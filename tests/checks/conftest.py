import pytest

from workbench.world.fake import fake_world


@pytest.fixture
def fake4():
    with fake_world(4) as world:
        yield world
