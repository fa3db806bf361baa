"""The parts of a decoder block that families share: RMSNorm, Embedding, rotary positions, Attention, MLP.

Where a derivative decides memory (norm, gated product) or precision (embedding), it is written down: autodiff would keep several float32
copies of an activation, and would sum an embedding row's gradient in bfloat16. Rounding follows transformers' Llama: the norm is cast
before it meets its weight, cos and sin are cast before they meet q and k.

Not here: the choice of rematerialisation (models/decoder.py) and anything of a single family.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxllm.attention import AttentionConfig, attention
from jaxllm.linear import Linear, PrecisionConfig, gather
from jaxllm.lora import LoRAConfig
from jaxllm.section import UserError
from jaxllm.sharding import AT_REST, AXES, BATCH, WEIGHTS, axis_size, constrain

_TOKENS, _ROWS, _COLUMNS = P(BATCH, "sequence"), P(BATCH, "sequence", None), P(None, WEIGHTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def rms_norm(x, weight, eps, compute, reduce):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467); x [B, T, E], weight [E]. The normalised value is cast to
    x's dtype before the product, as transformers does. Keeps x alone for the backward pass."""
    return _rms_norm_forward(x, weight, eps, compute, reduce)[0]


def _normalised(x, eps):
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale, scale


def _rms_norm_forward(x, weight, eps, compute, reduce):
    used = gather(weight, ("embed",), compute)
    return _normalised(x, eps)[0].astype(x.dtype) * jnp.expand_dims(used, (0, 1)), (
        x,
        used,
        jnp.zeros((0,), weight.dtype),
    )


def _rms_norm_backward(eps, compute, reduce, residuals, dy):
    x, used, like = residuals
    normal, scale = _normalised(x, eps)
    dy = dy.astype(jnp.float32)
    dn = dy * jnp.expand_dims(used.astype(jnp.float32), (0, 1))
    dx = scale * (dn - normal * jnp.mean(dn * normal, axis=-1, keepdims=True))
    dw = jnp.sum(dy * normal, axis=(0, 1)).astype(reduce)
    return dx.astype(x.dtype), constrain(dw, "embed", table=AT_REST).astype(like.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, precision: PrecisionConfig):
        self.eps, self.compute, self.reduce = eps, precision.compute, precision.gradient_reduce
        self.weight = nnx.Param(jnp.ones((size,), precision.param), axes=("embed",))

    def __call__(self, x):
        """x [B, T, E] -> [B, T, E] in the compute dtype."""
        return checkpoint_name(rms_norm(x, self.weight.get_value(), self.eps, self.compute, self.reduce), "norm")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def embed(tokens, table, compute, reduce, pad_token_id):
    """Rows of table [V, E] at tokens i32[B, T] -> [B, T, E] in the compute dtype. The table is never gathered: each device looks up all
    tokens in its own columns, and one all-to-all turns columns into rows. (Left to XLA, a mesh that splits rows and tokens at once ends in
    full rematerialisations.) Gradients are summed in `reduce`'s dtype; the row of
    pad_token_id gets none, as with torch's padding_idx."""
    return _embed_forward(tokens, table, compute, reduce, pad_token_id)[0]


def _embed_forward(tokens, table, compute, reduce, pad_token_id):
    def local(tokens, table):
        ids = jax.lax.all_gather(tokens, WEIGHTS)  # [n, b, t]
        return jax.lax.all_to_all(table[ids], WEIGHTS, split_axis=0, concat_axis=3, tiled=True)[
            0
        ]  # [n, b, t, E / n] -> [b, t, E]

    residuals = (tokens, jnp.zeros((0, table.shape[0]), table.dtype))
    table = table.astype(compute)
    if axis_size(*AXES) == 1:
        return table[tokens], residuals
    return jax.shard_map(local, in_specs=(_TOKENS, _COLUMNS), out_specs=_ROWS, check_vma=False)(
        tokens, table
    ), residuals


def _embed_backward(compute, reduce, pad_token_id, residuals, dy):
    tokens, like = residuals
    if pad_token_id is not None:
        dy = jnp.where((tokens == pad_token_id)[..., None], jnp.zeros((), dy.dtype), dy)
    add = lambda ids, rows: jnp.zeros((like.shape[1], rows.shape[-1]), reduce).at[ids].add(rows.astype(reduce))

    def local(tokens, dy):
        rows = jax.lax.all_to_all(dy[None], WEIGHTS, split_axis=3, concat_axis=0, tiled=True)
        return jax.lax.psum(add(jax.lax.all_gather(tokens, WEIGHTS), rows), "replica")

    if axis_size(*AXES) == 1:
        return None, add(tokens, dy).astype(like.dtype)
    grad = jax.shard_map(local, in_specs=(_TOKENS, _ROWS), out_specs=_COLUMNS, check_vma=False)(tokens, dy)
    return None, grad.astype(like.dtype)


