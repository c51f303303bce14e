"""The sections of a recipe: model, mesh, data, precision, passes, training, expectations. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from workbench.errors import WorkbenchError
from workbench.recipe.hooks import check_value
from workbench.recipe.model_sizes import SIZES
from workbench.recipe.strict_toml import Declared, Problem

Dtype = Literal["float32", "bfloat16", "float64"]


_NO_SIZES = {"family", "flavor", "attention", "mask", "document_token", "loss", "weights"}


class ModelSpec(Declared):
    """A model family and flavor; a size given here overrides the flavor's."""

    family: str = Field(
        "llama3", description="llama3, deepseek_v3, or a name given to register_model"
    )
    flavor: str = Field(
        "debug", description="llama3: debug, 1b or 8b; deepseek_v3: debug, 16b or 671b"
    )
    attention: Literal["sdpa", "flex"] = "sdpa"
    mask: Literal["causal", "document"] = Field(
        "causal", description="document needs attention flex"
    )
    document_token: int = Field(0, ge=0, description="the token that ends a document")
    loss: str = Field(
        "whole",
        pattern=r"^whole$|^[\w.]+:\w+:\w*$",
        description="whole, or MODULE:FUNCTION:ARGUMENT",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="a folder of Hugging Face safetensors to start from; "
        "relative to where the command runs",
    )
    dim: PositiveInt | None = None
    n_layers: PositiveInt | None = None
    n_heads: PositiveInt | None = None
    n_kv_heads: PositiveInt | None = Field(None, description="llama3: heads of keys and values")
    vocab_size: PositiveInt | None = None
    ffn_dim: PositiveInt | None = None
    rope_theta: float | None = Field(None, gt=0)
    norm_eps: float | None = Field(None, gt=0)
    max_seq_len: PositiveInt | None = None
    n_dense_layers: NonNegativeInt | None = Field(
        None, description="deepseek_v3: first layers without experts"
    )
    expert_dim: PositiveInt | None = Field(
        None, description="deepseek_v3: hidden width of one expert"
    )
    n_experts: PositiveInt | None = None
    n_shared_experts: PositiveInt | None = Field(
        None, description="deepseek_v3: experts that every token passes"
    )
    top_k: PositiveInt | None = Field(None, description="deepseek_v3: experts a token is routed to")
    n_groups: PositiveInt | None = Field(
        None, description="deepseek_v3: groups that the experts are cut into"
    )
    top_groups: PositiveInt | None = Field(
        None, description="deepseek_v3: groups a token's experts may come from"
    )
    score: Literal["sigmoid", "softmax"] | None = None
    normalise: bool | None = Field(
        None, description="deepseek_v3: a token's weights add up to route_scale"
    )
    route_scale: float | None = Field(None, gt=0)
    q_lora_rank: NonNegativeInt | None = Field(
        None, description="deepseek_v3: 0 projects queries at once"
    )
    kv_lora_rank: PositiveInt | None = None
    qk_nope_dim: PositiveInt | None = None
    qk_rope_dim: PositiveInt | None = None
    v_dim: PositiveInt | None = None
    dispatch: Literal["dropless", "capacity"] | None = Field(
        None, description="deepseek_v3: the way to the experts"
    )
    capacity_factor: float | None = Field(
        None, description="rows of an expert, relative to a balanced load"
    )
    balance_rate: float | None = Field(
        None, ge=0, description="step of the experts' bias after each training step"
    )

    @field_validator("family")
    @classmethod
    def _known_family(cls, value: str) -> str:
        if value not in SIZES:
            raise ValueError(
                f"unknown family {value!r}: one of {', '.join(SIZES)}, or register it with "
                "@register_model first"
            )
        return value

    @field_validator("flavor")
    @classmethod
    def _known_flavor(cls, value: str, info: ValidationInfo) -> str:
        known = SIZES.get(info.data.get("family", ""), {})
        if known and value not in known:
            raise ValueError(f"unknown flavor {value!r}: one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _allowed_sizes(self) -> Self:
        overrides = self.model_dump(exclude=_NO_SIZES, exclude_none=True)
        if other := [key for key in overrides if key not in SIZES[self.family][self.flavor]]:
            raise ValueError(f"{self.family} has no {other[0]}: leave it out")
        return self

    @model_validator(mode="after")
    def _documents_need_flex(self) -> Self:
        if self.mask == "document" and self.attention != "flex":
            raise ValueError("mask document needs attention flex: set attention, or leave mask out")
        return self

    def sizes(self) -> dict[str, Any]:
        """Every size of the model: the flavor's, unless one is given here."""
        overrides = self.model_dump(exclude=_NO_SIZES, exclude_none=True)
        return {**SIZES[self.family][self.flavor], **overrides}


class MeshSpec(Declared):
    """Ranks along each mesh axis. `ep` lies within `dp_shard`, or within `dp_shard` x `tp`, and adds no ranks."""

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = Field(1, description="ranks over which the experts are spread")
    ep_over: Literal["dp_shard", "dp_shard x tp"] = Field(
        "dp_shard", description="the ranks that ep divides"
    )

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each reads its own batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """Axes of more than one rank, outermost first, as the device mesh names them."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The experts' mesh over the same ranks: dp_replicate, ep, and ep_shard, the other ranks of dp_shard and tp."""
        within = self.dp_shard * self.tp
        return {"dp_replicate": self.dp_replicate, "ep": self.ep, "ep_shard": within // self.ep}

    @property
    def experts_apart(self) -> bool:
        """Whether experts need another mesh: with tp, too, since each of its ranks has different tokens for them."""
        return self.ep > 1 or self.tp > 1

    @property
    def fsdp(self) -> bool:
        return self.dp_shard > 1 or self.dp_replicate > 1


class DataSpec(Declared):
    """Byte-level text: a folder, or by default the sources of Python's standard library."""

    path: str | None = Field(
        None, min_length=1, description="a folder of text; relative to where the command runs"
    )
    seq_len: PositiveInt = 64
    batch_per_rank: PositiveInt = Field(
        2, description="sequences for each data-parallel rank and step"
    )
    seed: NonNegativeInt = 0


class PrecisionSpec(Declared):
    """Dtypes of the forward's parameters and of gradient reductions."""

    param: Dtype = "float32"
    reduce: Dtype = "float32"


class PassSpec(Declared):
    """One pass of the list: its name alone, or a table with its name and options."""

    name: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and not isinstance(value.get("options"), Mapping):
            return {"options": {k: v for k, v in value.items() if k != "name"},
                    **{k: v for k, v in value.items() if k == "name"}}
        return value

    def as_toml(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name


def listed(specs: Any, where: str) -> list[Any]:
    """The passes of a list; WorkbenchError for a single pass, whose name would be read letter by letter."""
    if isinstance(specs, str | Mapping | PassSpec):
        alone = specs.as_toml() if isinstance(specs, PassSpec) else specs
        raise WorkbenchError(
            f"{where} takes a list of passes, and got {alone!r}: write [{alone!r}]"
        )
    return list(specs)


class TrainingSpec(Declared):
    """Steps and optimizer. `clip` is the largest gradient norm; "off" does not clip."""

    steps: PositiveInt = 10
    step: str = Field(
        "pair",
        description="pair: the optimizer runs outside the graphs; whole: forward, backward, "
        "clipping and the optimizer in one graph; or a kind that a plugin declares",
    )
    accumulate: PositiveInt = Field(
        1,
        description="microbatches that a rank's batch is cut into: the update follows "
        "their mean gradient",
    )
    nan_norm: Literal["apply", "skip"] = Field(
        "apply",
        description="a step whose gradient norm is NaN or infinite: "
        "update all the same, or leave all as it is",
    )
    read_loss_every: PositiveInt = Field(
        1, description="steps between two reads of loss and norm from the device"
    )
    optimizer: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    clip: float | None = Field(1.0, gt=0)
    seed: NonNegativeInt = 0
    deterministic: bool = True

    @field_validator("step")
    @classmethod
    def _known_step(cls, value: str) -> str:
        return check_value("training.step", value)

    @field_validator("clip", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value == "off" else value


class Section(Declared):
    """Base of a table that a plugin declares: `declare_hook("section.NAME", "MODULE:CLASS")`."""

    @property
    def multiplies_ranks(self) -> int:
        """How many times the ranks of the mesh the recipe runs on."""
        return 1

    def problems(self, recipe: Any) -> list[Problem]:
        """What does not fit the rest of a valid recipe."""
        return []


class Expectations(Declared):
    """What must hold after the run, in addition to the passes' contracts."""

    loss_falls: bool = False
    no_effect: tuple[str, ...] = Field((), description="passes that may have no effect here")
    max_saved_bytes: PositiveInt | None = Field(
        None, description="bytes between forward and backward, on each rank"
    )


