"""The page's simulator against Python's, walls, and what an order that cannot be is told."""

import pytest
from page_code import answer_of
from stack import random_order, split
from unpacked import unpacked

from workbench import WorkbenchError, device_spec, fake_world
from workbench_lessons.course.grading import grade
from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder


@pytest.fixture(scope="module")
def pair():
    """Forward and backward of a few layers with FSDP over two ranks."""
    with fake_world(2) as world:
        yield split(world)


@pytest.fixture
def view(pair):
    return CollectiveOrder(pair.forward, "h200x2")


SIMULATE = """console.log(JSON.stringify(given.orders.map((order) => {
    const run = simulate(given.data, order);
    return [run.exposedMs, run.total, run.peak];
})))"""


@pytest.mark.parametrize(("part", "device"), [("backward", "h200x2"), ("forward", "h100x2")])
def test_both_simulators_agree_on_random_orders(pair, part, device):
    slow = device_spec("h200x2")  # compute beside collectives slows down, and a product delays on the other
    assert max(slow.compute_slowdown, slow.collective_slowdown) > 1
    assert device_spec("h100x2").product_delays > 0.5 and not slow.product_delays
    view = CollectiveOrder(pair.by_part[part], device)
    data = unpacked(view.data)
    orders = [random_order(data["needs"], data["fixed"], seed) for seed in range(40)]
    found = answer_of("simulator.js", SIMULATE, {"data": data, "orders": orders})
    wanted = [view.measure([data["names"][i] for i in order]) for order in orders]
    differ = {name: len({each[name] for each in wanted}) for name in wanted[0]}
    assert differ["exposed ms"] > 5 and (differ["peak bytes"] > 5 or part == "forward"), differ
    for (exposed, total, peak), figures in zip(found, wanted, strict=True):
        assert exposed == pytest.approx(figures["exposed ms"], abs=6e-5)
        assert total == pytest.approx(figures["step ms"], abs=6e-5)
        assert peak == figures["peak bytes"]
    data["ms"] = [ms * 1.5 for ms in data["ms"]]  # a seeded fault
    (wrong,) = answer_of("simulator.js", SIMULATE, {"data": data, "orders": orders[:1]})
    assert wrong[0] != pytest.approx(wanted[0]["exposed ms"], abs=6e-5)


MOVE = """let order = given.data.names.map((_, i) => i); const seen = []; let step;
while ((step = moved(given.data, order, given.node, -1)).order) { order = step.order; seen.push(order); }
console.log(JSON.stringify([seen, step.wall]))"""


def test_a_gather_moves_to_its_wall_and_every_stop_is_legal(view):
    data = unpacked(view.data)
    last = [i for i, name in enumerate(data["names"]) if name.startswith("all_gather")][-1]
    stops, wall = answer_of("simulator.js", MOVE, {"data": data, "node": last})
    assert len(stops) >= 4 and wall is None  # a gather reads an input's shard alone: only the graph's start stops it
    for order in stops:
        view.order = [data["names"][i] for i in order]
        assert view.message == ""
    product = data["names"].index("mm_1")
    _, (needed, reader) = answer_of("simulator.js", MOVE, {"data": data, "node": product})
    assert needed in data["needs"][reader]


def test_a_node_moves_by_name_with_what_must_come_along_and_not_through_a_wall(view):
    last = [name for name in view.given if name.startswith("all_gather")][-1]
    product = next(name for name in view.given if name.startswith("mm"))
    view.move(last, product)
    assert view.message == "" and view.order.index(last) < view.order.index(product)
    assert view.figures["exposed ms"] < view.measure(view.given)["exposed ms"]
    cast = view.reads[last][0]
    assert view.order.index(cast) == view.order.index(last) - 1 and sorted(view.order) == sorted(view.given)
    moved = view.order
    for name, before, said in ((last, cast, f"wall: {last} reads {cast}"),
                               ("nowhere", cast, "'nowhere' is no node of this graph")):
        with pytest.raises(WorkbenchError, match=said):
            view.move(name, before)
    assert view.order == moved


def test_a_wait_moves_to_the_right_with_the_views_of_its_result(pair):
    view = CollectiveOrder(pair.backward, "h200x2")
    wait = next(name for name in view.given if name.startswith("wait") and "reduce_scatter" in view.reads[name][0])
    products = [name for name in view.given if name.startswith("mm")]
    after = next(name for name in products if view.given.index(name) > view.given.index(wait))
    following = products[products.index(after) + 1]
    view.move(wait, following)
    reader = next(name for name in view.given if wait in view.reads[name])
    place = view.order.index
    assert view.message == "" and place(after) < place(wait) < place(reader) < place(following)


def test_an_order_that_cannot_be_is_told_so_in_the_verdict_words_and_is_not_graded(view):
    given = view.given
    for order, said in (([*given[:5], *reversed(given[5:-1]), given[-1]], "lint: FAIL (the graph is malformed: "),
                        (["nowhere", *given[1:]], f"the order is no permutation of the graph's nodes (forward, "
                         f"{len(given)} nodes): 1 names are not in the graph, nowhere first; 1 nodes are missing, ")):
        view.order = order
        assert view.message.startswith(said) and view.figures == {}
        with pytest.raises(WorkbenchError):
            view.result()
    view.order = given
    assert view.message == "" and view.result()["step ms"] > 0


def test_the_grader_takes_the_board_or_an_order_typed(pair):
    board = CollectiveOrder(pair.backward, "h200x2")
    captured, rival = (board.measure(order) for order in (board.given, board.rival))
    tight = {"exposed ms": captured["exposed ms"] * 3 / 4, "peak bytes": captured["peak bytes"]}
    loose = {name: rival[name] for name in tight}

    def ordered(answer, limits=tight):
        check = "workbench_lessons.l05_bucket_and_overlap.collective_order:ordered"
        return grade(check, answer, {"board": board, "at_most": limits})[:2]

    score, message = ordered(board)
    assert (score, message) == ordered(board.given) and score == 0 and "exposed ms" in message
    board.order = board.rival
    assert ordered(board, loose) == ordered(board.rival, loose) == (1.0, "every target met")
    assert ordered(board.given[:-1])[1].endswith("1 nodes are missing, output first")
    assert ordered(3)[1] == "give the board, or the names of all its nodes in their order"