embed.defvjp(_embed_forward, _embed_backward)


class Embedding(nnx.Module):
    def __init__(
        self, vocab_size: int, size: int, precision: PrecisionConfig, *, rngs: nnx.Rngs, stddev=0.02, pad_token_id=None
    ):
        self.compute, self.reduce, self.pad_token_id = precision.compute, precision.gradient_reduce, pad_token_id
        init = stddev * jax.random.normal(rngs.params(), (vocab_size, size), precision.param)
        self.embedding = nnx.Param(init, axes=("vocab", "embed"))

    def __call__(self, tokens):
        """tokens i32[B, T] -> [B, T, E] in the compute dtype."""
        return embed(tokens, self.embedding.get_value(), self.compute, self.reduce, self.pad_token_id)


# Keys of rope_parameters that each type needs and may have, as transformers 5 defines them for Llama.
ROPE_KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings"), ("attention_factor", "factor")),
    "proportional": ((), ("factor", "partial_rotary_factor")),
}


def check_rope(rope: dict, where="model.rope_parameters") -> None:
    """UserError if a rope_parameters dict has an unknown type, lacks a key that its type needs, or has one that would be ignored."""
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise UserError(f"{where}.rope_type: {kind!r} is unknown; known types: {', '.join(ROPE_KEYS)}")
    needed, optional = ROPE_KEYS[kind]
    if missing := [key for key in ("rope_theta", *needed) if rope.get(key) is None]:
        raise UserError(
            f"{where}: rope_type = {kind!r} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing"
        )
    if extra := sorted(set(rope) - {"rope_type", "rope_theta", *needed, *optional}):
        raise UserError(
            f"{where}: rope_type = {kind!r} does not use {', '.join(extra)}; allowed: {', '.join(('rope_theta', *needed, *optional))}"
        )
    for key, value in rope.items():
        values = value if isinstance(value, list) else [value]
        if key not in ("rope_type", "truncate") and not all(isinstance(v, int | float) and v > 0 for v in values):
            raise UserError(f"{where}.{key}: must be positive, got {value!r}")
    if rope["rope_theta"] <= 1:
        raise UserError(f"{where}.rope_theta: must be above 1, got {rope['rope_theta']!r}")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise UserError(
            f"{where}: high_freq_factor = {rope['high_freq_factor']} must be above low_freq_factor = {rope['low_freq_factor']}"
        )


