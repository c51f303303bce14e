"""What the tests of passes run inside each rank, and the small recipes they run on."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from registrations import registrations_restored
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from workbench import Authored, Built, Recipe, World, build, current_world, register_pass
from workbench.authoring.author import author, author_module
from workbench.pipeline.expert_load import routed_layers
from workbench.pipeline.train import Batches
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.ops import op_name

FSDP4, FSDP_TP = {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}


def small(mesh: dict[str, int], joint: Sequence[Any] = (), passes: Sequence[Any] = (), layers: int = 1) -> Recipe:
    """llama3 with sixteen tokens a sequence; passes by name, or as tables."""
    given: dict[str, Any] = {"mesh": mesh, "model": {"n_layers": layers}, "data": {"seq_len": 16},
                             "joint_passes": joint, "passes": passes, "training": {"steps": 5}}
    return Recipe(name="small", **given)


def gradients(authored: Authored) -> dict[str, torch.Tensor]:
    """Each parameter's gradient on this rank, by qualified name."""
    found = {n: p.grad for n, p in authored.module.named_parameters() if p.grad is not None}
    return {n: g.to_local() if isinstance(g, DTensor) else g for n, g in found.items()}


def distances(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How far each tensor is from the expected one, relative to its norm."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - value).norm() / value.norm().clamp_min(1e-12))
            for name, value in expected.items()}


class KeyBiased(torch.nn.Module):
    """A block of a GPT with biases. Attention adds the key's bias to all scores of a row, and softmax takes it out
    again: in exact arithmetic its gradient is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(64, 32), torch.nn.LayerNorm(32)
        self.q, self.k, self.v, self.up = (torch.nn.Linear(32, 32) for _ in range(4))
        self.head = torch.nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.nn.functional.gelu(self.up(mixed.transpose(1, 2).flatten(2)))
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def key_biased() -> Authored:
    """`KeyBiased` on one rank, this process, with real values."""
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 16))
    return author_module(KeyBiased(), World("gloo", 1, 0, torch.device("cpu")), None, batch=lambda: (tokens,))


def calls(gm: GraphModule, *names: str) -> list[Node]:
    """The operator nodes in node order; with `names`, those of operators such as `aten.mm`."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if not names or op_name(node.target) in names]


def insert(gm: GraphModule, after: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node behind `after`, with its neighbour's metadata and its own value."""
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with gm.graph.inserting_after(after):
        node = gm.graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in after.meta.items() if k not in ("val", "tensor_meta", "desc")}
    node.meta["val"] = computed(node)
    return node


def computed(node: Node) -> Any:
    """What the node's operator gives on the values in its inputs' metadata."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def reread(old: Node, new: Node, *but: Node) -> list[str]:
    """What read `old` reads `new`, but for `new` itself and `but`. The readers' names."""
    names = [user.name for user in old.users]
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user not in but)
    return names


def scale(gm: GraphModule, node: Node, factor: float) -> GraphModule:
    """What reads the node reads `factor` times its value."""
    reread(node, insert(gm, node, torch.ops.aten.mul.Scalar, node, factor))
    return gm


@contextlib.contextmanager
def user_pass(name: str, function: Callable[[GraphModule], Any], **contract: Any) -> Iterator[str]:
    """A pass registered as a notebook's cell would, and gone afterwards."""
    with registrations_restored():
        @register_pass(name, **({"stage": "joint", "numerics": "exact"} | contract))
        def own(gm, example_inputs, *, options):
            return function(gm)

        yield name


def build_with(recipe: Recipe, name: str, function: Callable[[GraphModule], Any], **contract: Any) -> Built:
    """`recipe` with one more pass, on this rank, every check done."""
    with user_pass(name, function, **contract):
        where = "joint_passes" if contract.get("stage", "joint") == "joint" else "passes"
        listed = [spec.as_toml() for spec in getattr(recipe, where)]
        return build(recipe.override({where: [*listed, name]}), current_world(), level="full")


def outcomes(built: Built, name: str) -> dict[str, tuple[str, str]]:
    """check -> (outcome, message) of one pass."""
    record = next(r for r in built.records if r.name == name)
    return {v.check: (str(v.outcome), v.message) for v in record.verdicts}


def trajectory(recipe: Recipe) -> dict[str, Any]:
    """Five AdamW steps, compiled and eager from the same start: what differs, of the losses and every gradient."""
    built = build(recipe, current_world())
    eager = author(recipe, current_world())
    batches = Batches(eager)
    chosen: list[Any] = []  # tokens of each expert: ours, then eager's

    def run(authored: Any, step: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.AdamW(authored.module.parameters(), lr=1e-3, foreach=False)
        seen = []
        for i in range(recipe.training.steps):
            loss = step(*batches.at(i))
            loss.backward()
            chosen.append([layer.tokens.tolist() for layer in routed_layers(authored.module).values()])
            grads = {name: gradient.clone() for name, gradient in gradients(authored).items()}
            seen.append({"loss": loss.detach().clone(), **grads})
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return seen

    with deterministic(True):
        ours, theirs = run(built.authored, built.step), run(eager, eager.module)
    relative, differing = 0.0, set()
    for a, b in zip(ours, theirs, strict=True):
        relative = max(relative, *distances(a, b).values())
        differing |= {name for name in a if not torch.equal(a[name], b[name])}
    return {
        "tensors": len(ours[0]), "differing": sorted(differing), "relative": relative,
        "losses": [float(s["loss"]) for s in ours],
        "routed": (chosen[: len(ours)], chosen[len(ours) :]),
        "outcomes": {r.name: str(r.outcome) for r in built.records}, "schedule": str(built.schedule.outcome),
    }


def of_the_list(built: Built) -> list[tuple[str, str]]:
    """(check, outcome) of the verdicts on the whole list of passes; that on authoring may not fail."""
    verdicts = [(v.check, str(v.outcome)) for v in built.pipeline]
    assert ("authoring", "FAIL") not in verdicts, built.pipeline
    return [verdict for verdict in verdicts if verdict[0] != "authoring"]


def full_level(recipe: Recipe) -> tuple[dict[str, dict[str, tuple[str, str]]], list[str]]:
    """Every verdict of every pass, and the outcomes of the whole list."""
    built = build(recipe, current_world(), level="full")
    return {r.name: outcomes(built, r.name) for r in built.records}, [outcome for _, outcome in of_the_list(built)]
