"""What becomes of modules of odd kinds, as outcomes.toml says: they train as in eager PyTorch, to the last parameter
and buffer; or they are refused, in a sentence; or the numerics verdict is FAIL. "fixed" is what the docs list under
"What a capture fixes": trained otherwise, under PASS.
"""

import itertools
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workbench import (
    Outcome,
    author_module,
    capture,
    compile_step,
    current_world,
    partition,
    prove_numerics,
    run_joint,
)
from workbench.authoring.plans import ParallelPlan
from workbench.checks.verdicts import worst
from workbench.errors import WorkbenchError
from workbench.world.ranks import RankError
from zoo import changes, families, operators, states  # noqa: F401 (they fill the zoo)
from zoo.models import DIM, SEQ, VOCAB, ZOO, Odd

STEPS, BATCH = 3, 2
MESHES = {"fsdp": {"dp_shard": 2}, "traced": {"dp_shard": 2}, "tp": {"tp": 2}}
OUTCOMES = tomllib.loads(Path(__file__).with_name("outcomes.toml").read_text())

pytestmark = [pytest.mark.integration, pytest.mark.ranks]
RANKS_IMPORT_IT = True  # the zoo's modules hold what cannot be sent


class Loss(nn.Module):
    """The mean square distance of what `body` gives from one half."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, given: Tensor) -> Tensor:
        found = self.body(given)
        return (getattr(found, "last_hidden_state", found) - 0.5).square().mean()


def cut_of(module: nn.Module) -> ParallelPlan:
    """Tensor parallelism of the first linear layer."""
    first = next(name for name, part in module.named_modules() if type(part) is nn.Linear)
    return ParallelPlan(tensor={first: {"style": "colwise", "output": "replicate"}})


def made(odd: Odd) -> nn.Module:
    torch.manual_seed(0)
    return Loss(odd.make())


def batch(odd: Odd, step: int, row: int) -> Tensor:
    """Of one step, for one row of data-parallel ranks."""
    generator = torch.Generator().manual_seed(100 * step + row)
    if odd.tokens:
        return torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    return torch.randn(BATCH, SEQ, DIM, generator=generator)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def trained(step: Any, module: nn.Module, odd: Odd, row: int) -> dict[str, Tensor]:
    """Each step's loss, and the parameters and buffers that are left. Gradients are averaged over the rows here only
    where the module does not do so itself.
    """
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    found = {}
    for i in range(STEPS):
        torch.manual_seed(i)
        loss = step(batch(odd, i, row))
        loss.backward()
        for p in module.parameters():
            if p.grad is not None and not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found[f"loss {i}"] = loss.detach()
        if odd.between is not None:
            odd.between(module.body)
    found |= {name: whole(p) for name, p in module.named_parameters()}
    return found | {name: whole(b) for name, b in module.named_buffers()}


def tried(name: str, case: str, broken: bool = False) -> tuple[str, str]:
    """On a rank: (the outcome, what was said)."""
    odd, world = ZOO[name], current_world()
    row = 0 if case == "tp" else dist.get_rank()
    module = made(odd)
    seeds = itertools.count()
    try:
        plan = cut_of(module) if case == "tp" else None
        authored = author_module(module, world, world.mesh_of(MESHES[case]), plan,
                                 batch=lambda: (batch(odd, next(seeds), row),))
        with capture(authored, by="traced" if case == "traced" else "joint") as joint:
            if case != "tp":
                run_joint(joint, ["reshard_after_forward"])
            step = compile_step(partition(joint))
        verdicts = prove_numerics([], step)
        ours = trained(step, authored.module, odd, row)
    except WorkbenchError as refused:
        return "refused", str(refused)
    if worst(verdicts) is Outcome.FAIL:
        return "FAIL", verdicts[0].message
    plain = made(odd)
    theirs = trained(plain, plain, odd, row)
    if broken:
        next(iter(theirs.values())).mul_(1.001)
    difference = difference_of(ours, theirs)
    return ("fixed", difference) if difference else ("equal", "")


def difference_of(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    if ours.keys() != theirs.keys():
        return f"{ours.keys() ^ theirs.keys()} are in one of both"
    for key, value in theirs.items():
        if not torch.allclose(ours[key].to(value.dtype), value, rtol=2e-5, atol=1e-6):
            return f"{key}: {(ours[key] - value).abs().max():.2e} apart"
    return ""


def is_one_sentence(said: str) -> bool:
    """Whether a refusal names the module or the parameter, says why and what to do, and says no more."""
    named = re.match(r"(model Loss: )?.*?(body[.\w]*:?|it) ", said)
    return bool(named and ": " in said and len(said) < 400 and not re.search(r"\n|\. [A-Z]|Hint", said))


def expected(case: str, name: str) -> str:
    """The outcome by the case's table, or that of FSDP, where "equal" is left out."""
    outcomes = [outcome for table in (OUTCOMES[case], OUTCOMES["fsdp"]) for outcome, names in table.items()
                if name in names]
    return [*outcomes, "equal"][0]


TRACED = [name for name, odd in ZOO.items() if odd.traced]
CASES = {"fsdp": list(ZOO), "traced": TRACED, "tp": list(ZOO)}
DAILY = {"fsdp": 4, "traced": 1, "tp": 2}
"""How many models a seed chooses to be tried each day; the rest is nightly."""


def cases() -> Iterator[Any]:
    """Up to ten models an item."""
    for case, names in CASES.items():
        quick = [name for name in names if not ZOO[name].slow]
        daily = random.Random(4).sample(quick, DAILY[case])
        yield pytest.param(case, daily, id=f"{case}, daily")
        rest = [name for name in names if name not in daily]
        for i in range(0, len(rest), 10):
            yield pytest.param(case, rest[i:i + 10], marks=pytest.mark.nightly, id=f"{case}, from {i}")


@pytest.mark.parametrize(("case", "names"), list(cases()))
def test_models_become_what_the_table_says(pool2: Any, case: str, names: list[str]) -> None:
    problems = {}
    for name in names:
        try:
            found = pool2.run(tried, name, case)
        except RankError as error:
            found = [("crashed", str(error))]
        wrong = [(outcome, said) for outcome, said in found if outcome != expected(case, name)
                 or (outcome == "refused" and not is_one_sentence(said))]
        if wrong:
            problems[name] = wrong
    assert problems == {}


def test_a_refusal_of_several_sentences_is_seen() -> None:
    sound = "model Loss: module body.act cannot be captured at models.py:9: it draws: draw before the step"
    assert is_one_sentence(sound)
    for other in (sound + "\nHint: no", sound + ". It may be a bug", "Loss failed: mend it", "module body failed"):
        assert not is_one_sentence(other), other


def test_the_zoo_is_large_and_a_difference_is_seen(pool2: Any) -> None:
    assert len(ZOO) >= 79 and len(TRACED) >= 15
    assert [outcome for outcome, _ in pool2.run(tried, "layer norm", "fsdp", True)] == ["fixed"] * 2