def rope_frequencies(rope: dict, head_dim: int, max_position_embeddings: int, length: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies f32[head_dim / 2], factor on cos and sin) for rows of `length` tokens.

    Formulas as in transformers 5 (modeling_rope_utils): linear; dynamic NTK; llama3; YaRN (arXiv 2309.00071); LongRoPE (arXiv
    2402.13753); proportional. "dynamic" and "longrope" depend on the length, for which transformers takes the largest position of a batch;
    here it is the row length, so that the angles do not depend on how documents fall into batches.
    """
    kind, theta, factor = rope.get("rope_type", "default"), rope["rope_theta"], rope.get("factor")
    original = rope.get("original_max_position_embeddings")
    steps = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = lambda base: (1.0 / np.float32(base) ** steps).astype(np.float32)
    if kind == "default":
        return frequencies(theta), 1.0
    if kind == "linear":
        return frequencies(theta) / np.float32(factor), 1.0
    if kind == "dynamic":
        stretch = factor * max(length, max_position_embeddings) / max_position_embeddings - (factor - 1)
        return frequencies(theta * stretch ** (head_dim / (head_dim - 2))), 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        inverse = frequencies(theta)
        wavelength = 2 * math.pi / inverse
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) * inverse / factor + smooth * inverse
        scaled = np.where(wavelength > original / low, inverse / factor, blended)
        return np.where(wavelength < original / high, inverse, scaled).astype(np.float32), 1.0
    if kind == "longrope":
        chosen = np.asarray(rope["long_factor" if length > original else "short_factor"], np.float32)
        if chosen.shape != steps.shape:
            raise UserError(
                f"model.rope_parameters: long_factor and short_factor need head_dim / 2 = {steps.size} values, got {chosen.size}"
            )
        ratio = factor if factor is not None else max_position_embeddings / original
        default = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
        given = rope.get("attention_factor")
        return (1.0 / (chosen * np.float32(theta) ** steps)).astype(np.float32), default if given is None else given
    if kind == "proportional":
        angles = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
        return np.where(np.arange(steps.size) < angles, frequencies(theta), 0).astype(np.float32) / np.float32(
            factor or 1.0
        ), 1.0

    def turns(rotations):  # YaRN: the dim whose wavelength makes that many rotations over the original length
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns(rope.get("beta_fast") or 32), turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(steps.size, dtype=np.float32) - low) / (high - low or 0.001), 0, 1)
    inverse = frequencies(theta)
    inverse = inverse / np.float32(factor) * ramp + inverse * (1 - ramp)
    scale = lambda mscale: 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    default = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
    given = rope.get("attention_factor")
    return inverse.astype(np.float32), default if given is None else given


def rotary_tables(positions, inverse_frequencies, factor, dtype):
    """positions i32[B, T] -> cos, sin [B, T, 1, D / 2] in `dtype`; angles in float32, since bfloat16 cannot tell far positions apart."""
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(inverse_frequencies)[None, None, None, :]
    return (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)


def rotate(x, cos, sin):
    """Rotary position embedding of x [B, T, H, D] (arXiv 2104.09864): pairs are (i, i + D / 2), as in transformers."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def product(linear, x, kept: bool, *more, **options):
    """linear(x, *more, **options), of a Linear or GroupedLinear. If rematerialisation keeps it, behind a barrier and named again there, which is then what
    is kept: XLA of JAX 0.11 writes what a scan keeps by a copy of the product that made it, and computes products twice (docs/decisions.md)."""
    y = linear(x, *more, **options)
    return checkpoint_name(jax.lax.optimization_barrier(y), linear.name) if kept else y


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(
        self, config, precision: PrecisionConfig, lora: LoRAConfig, attention_config: AttentionConfig, *, rngs: nnx.Rngs
    ):
        embed_dim, head_dim = {"embed": config.hidden_size}, {"head_dim": config.head_dim}
        heads, kv_heads = (
            {"heads": config.num_attention_heads, **head_dim},
            {"kv_heads": config.num_key_value_heads, **head_dim},
        )
        linear = functools.partial(
            Linear,
            precision=precision,
            lora=lora,
            rngs=rngs,
            stddev=config.initializer_range,
            use_bias=config.attention_bias,
        )
        self.q_proj = linear(embed_dim, heads, name="q_proj")
        self.k_proj = linear(embed_dim, kv_heads, name="k_proj")
        self.v_proj = linear(embed_dim, kv_heads, name="v_proj")
        self.o_proj = linear(heads, embed_dim, name="o_proj")
        self.config, self.window, self.kept = attention_config, config.sliding_window, config.keeps_products

    def __call__(self, x, cos, sin, k_start, k_end, layout, noise=None):
        """x [B, T, E], cos and sin [B, T, 1, D / 2], intervals i32[B, T] of places laid out as `layout` -> [B, T, E]. noise: see `Linear`."""
        q, k, v = (product(linear, x, self.kept, noise) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        with jax.named_scope("attention"):
            out = attention(q, k, v, k_start, k_end, self.config, layout=layout, window=self.window)
        return product(self.o_proj, out, self.kept, noise)


@jax.custom_vjp
def swiglu(gate, up):
    """silu(gate) * up (arXiv 2002.05202); keeps gate and up alone for the backward pass."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(residuals, dy):
    gate, up = residuals
    s = jax.nn.sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


class MLP(nnx.Module):
    """The gated feed-forward layer of Llama: down(silu(gate(x)) * up(x))."""

    def __init__(self, config, precision: PrecisionConfig, lora: LoRAConfig, *, rngs: nnx.Rngs):
        self.kept = config.keeps_products
        embed_dim, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        linear = functools.partial(
            Linear, precision=precision, lora=lora, rngs=rngs, stddev=config.initializer_range, use_bias=config.mlp_bias
        )
        self.gate_proj = linear(embed_dim, mlp, name="gate_proj")
        self.up_proj = linear(embed_dim, mlp, name="up_proj")
        self.down_proj = linear(mlp, embed_dim, name="down_proj")

    def __call__(self, x, noise=None):
        """x [B, T, E] -> [B, T, E]. noise: see `Linear`."""
        gate, up = (product(linear, x, self.kept, noise) for linear in (self.gate_proj, self.up_proj))
        return self.down_proj(
            checkpoint_name(swiglu(gate, up), "gated"), noise
        )  # what it yields is added, and never kept
