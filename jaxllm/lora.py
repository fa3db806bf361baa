"""LoRA (arXiv 2106.09685): two small trained matrices beside a weight that stays as it is, y = x W + scale * (dropout(x) A) B. What is configured, and the
parameters; `Linear` and `GroupedLinear` multiply by them.

A is drawn as torch draws a Linear's weight, uniform in +- 1 / sqrt(inputs), and B is 0, so that a new adapter changes nothing. Both are kept in
precision.param and multiplied in precision.compute. With adapters everything else is frozen: kept as `base` says, read, and never written.

Not here: other methods (DoRA, biases, adapters of embedding and lm_head); folders of adapters (`peft`); frozen weights themselves (`frozen`).
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from jaxllm.nf4 import BLOCK
from jaxllm.noise import uniform
from jaxllm.section import Section

ALL_LINEAR = "all-linear"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What "all-linear" means."""
ROUTER = "router"
_THEIRS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "gate": ROUTER}  # transformers' names of a Mixtral's


class LoRAConfig(Section):
    """Training adapters instead of the weights themselves (LoRA), which rest in fewer bits (QLoRA)."""

    rank: int | None = pydantic.Field(None, ge=1)
    """Inner size of the adapters; 8 to 64 is usual. None: no adapters, all weights are trained."""
    alpha: float = pydantic.Field(16.0, gt=0, allow_inf_nan=False)
    """What adapters add is multiplied by alpha / rank."""
    use_rslora: bool = False
    """By alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    dropout: float = pydantic.Field(0.0, ge=0, lt=1)
    """Share of elements of an adapter's input that are set to 0 in training, the others scaled up."""
    target_modules: Literal["all-linear"] | list[str] = ALL_LINEAR
    """Weights with adapters: "all-linear", those of attention and MLPs (experts), or a list out of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj and router. Routers have none unless they are named."""
    base: Literal["bfloat16", "float8", "nf4", "float32"] = "bfloat16"
    """How the frozen weights of attention and MLPs (experts) are kept: as floats; in FP8 (e4m3, one scale a matrix); or in 4 bits (NF4, arXiv 2305.14314).
    Embedding, lm_head, norms, biases and routers are then bfloat16."""
    double_quant: bool = True
    """base = "nf4": scales of blocks are quantised as well, 4.127 bits a weight instead of 4.5."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the weights with adapters; none without a rank."""
        if self.rank is None:
            return ()
        return LINEAR if self.target_modules == ALL_LINEAR else tuple(self.target_modules)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def kept(self) -> str:
        """How weights of attention and MLPs are kept: "trained", or `base`."""
        return "trained" if self.rank is None else self.base

    @property
    def in_floats(self) -> "LoRAConfig":
        """The same with frozen weights of float32, which is what those in other forms are made from."""
        return self.model_copy(update={"base": "float32", "double_quant": True})

    @property
    def frozen_dtype(self) -> str:
        """Of frozen floats."""
        return "float32" if self.base == "float32" else "bfloat16"


NO_ADAPTERS = LoRAConfig()


def check(config: LoRAConfig, adapter: str | None, experts: bool, sizes: dict[str, int]) -> list[str]:
    """What contradicts itself in this section, model.adapter, and the model: whether it has experts, {setting: size that is the input of a weight}."""
    if config.rank is None:
        given = [name for name, field in LoRAConfig.model_fields.items() if getattr(config, name) != field.default]
        conflicts = [
            f"lora.{name}: {getattr(config, name)!r} is for adapters, and lora.rank is not set; set lora.rank, or remove it"
            for name in given
        ]
        if adapter is not None:
            conflicts.append(
                f"model.adapter: {adapter!r} is to be trained on, and lora.rank is not set; set lora.rank and lora.alpha as its folder has them"
            )
        return conflicts
    conflicts, known = [], (*LINEAR, *([ROUTER] if experts else []))
    if not config.targets:
        conflicts.append('lora.target_modules: names nothing to adapt; "all-linear", or some of ' + ", ".join(known))
    for name in config.targets:
        if name not in known:
            meant = f"; here {name} is called {_THEIRS[name]}" if name in _THEIRS else ""
            conflicts.append(
                f"lora.target_modules: {name!r} is no weight that can have adapters; they are {', '.join(known)}{meant}"
            )
    if twice := sorted({name for name in config.targets if config.targets.count(name) > 1}):
        conflicts.append(f"lora.target_modules: names {', '.join(twice)} twice")
    if config.base == "nf4":
        conflicts += [
            f'{name}: {size} is no multiple of {BLOCK}, and with lora.base = "nf4" inputs of weights are cut into blocks of {BLOCK}; change one of them'
            for name, size in sizes.items()
            if size % BLOCK
        ]
    elif not config.double_quant:
        conflicts.append(f'lora.double_quant: false is for lora.base = "nf4", and that is "{config.base}"; remove it')
    return conflicts


def from_peft(config: dict) -> dict:
    """Fields of `LoRAConfig` that an adapter_config.json names plainly; what else it says is for `peft.read`, which compares."""
    fields = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora", "lora_dropout": "dropout"}
    found = {ours: config[theirs] for theirs, ours in fields.items() if config.get(theirs) is not None}
    names = config.get("target_modules")
    if isinstance(names, list) and not config.get("target_parameters"):
        ours = {_THEIRS.get(name, name) for name in names}
        if ours <= {*LINEAR, ROUTER}:
            found["target_modules"] = [name for name in (*LINEAR, ROUTER) if name in ours]
    return found


class Adapter(nnx.Param):
    """A or B: what is trained where lora.rank is set, and nothing else."""


def parameters(config: LoRAConfig, name: str, inputs: dict, outputs: dict, dtype: str, key, experts: int | None = None):
    """(A [*inputs, rank], B [rank, *outputs]) of the weight `name`, with experts one more dim in front; (None, None) where it has no adapter. key: the random
    one of the weight."""
    if name not in config.targets:
        return None, None
    leading, names = ((), ()) if experts is None else ((experts,), ("experts",))
    bound = 1 / math.sqrt(math.prod(inputs.values()))
    a = jax.random.uniform(jax.random.fold_in(key, 1), (*leading, *inputs.values(), config.rank), dtype, -bound, bound)
    b = jnp.zeros((*leading, config.rank, *outputs.values()), dtype)
    return Adapter(a, axes=(*names, *inputs, "rank")), Adapter(b, axes=(*names, "rank", *outputs))


def dropout(x, noise, config: LoRAConfig, name: str):
    """x [*tokens, *inputs] with a share of its elements 0, the others divided by what is left; x itself without noise. name: of the weight, each of which
    draws for itself."""
    if noise is None or not config.dropout:
        return x
    tokens = noise[2].ndim
    size = math.prod(x.shape[tokens:])
    kept = uniform(noise, name, size) >= config.dropout
    scaled = (x.astype(jnp.float32) / (1 - config.dropout)).astype(x.dtype)
    return jnp.where(kept.reshape(x.shape), scaled, jnp.zeros((), x.dtype))
