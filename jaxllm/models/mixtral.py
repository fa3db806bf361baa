"""Mixtral: Llama's block with a mixture of experts for its MLP, and how it is written in Hugging Face folders.

Both layouts of the experts are read: one tensor per expert and matrix (`block_sparse_moe.experts.E.w1`), which is what transformers writes, and
fused ones (`mlp.experts.gate_up_proj`). The first is written.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxllm.exchange import combine, dispatch
from jaxllm.grouped_linear import GroupedLinear
from jaxllm.layers import Attention, RMSNorm, product, swiglu
from jaxllm.linear import matmul
from jaxllm.models import llama
from jaxllm.models.decoder import HfWeight, ModelConfig
from jaxllm.moe import MoEConfig, choose_backend, choose_exchange, jitter, route, statistics


class SparseMoE(nnx.Module):
    """The feed-forward layer: each token goes through `num_experts_per_tok` of `num_local_experts` gated MLPs (arXiv 2401.04088)."""

    def __init__(self, config, precision, moe: MoEConfig, *, rngs: nnx.Rngs):
        self.config, self.moe = config, moe
        self.precision = precision
        stddev, embed, mlp = config.initializer_range, {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        router = stddev * jax.random.normal(
            rngs.params(), (config.hidden_size, config.num_local_experts), precision.param
        )
        self.router = nnx.Param(router, axes=("embed", "router"))
        options = dict(experts=config.num_local_experts, rngs=rngs, stddev=stddev)
        self.gate_proj = GroupedLinear(embed, mlp, precision, name="gate_proj", **options)
        self.up_proj = GroupedLinear(embed, mlp, precision, name="up_proj", **options)
        self.down_proj = GroupedLinear(mlp, embed, precision, name="down_proj", **options)

    def __call__(self, x, real, noise=None):
        """x [B, T, E], real bool[B, T] -> ([B, T, E], what is recorded: `moe.statistics`, and how many assignments were dropped).

        noise: see `moe.jitter`; None in evaluation, where nothing is dropped either."""
        # As the layer is told to multiply, which may be otherwise than in the others.
        backend, multiple = choose_backend(self.moe, self.precision.compute, self.gate_proj.multiply)
        how, _ = choose_exchange(self.moe, self.config, real.size, training=noise is not None, multiple=multiple)
        with jax.named_scope("router"):
            if noise is not None:
                x = jitter(x, noise, self.config.router_jitter_noise)
            dtype = self.precision.compute if self.moe.router == "match_hf" else "float32"
            names = ("embed", "router")
            logits = matmul(x, self.router.get_value(), names, 1, dtype, self.precision.gradient_reduce)
            logits = logits.astype(jnp.float32)
            weights, ids = route(logits, self.config.num_experts_per_tok)
            seen = statistics(logits, ids, real)
        with jax.named_scope("experts"):
            rows, sizes, home, dropped = dispatch(x, ids, real, how)
            options = dict(everywhere=how.everywhere, backend=backend)
            multiply = lambda linear, x: product(linear, x, self.config.keeps_products, sizes, **options)
            gate, up = multiply(self.gate_proj, rows), multiply(self.up_proj, rows)
            y = multiply(self.down_proj, checkpoint_name(swiglu(gate, up), "gated"))
            return combine(y, weights, home, how, x.dtype), seen | {"dropped": jnp.sum(dropped).astype(jnp.float32)}


class Block(nnx.Module):
    def __init__(self, config, precision, attention, moe, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.self_attn = Attention(config, precision, attention, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.moe = SparseMoE(config, precision, moe, rngs=rngs)

    def __call__(self, x, cos, sin, k_start, k_end, layout, noise=None):
        """As `llama.Block`, with the statistics of its experts. noise: (key of this layer, i32[B] numbers of the rows), None in evaluation."""
        with jax.named_scope("self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, k_start, k_end, layout)
        with jax.named_scope("moe"):
            # A token is known by its row and its place there, which its interval of keys ends with.
            numbered = None if noise is None else (*noise, k_end - 1)
            y, seen = self.moe(self.post_attention_layernorm(x), k_end > k_start, numbered)
            return x + y, seen


def hf_weights(config: ModelConfig) -> dict[str, HfWeight]:
    """{parameter path: tensor in the Hugging Face checkpoint} for the parameters that this config has."""
    table = {path: weight for path, weight in llama.hf_weights(config).items() if "/mlp/" not in path}
    prefix = "model.layers.{layer}.block_sparse_moe"
    table["layers/moe/router"] = HfWeight(f"{prefix}.gate.weight", "linear")
    for name, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        table[f"layers/moe/{name}/kernel"] = HfWeight(f"{prefix}.experts.{{expert}}.{theirs}.weight", "linear")
    return table


config_from_hf, config_to_hf = llama.config_from_hf, llama.config_to_hf
