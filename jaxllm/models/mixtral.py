"""Mixtral: Llama's block with a mixture of experts for its MLP, and how it is written in Hugging Face folders.

Both layouts of the experts are read: one tensor per expert and matrix (`block_sparse_moe.experts.E.w1`), which is what transformers writes, and
fused ones (`mlp.experts.gate_up_proj`). The first is written.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxllm.layers import Attention, RMSNorm, swiglu
from jaxllm.linear import GroupedLinear, matmul
from jaxllm.models import llama
from jaxllm.models.decoder import HfWeight, ModelConfig
from jaxllm.moe import MoEConfig, choose_backend, choose_exchange, combine, dispatch, route, statistics


class SparseMoE(nnx.Module):
    """The feed-forward layer: each token goes through `num_experts_per_tok` of `num_local_experts` gated MLPs (arXiv 2401.04088)."""

    def __init__(self, config, precision, moe: MoEConfig, *, rngs: nnx.Rngs):
        self.num_experts, self.per_token, self.moe = config.num_local_experts, config.num_experts_per_tok, moe
        self.precision = precision
        stddev, embed, mlp = config.initializer_range, {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        router = stddev * jax.random.normal(rngs.params(), (config.hidden_size, self.num_experts), precision.param)
        self.router = nnx.Param(router, axes=("embed", "router"))
        options = dict(experts=self.num_experts, rngs=rngs, stddev=stddev)
        self.gate_proj = GroupedLinear(embed, mlp, precision, name="gate_proj", **options)
        self.up_proj = GroupedLinear(embed, mlp, precision, name="up_proj", **options)
        self.down_proj = GroupedLinear(mlp, embed, precision, name="down_proj", **options)

    def __call__(self, x, real):
        """x [B, T, E], real bool[B, T] -> ([B, T, E], `moe.statistics`)."""
        exchange = choose_exchange(self.moe)
        with jax.named_scope("router"):
            dtype = self.precision.compute if self.moe.router == "match_hf" else "float32"
            names = ("embed", "router")
            logits = matmul(x, self.router.get_value(), names, 1, dtype, self.precision.gradient_reduce)
            logits = logits.astype(jnp.float32)
            weights, ids = route(logits, self.per_token)
            seen = statistics(logits, ids, real)
        with jax.named_scope("experts"):
            rows, sizes, slots = dispatch(x, ids, real, self.num_experts, exchange)
            how = dict(everywhere=exchange == "none", backend=choose_backend(x.dtype))
            gate, up = self.gate_proj(rows, sizes, **how), self.up_proj(rows, sizes, **how)
            y = self.down_proj(checkpoint_name(swiglu(gate, up), "gated"), sizes, **how)
            return combine(y, weights, slots, exchange, x.dtype), seen


class Block(nnx.Module):
    def __init__(self, config, precision, attention, moe, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.self_attn = Attention(config, precision, attention, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.moe = SparseMoE(config, precision, moe, rngs=rngs)

    def __call__(self, x, cos, sin, k_start, k_end, layout):
        """As `llama.Block`, with the statistics of its experts."""
        with jax.named_scope("self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, k_start, k_end, layout)
        with jax.named_scope("moe"):
            y, seen = self.moe(self.post_attention_layernorm(x), k_end > k_start)
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
