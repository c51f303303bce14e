import pytest
from on_ranks import FSDP4, small

from workbench import author, capture, partition, run_joint, run_partitioned


@pytest.fixture(scope="module")
def authored(fake4):
    """llama3 of one layer on dp_shard 4, without values."""
    return author(small(FSDP4), fake4)


@pytest.fixture(scope="session")
def captured_once():
    """`captured_once(authored)`: a fork of the model's one capture."""
    kept = {}

    def fork(authored, decompositions=None):
        key = id(authored), frozenset(decompositions or ())
        if key not in kept:  # with the model, so that its id stays its own
            kept[key] = authored, capture(authored, decompositions=decompositions)
        return kept[key][1].fork()

    return fork


@pytest.fixture(scope="session")
def through(captured_once):
    """`through(authored, joint_passes, passes)`: (records by name, partitioned pair, joint graph before partition).

    What it captured once it forks: the model stays as it is.
    """

    def go(authored, joint=(), passes=(), decompositions=None):
        graph = captured_once(authored, decompositions)
        records = run_joint(graph, joint)
        last = graph.graph
        pair = partition(graph)
        records += run_partitioned(pair, passes)[0]
        return {r.name: r for r in records}, pair, last

    return go
