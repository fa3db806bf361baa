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
from jaxllm.linear import adapted, frozen_matmul, matmul
from jaxllm.lora import ROUTER, LoRAConfig, dropout, parameters
from jaxllm.models import llama
from jaxllm.models.decoder import HfWeight, ModelConfig
from jaxllm.moe import MoEConfig, choose_backend, choose_exchange, jitter, route, statistics


class SparseMoE(nnx.Module):
    """The feed-forward layer: each token goes through `num_experts_per_tok` of `num_local_experts` gated MLPs (arXiv 2401.04088)."""

    def __init__(self, config, precision, moe: MoEConfig, lora: LoRAConfig, *, rngs: nnx.Rngs):
        self.config, self.moe = config, moe
        self.precision, self.lora = precision, lora
        stddev, embed, mlp = config.initializer_range, {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        key, experts = rngs.params(), config.num_local_experts
        router = stddev * jax.random.normal(key, (config.hidden_size, experts), precision.param)
        self.router = nnx.Param(router, axes=("embed", "router"))
        adapter = parameters(lora, ROUTER, embed, {"router": experts}, precision.param, key)
        self.router_lora_a, self.router_lora_b = adapter
        options = dict(experts=experts, rngs=rngs, stddev=stddev, lora=lora)
        self.gate_proj = GroupedLinear(embed, mlp, precision, name="gate_proj", **options)
        self.up_proj = GroupedLinear(embed, mlp, precision, name="up_proj", **options)
        self.down_proj = GroupedLinear(mlp, embed, precision, name="down_proj", **options)

    def __call__(self, x, real, noise=None):
        """x [B, T, E], real bool[B, T] -> ([B, T, E], what is recorded: `moe.statistics`, and how many assignments were dropped).

        noise: see `noise`; None in evaluation, where nothing is dropped either."""
        # As the layer is told to multiply, which may be otherwise than in the others.
        backend, multiple = choose_backend(self.moe, self.precision.compute, self.gate_proj.multiply)
        exchange_options = dict(training=noise is not None, multiple=multiple, base=self.lora.kept)
        how, _ = choose_exchange(self.moe, self.config, real.size, **exchange_options)
        with jax.named_scope("router"):
            if noise is not None:
                x = jitter(x, noise, self.config.router_jitter_noise)
            dtype = self.precision.compute if self.moe.router == "match_hf" else "float32"
            names, static = ("embed", "router"), (1, dtype, self.precision.gradient_reduce)
            if self.lora.rank is None:
                logits = matmul(x, self.router.get_value(), names, *static)
            else:
                sizes = (self.config.hidden_size,), (self.config.num_local_experts,)
                logits = frozen_matmul(x, self.router.get_value(), names, *sizes, dtype)
            if self.router_lora_a is not None:
                ab, dropped_out = (
                    (self.router_lora_a.get_value(), self.router_lora_b.get_value()),
                    dropout(x, noise, self.lora, ROUTER),
                )
                logits += adapted(dropped_out, *ab, names, *static[:1], self.lora.scale, *static[1:])
            logits = logits.astype(jnp.float32)
            weights, ids = route(logits, self.config.num_experts_per_tok)
            seen = statistics(logits, ids, real)
        with jax.named_scope("experts"):
            rows, sizes, home, dropped = dispatch(x, ids, real, how)
            options = dict(everywhere=how.everywhere, backend=backend, noise=self._of_rows(noise, ids, real, how))
            multiply = lambda linear, x: product(linear, x, self.config.keeps_products, sizes, **options)
            gate, up = multiply(self.gate_proj, rows), multiply(self.up_proj, rows)
            y = multiply(self.down_proj, checkpoint_name(swiglu(gate, up), "gated"))
            return combine(y, weights, home, how, x.dtype), seen | {"dropped": jnp.sum(dropped).astype(jnp.float32)}

    def _of_rows(self, noise, ids, real, how):
        """The noise of tokens as that of the rows that they are sent as, where adapters of experts ask for it."""
        experts = self.gate_proj, self.up_proj, self.down_proj
        if noise is None or not self.lora.dropout or all(linear.lora_a is None for linear in experts):
            return None
        key, numbers, places = noise
        both = jnp.stack([jnp.broadcast_to(numbers[:, None], places.shape), places], axis=-1)
        rows, *_ = dispatch(both, ids, real, how)
        return key, rows[..., 0], rows[..., 1]


class Block(nnx.Module):
    def __init__(self, config, precision, attention, moe, lora, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.self_attn = Attention(config, precision, lora, attention, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.moe = SparseMoE(config, precision, moe, lora, rngs=rngs)

    def __call__(self, x, cos, sin, k_start, k_end, layout, noise=None):
        """As `llama.Block`, with the statistics of its experts."""
        with jax.named_scope("self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, k_start, k_end, layout, noise)
        with jax.named_scope("moe"):
            y, seen = self.moe(self.post_attention_layernorm(x), k_end > k_start, noise)
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
