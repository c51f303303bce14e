"""One value where the ranks agree, each distinct one where they do not."""

from dataclasses import dataclass

import torch

from workbench.notebook.draw.rank_values import RankValues
from workbench.world.cells import Shard


def shown(*values):
    return repr(RankValues(range(len(values)), values))


def test_agreement_is_bit_by_bit_and_shown_once():
    nan = torch.tensor([1.0, float("nan")])
    assert shown(nan, nan.clone()) == "ranks 0, 1: tensor([1., nan])"
    assert RankValues([0, 1], [{"a": [1, nan]}, {"a": [1, nan.clone()]}]).agree
    assert not RankValues([0, 1], [torch.tensor(0.0), torch.tensor(-0.0)]).agree
    assert not RankValues([0, 1], [1, 1.0]).agree
    assert RankValues([0, 1], [{"b", "a"}, {"a", "b"}]).agree and RankValues([0, 1], [{}, {}]).agree


def test_tensors_are_compared_by_their_facts_and_where_they_differ():
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    b[1, 2] = 4
    assert "\ndiffers           in 1 of 6, first at [1, 2]: 4, not 0" in shown(a, b)
    assert "in shape" in shown(a, torch.zeros(3)) and "in dtype" in shown(a, a.double())
    assert "in bits only" in shown(torch.tensor(0.0), torch.tensor(-0.0))
    assert "in 1 of 2, first at [1]" in shown(torch.tensor([1j, 2j]), torch.tensor([1j, 3j]))


def test_shards_show_their_placement_and_replicas_that_parted_are_told():
    def shard(value, placement):
        return Shard(torch.full((2,), value), (4,), (placement,), ("tp",))

    assert "parted" not in shown(shard(0.0, "S(0)"), shard(1.0, "S(0)"))
    assert "and yet not equal: the ranks have parted." in shown(shard(0.0, "R"), shard(1.0, "R"))
    assert shown(shard(0.0, "R"), shard(0.0, "R")).startswith("ranks 0, 1:\nShard of [4] (tp: R):\ntensor")


def test_only_the_entries_that_differ_are_shown():
    @dataclass
    class Point:
        x: int
        y: list[int]

    assert shown({"a": 1, "b": 2}, {"a": 1, "b": 3}).splitlines() == [
        "['b'] differs", "rank 0: 2", "rank 1: 3", "1 of 2 entries agree"]
    assert shown(Point(1, [2, 3]), Point(1, [2, 4])).splitlines()[0] == ".y[1] differs"
    assert "the ranks differ" in shown({"a": 1}, {"b": 1})
    many = [{i: rank for i in range(20)} for rank in (0, 1)]
    assert shown(*many).splitlines()[-1] == "0 of 20 entries agree, 12 more differ"


def test_tensors_of_parts_or_without_values_and_modules_are_compared():
    one, meta = torch.tensor([1 + 2j]), torch.empty(2, device="meta")
    assert RankValues([0, 1], [one.conj().imag, torch.tensor([-2.0])]).agree
    assert shown(meta, meta.clone()) == "ranks 0, 1: tensor(..., device='meta', size=(2,))"
    linear, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert RankValues([0, 1], [linear, linear]).agree
    assert shown(linear, other).startswith(".weight differs")
    assert not RankValues([0, 1], [torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)]).agree  # in their text


def test_what_shows_itself_the_same_on_all_ranks_is_shown_once_as_it_shows_itself():
    @dataclass
    class Report:
        seconds: float
        verdict: str = "PASS"

        def _repr_html_(self):
            return f"<b>{self.verdict}</b>"

        def __repr__(self):
            return self.verdict

    alike = RankValues([0, 1], [Report(1.0), Report(2.0)])
    assert (alike._repr_html_(), repr(alike)) == ("<b>PASS</b>", "ranks 0, 1: PASS") and not alike.agree
    apart = RankValues([0, 1], [Report(1.0), Report(1.0, "FAIL")])
    assert apart._repr_html_() is None and ".verdict differs" in repr(apart)
