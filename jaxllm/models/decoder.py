"""The decoder that all families share: embedding -> one scan over layers -> norm, with rematerialisation by name.

NNX declares the weights; what flows is a flat dict {path: array} in which the weights of all layers are stacked, so that one traced layer
serves any depth. A family contributes its block. The loss multiplies by lm_head (`loss.py`): logits of a whole batch are never made here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxllm.attention import AttentionConfig
from jaxllm.layers import Embedding, RMSNorm, check_rope, rope_frequencies, rotary_tables
from jaxllm.linear import PrecisionConfig
from jaxllm.lora import LINEAR as LINEAR_NAMES
from jaxllm.lora import LoRAConfig
from jaxllm.moe import MoEConfig
from jaxllm.section import Section, UserError
from jaxllm.sharding import constrain

ATTENTION_NAMES = ("attn_out", "attn_lse")
_policies = jax.checkpoint_policies

# Elementwise operations, casts, and what only moves or pins values: what they yield costs little to make again. Gathered weights come of nothing else,
# nor do norms, gated products and casts to FP8. (JAX's save_anything_except_these_names keeps everything, 0.10 and 0.11, those names too.)
_CHEAP = {
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "cos", "div",
    "eq", "exp", "expand_dims", "ge", "gt", "integer_pow", "iota", "layout_constraint", "le", "log", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pow", "reduce_precision", "reshape", "rsqrt", "select_n", "sharding_constraint", "shift_right_logical", "sign", "sin",
    "slice", "split", "sqrt", "square", "squeeze", "stack", "sub", "tanh", "transpose",
}  # fmt: skip
_AGAIN = {"gathered", "norm", "gated", "quantised"}


def _whatever_costs(primitive, *operands, **params):
    if primitive.name == "name":
        return params["name"] not in _AGAIN
    if primitive.name == "gather":  # of a table, as codes of NF4 are looked up, one for each matrix: cheap as well
        return operands[0].ndim - len(params["dimension_numbers"].operand_batching_dims) > 1
    return primitive.name not in _CHEAP


# What the backward pass of a block keeps; everything else is computed again. The input of each block is always kept, and so are the magnitudes that FP8
# records, a few numbers each.
REMAT: dict[str, Any] = {
    # Gathered weights are never kept, and what a norm, a gated product or a cast to FP8 yields costs less to compute than to store.
    "none": _whatever_costs,
    "dots": _policies.save_only_these_names(*LINEAR_NAMES, *ATTENTION_NAMES, "amax"),
    "attention": _policies.save_only_these_names(*ATTENTION_NAMES, "amax"),
    "full": _policies.save_only_these_names("amax"),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["amax"],
        names_which_can_be_offloaded=["block_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class HfWeight:
    """Where a parameter lives in a Hugging Face checkpoint, and in which form.

    name: tensor name; "{layer}" means one tensor per layer, stacked here. kind: "linear", a [out, in] matrix whose transpose, reshaped, is
    our kernel with `num_inputs` contracted dims; or "same", the same values, reshaped.
    """

    name: str
    kind: Literal["linear", "same"] = "same"
    num_inputs: int = 1


class ModelConfig(Section):
    """A decoder in Hugging Face's own names. With `path`, the folder's config.json gives every field below `remat`."""

    path: str | None = None
    """Hugging Face folder, hub name, or jaxllm checkpoint to start from; none: random weights."""
    revision: str | None = None
    """Revision of a hub name; recorded when it was looked up."""
    adapter: str | None = None
    """PEFT folder with the LoRA adapters to start from; none: new ones. Their rank, alpha and targets are to be those of the section lora."""
    remat: Literal["none", "dots", "attention", "full", "offload"] = "attention"
    """What the backward pass keeps of each block: everything; matmul and attention outputs; attention outputs; the block's input; the
    block's input, in host memory. The further right, the less memory and the more recomputation."""
    family: Literal["llama", "mistral", "mixtral"] = "llama"
    """Architecture: a key of jaxllm.models.FAMILIES. "mistral" is "llama" with a sliding window, "mixtral" that with a
    mixture of experts."""
    vocab_size: int = pydantic.Field(32000, ge=1)
    hidden_size: int = pydantic.Field(512, ge=1)
    intermediate_size: int = pydantic.Field(1408, ge=1)
    num_hidden_layers: int = pydantic.Field(8, ge=1)
    num_attention_heads: int = pydantic.Field(8, ge=1)
    num_key_value_heads: int | None = pydantic.Field(None, ge=1)
    """Key and value heads, each shared by equally many query heads; none: as many as query heads."""
    head_dim: int | None = pydantic.Field(None, ge=2)
    """Width of a head; none: hidden_size / num_attention_heads."""
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = pydantic.Field(1e-5, gt=0)
    max_position_embeddings: int = pydantic.Field(2048, ge=1)
    """Longest row that the model is meant for, in tokens; a longer one is refused unless rope_parameters are scaled for it."""
    sliding_window: int | None = pydantic.Field(None, ge=1)
    """Each token sees only this many last tokens, itself included; none: all of its document."""
    num_local_experts: int | None = pydantic.Field(None, ge=1)
    """Experts of each layer, in the family "mixtral" and there alone; likewise the three below."""
    num_experts_per_tok: int | None = pydantic.Field(None, ge=1)
    """Experts that each token goes through."""
    router_aux_loss_coef: float | None = pydantic.Field(None, ge=0)
    """Weight of the loss that balances the experts (moe.aux_loss)."""
    router_jitter_noise: float | None = pydantic.Field(None, ge=0, lt=1)
    """In training, what the router and the experts read is multiplied by random numbers from [1 - this, 1 + this)."""
    rope_parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    """Rotary positions, in transformers' names. In the family "mixtral" rope_theta is 1e6 by default, as it is in transformers."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = pydantic.Field(0.02, ge=0)
    """Standard deviation of new weights."""
    pad_token_id: int | None = None
    """Its embedding row gets no gradient, as in torch; padding itself goes by segment ids, never by this id."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _derived(cls, data):
        if not isinstance(data, dict):
            return data  # pydantic says what is wrong with it
        data = dict(data)
        get = lambda key: data.get(key, cls.model_fields[key].default)
        if data.get("num_key_value_heads") is None:
            data["num_key_value_heads"] = get("num_attention_heads")
        if data.get("family") == "mixtral":
            data.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 1e6})
        sizes = get("hidden_size"), get("num_attention_heads")
        if data.get("head_dim") is None and all(isinstance(size, int) and size > 0 for size in sizes):
            data["head_dim"] = sizes[0] // sizes[1]
        return data

    @pydantic.model_validator(mode="after")
    def _consistent(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide num_attention_heads = {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions turn pairs")
        if self.family == "llama" and self.sliding_window is not None:
            raise ValueError(
                f'sliding_window = {self.sliding_window}: transformers ignores it in a Llama; take model.family = "mistral"'
            )
        names = ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise")
        experts = [getattr(self, name) for name in names]
        if self.family == "mixtral" and (lacks := [name for name in names if getattr(self, name) is None]):
            raise ValueError(
                f"{', '.join(lacks)}: not set, and a Mixtral needs {', '.join(names)}; of Mixtral 8x7B they are 8, 2, 0.02 and 0.0"
            )
        if self.family == "mixtral" and self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok} is more than num_local_experts = {self.num_local_experts}"
            )
        if self.family != "mixtral" and any(value is not None for value in experts):
            raise ValueError(f"num_local_experts and its kin: the family {self.family!r} has no experts")
        if self.family != "llama" and (self.attention_bias or self.mlp_bias):
            raise ValueError(f"attention_bias and mlp_bias: the family {self.family!r} has no biases")
        check_rope(self.rope_parameters)
        rope_frequencies(self.rope_parameters, self.head_dim, self.max_position_embeddings, 1)
        return self

    @property
    def keeps_products(self) -> bool:
        """Whether rematerialisation keeps what the weights' products yield."""
        return self.remat in ("none", "dots")

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that positions are meant for: max_position_embeddings, or what scaled rope_parameters make of a shorter length,
        `factor` times original_max_position_embeddings or, for the types that name none (linear, dynamic), times max_position_embeddings."""
        original = self.rope_parameters.get("original_max_position_embeddings", self.max_position_embeddings)
        return max(self.max_position_embeddings, int(original * self.rope_parameters.get("factor", 1)))

    def check_length(self, name: str, length: int, remedy: str = "shorten the rows") -> None:
        """UserError if rows of so many tokens, which the message calls `name`, are longer than the model's positions are meant for. remedy: said first."""
        if length > self.longest_row:
            stretched = f", stretched to {self.longest_row} by its rope_parameters"
            raise UserError(
                f"{name}: {length} tokens are more than model.max_position_embeddings = {self.max_position_embeddings}"
                f"{stretched if self.longest_row > self.max_position_embeddings else ''}: the model's positions mean nothing behind those. To go "
                f"on, {remedy}, or raise model.max_position_embeddings; a model that was trained with fewer needs scaled model.rope_parameters with them"
            )

    @property
    def matmul_parameters(self) -> int:
        """Weights that each token is multiplied by, lm_head and its experts included, the embedding look-up and other experts not."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_local_experts:
            mlp = self.num_experts_per_tok * mlp + self.hidden_size * self.num_local_experts
        return self.num_hidden_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_len: int, frozen: bool = False) -> float:
        """Training FLOPs of one token in a row of seq_len: 6 per weight (4 of frozen weights, which have no gradient; their adapters count nothing), and
        12 x layers x heads x head_dim per key that a token sees on average: seq_len / 2, less with a window. Recomputation, norms and the embedding look-up
        count nothing (Chowdhery et al. 2022, appendix B, halved for causality)."""
        window = min(self.sliding_window or seq_len, seq_len)
        keys = window - window**2 / (2 * seq_len)
        per_weight = 4 if frozen else 6
        return (
            per_weight * self.matmul_parameters
            + 12 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * keys
        )


def stacked(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs):
    """One module whose every variable has a leading layer dim; variable metadata (axes) stay per layer."""
    graphdef, _ = jax.eval_shape(lambda: nnx.split(make_layer(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num_layers)
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.split(make_layer(nnx.Rngs(params=key)))[1])(keys))


class Decoder(nnx.Module):
    """tokens -> final hidden states. `head` is the weight that the loss multiplies by: lm_head, or the embedding when tied."""

    def __init__(
        self,
        config: ModelConfig,
        precision: PrecisionConfig,
        attention: AttentionConfig,
        moe: MoEConfig,
        lora: LoRAConfig,
        make_block,
        *,
        rngs: nnx.Rngs,
    ):
        self.config, self.precision = config, precision
        size, stddev = config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(
            config.vocab_size, size, precision, rngs=rngs, stddev=stddev, pad_token_id=config.pad_token_id
        )
        block = lambda layer_rngs: make_block(config, precision, attention, moe, lora, rngs=layer_rngs)
        self.layers = stacked(block, config.num_hidden_layers, rngs)
        self.norm = RMSNorm(size, config.rms_norm_eps, precision)
        head = lambda: LMHead(config.vocab_size, size, precision, stddev=stddev, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else head()

    def __call__(self, tokens, positions, k_start, k_end, layout="contiguous", row_length=None, noise=None):
        """All i32[B, T]: token ids, place in the document, interval of keys each token sees -> ([B, T, E] in the compute dtype, what layers
        record: `moe.statistics`, stacked over layers, or nothing).

        layout: the order of the T places (`attention.row_layout`). row_length: tokens of a row, without what completes it for the
        devices; rope types that depend on the length ask, and UserError if the model's positions are not meant for it. noise: (random key of the
        step, i32[B], the rows' numbers in the batch) in training; None in evaluation, where layers add no noise and drop nothing."""
        config, compute = self.config, self.precision.compute
        length = row_length or tokens.shape[1]
        config.check_length("a row", length)
        inverse, factor = rope_frequencies(
            config.rope_parameters, config.head_dim, config.max_position_embeddings, length
        )
        cos, sin = rotary_tables(positions, inverse, factor, compute)
        graphdef, layers = nnx.split(self.layers)

        def layer(x, weights_and_key, multiply):
            weights, key = weights_and_key
            x = checkpoint_name(constrain(x, "batch", "sequence", "embed"), "block_input")
            # A token is known by its row and its place there, which its interval of keys ends with.
            own_noise = None if noise is None else (key, noise[1], k_end - 1)
            block = nnx.merge(graphdef, weights)
            if multiply is not None:
                block.set_attributes(multiply=multiply)
            x, seen = block(x, cos, sin, k_start, k_end, layout, own_noise)
            return constrain(x, "batch", "sequence", "embed"), seen

        keys = None if noise is None else jax.random.split(noise[0], config.num_hidden_layers)
        # Padding is 0 from layer to layer (where there are no biases), and so counts nothing in the magnitudes that FP8 takes its scales from.
        real = (k_end > k_start)[..., None]
        embedded = self.embed_tokens(tokens)
        x, parts = jnp.where(real, embedded, jnp.zeros((), embedded.dtype)), []
        for part, multiply in self._parts():
            # prevent_cse guards against undoing the recomputation outside loops; inside scan it only adds barriers.
            one = jax.checkpoint(
                functools.partial(layer, multiply=multiply), policy=REMAT[config.remat], prevent_cse=False
            )
            x, seen = jax.lax.scan(one, x, jax.tree.map(lambda a, part=part: a[part], (layers, keys)))
            parts.append(seen)
        return self.norm(x), parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)

    def _parts(self):
        """(which layers, how their products multiply or None: as they are) of each scan over layers. Layers at both ends that stay out of FP8 have their
        own; that cuts the stacked weights and their gradients in pieces, for which the step holds one more copy of them where they rest."""
        layers, fp8 = self.config.num_hidden_layers, self.precision.fp8
        first, last = fp8.first_layers_bfloat16, fp8.last_layers_bfloat16
        if self.precision.matmul == "compute" or not first + last:
            return [(slice(None), None)]
        ends = [(slice(0, first), "compute"), (slice(layers - last, layers), "compute")]
        return [p for p in (ends[0], (slice(first, layers - last), None), ends[1]) if p[0].start < p[0].stop]

    @property
    def head(self):
        """[V, E], as it is kept."""
        return self.embed_tokens.embedding.get_value() if self.lm_head is None else self.lm_head.kernel.get_value()


class LMHead(nnx.Module):
    """Declares lm_head [V, E], rows first like the embedding that it may be tied to; `loss.py` multiplies by it."""

    def __init__(self, vocab_size: int, size: int, precision: PrecisionConfig, *, stddev, rngs: nnx.Rngs):
        init = stddev * jax.random.normal(rngs.params(), (vocab_size, size), precision.param)
        self.kernel = nnx.Param(init, axes=("vocab", "embed"))


def count_parameters(params: dict) -> int:
    return sum(int(np.prod(p.shape)) for p in params.values())
