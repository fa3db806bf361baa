"""`attention`: one custom_vjp over a backend's forward and backward, on one device or over an axis of a shard_map.

A `Plan` says everything static; `forward` and `backward` are its two halves, for callers that put their own custom_vjp around them (a
shard_map inside whose residuals should be ordinary arrays outside). A backend is a module with these functions, for one device and one
chunk of keys, in the shapes of `reference.attention`:

    forward(q, k, v, k_start, k_end, *, aligned, scale) -> out in q's dtype, lse
    empty(q) -> carry;  fold(carry, q, k, v, k_start, k_end, *, scale) -> carry;  finish(carry, dtype) -> out, lse
    dq(q, k, v, do, lse, delta, k_start, k_end, *, into, scale) -> f32;  dkv(same) -> dk, dv f32
    backward(q, k, v, do, lse, delta, k_start, k_end, *, aligned, scale) -> dq, dk, dv f32; only where one pass is cheaper than two

    TILE: lengths must be multiples of it.  HEAD_DIMS: head dims it takes, ascending, or None for any.  PAIRED: true if k and v may both be the same
    array [2, B, S, K, D], keys first.

Chunks may come in any order: `fold` adds the keys of one, and the gradients of one are exact addends once lse is that of the whole row.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxllm_kernels import ring

BACKENDS = ("xla", "hopper", "triton")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def load_backend(name):
    """The module; loaded when asked for, since a kernel language is slow to import and may not be installed."""
    return importlib.import_module(f"jaxllm_kernels.attention_{name}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static of an attention call; see `attention` for the meaning of each field."""

    backend: str = "xla"
    axis: str | None = None
    layout: str = "contiguous"
    communication: str = "ring"
    window: int | None = None
    aligned: bool = False

    def __post_init__(self):
        choices = {"backend": BACKENDS, "layout": ring.LAYOUTS, "communication": tuple(COMMUNICATION)}
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise ValueError(f"attention: {field} = {getattr(self, field)!r} is none of {', '.join(known)}")
        if self.layout != "contiguous" and self.axis is None:
            raise ValueError(
                f"attention: layout = {self.layout!r} without an axis; name the one that splits the tokens"
            )
        whole = isinstance(self.window, int) and not isinstance(self.window, bool)
        if self.window is not None and not (whole and self.window >= 1):
            raise ValueError(
                f"attention: window = {self.window!r}; a query sees at least itself: an int from 1, or None"
            )


def without_padding(q, k, v, k_start, k_end):
    """Self-attention inputs with zeros at padding places (those whose interval is empty). A weight of exactly 0 is no protection against
    what stands there: 0 x NaN is NaN, in the output and in both gradient products."""
    real = (k_end > k_start)[..., None, None]
    return tuple(jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (q, k, v))


def windowed(k_start, k_end, window):
    """k_start of causal intervals when a query sees only its `window` last keys, itself included: i - j < window, as in Mistral."""
    return k_start if window is None else jnp.maximum(k_start, k_end - window)


def attention(
    q, k, v, k_start, k_end, *, backend="xla", axis=None, layout="contiguous", communication="ring", window=None, aligned=False
):  # fmt: skip
    """Attention over the keys that each query may see; differentiable in q, k and v.

    q: [B, T, H, D]; k, v: [B, S, K, D], one of float32, bfloat16 (and float16 where the backend says so), H a multiple of K; query head h
    reads key head h // (H // K). k_start, k_end: i32[B, T], the interval [k_start, k_end) of key indices that a query sees.
    Returns out [B, T, H, D] in q's dtype. Softmax and sums are float32. Residuals are q, k, v, out, lse and the intervals.

    axis: None, or the name of an axis of the surrounding shard_map over which the tokens of self-attention are split: T == S is then the
    local length, the intervals count keys of the whole row in its natural order, and `layout` says which tokens this device holds
    ("contiguous", or "zigzag" with T even: chunks r and 2 n - 1 - r of 2 n; `ring.token_order`). communication: "ring", keys and values
    travel from device to device, one hop hidden behind each kernel, their gradients behind in float32; or "allgather", every device
    fetches all keys at once. window: with causal intervals (k_end = own index + 1), the number of last keys that a query sees; ring steps in
    which nobody sees anything are not sent. aligned: a promise that T == S, place i of q and of k is the same token and query i sees
    no key behind i; then what stands at padding places, NaN included, has no influence. An axis implies it.
    The surrounding shard_map has check_vma=False, which "xla" alone can do without.
    Lengths and head dims that the backend's tiles do not fit are completed with zeros here; the kernels refuse them.

    ValueError: an unknown backend, layout or communication, a layout without an axis, a window below 1, shapes or dtypes that do not go
    together, a head dim above the backend's largest, an odd T with zigzag, a shard_map that checks types around a kernel for GPUs.
    Papers: FlashAttention-2 (arXiv 2307.08691), Ring Attention (arXiv 2310.01889), FlashAttention-3 (arXiv 2407.08608; `hopper`).
    """
    plan = Plan(backend, axis, layout, communication, window, aligned)
    _check(plan, q, k, v, k_start, k_end)
    k_start = windowed(k_start, k_end, window)
    if aligned or axis is not None:
        q, k, v = without_padding(q, k, v, k_start, k_end)
    return _attention(q, k, v, k_start, k_end, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, k, v, k_start, k_end, plan):
    return forward(plan, q, k, v, k_start, k_end)[0]


def _forward(q, k, v, k_start, k_end, plan):
    # The barrier: XLA of JAX 0.11 writes what a scan keeps by a copy of the call that made it, and would run the kernel twice.
    out, lse = jax.lax.optimization_barrier(forward(plan, q, k, v, k_start, k_end))
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, k_start, k_end, out, lse)


def _backward(plan, residuals, do):
    return *backward(plan, *residuals, do), None, None


_attention.defvjp(_forward, _backward)


def forward(plan: Plan, q, k, v, k_start, k_end):
    """(out [B, T, H, D] in q's dtype, lse f32[B, H, T]) of `plan`; q, k, v without what stands at padding places."""
    _check(plan, q, k, v, k_start, k_end)
    shape, scale = q.shape, q.shape[-1] ** -0.5
    (q, k, v), (k_start, k_end) = _fitted(plan, (q, k, v), (k_start, k_end))
    compute = _alone if plan.axis is None else COMMUNICATION[plan.communication][0]
    out, lse = compute(plan, q, k, v, k_start, k_end, shape[1], scale)
    return out[:, : shape[1], :, : shape[3]], lse[:, :, : shape[1]]


def backward(plan: Plan, q, k, v, k_start, k_end, out, lse, do):
    """(dq, dk, dv) in the dtypes of q, k and v, from the residuals and do [B, T, H, D]."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    # A query that sees nothing gives no gradient, whatever comes back to it: 0 x NaN is NaN.
    do = jnp.where((k_end > k_start)[..., None, None], do, jnp.zeros((), do.dtype))
    delta = jnp.moveaxis(jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 2)
    like = (q, k, v)
    (q, k, v, do), (k_start, k_end) = _fitted(plan, (q, k, v, do.astype(q.dtype)), (k_start, k_end))
    missing = [(0, 0), (0, 0), (0, q.shape[1] - length)]
    lse, delta = jnp.pad(lse, missing, constant_values=-jnp.inf), jnp.pad(delta, missing)
    compute = _alone_backward if plan.axis is None else COMMUNICATION[plan.communication][1]
    grads = compute(plan, q, k, v, do, lse, delta, k_start, k_end, length, scale)
    return tuple(g[:, : x.shape[1], :, : x.shape[3]].astype(x.dtype) for g, x in zip(grads, like, strict=True))


def _check(plan, q, k, v, k_start, k_end):
    def need(fits, what, got):
        if not fits:
            raise ValueError(f"attention: needs {what}, got {got}")

    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    need(q.ndim == k.ndim == 4 and k.shape == v.shape, "q [B, T, H, D] and k, v [B, S, K, D]", shapes)
    need(q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3], "one B and one D in q, k and v", shapes)
    need(q.dtype == k.dtype == v.dtype, "one dtype in q, k and v", f"{q.dtype}, {k.dtype}, {v.dtype}")
    need(q.dtype in DTYPES, "float32, bfloat16 or float16 q, k and v", q.dtype)
    need(k.shape[2] and q.shape[2] % k.shape[2] == 0, "query heads that are a multiple of the key heads", shapes)
    need(q.shape[1] and k.shape[1], "at least one query and one key", shapes)
    need(not (plan.aligned or plan.axis) or q.shape[1] == k.shape[1], "T == S for self-attention", shapes)
    for name, bound in (("k_start", k_start), ("k_end", k_end)):
        fits = bound.shape == q.shape[:2] and bound.dtype == jnp.int32
        need(fits, f"{name} int32{list(q.shape[:2])}", f"{bound.dtype}{list(bound.shape)}")
    head_dims = load_backend(plan.backend).HEAD_DIMS
    advice = f"{plan.backend!r} takes head dims up to {head_dims and head_dims[-1]}; 'xla' takes any"
    need(not head_dims or q.shape[3] <= head_dims[-1], "a smaller head dim", f"{q.shape[3]}; {advice}")
    # The kernels' results and loops do not carry the types that are checked; refused here, for what JAX says of it names neither.
    checked = plan.backend != "xla" and jax.typeof(q).manual_axis_type.varying
    need(not checked, f"jax.shard_map(..., check_vma=False) around backend = {plan.backend!r}", "one that checks")
    odd = plan.axis is not None and plan.layout == "zigzag" and q.shape[1] % 2
    need(not odd, "an even number of tokens on each device for zigzag", f"{q.shape[1]}; pad the rows")


def _fitted(plan, tensors, rows):
    """[B, T, heads, D] tensors and i32[B, T] rows completed with zeros to what the backend's tiles fit: keys nobody sees, queries that see
    nothing, components that add nothing to a product."""
    backend = load_backend(plan.backend)
    depth = tensors[0].shape[3]
    wide = min((d for d in backend.HEAD_DIMS or (depth,) if d >= depth), default=depth) - depth
    missing = lambda x: -x.shape[1] % backend.TILE
    pad = lambda x, widths: jnp.pad(x, widths) if any(after for _, after in widths) else x
    tensors = tuple(pad(x, [(0, 0), (0, missing(x)), (0, 0), (0, wide)]) for x in tensors)
    return tensors, tuple(pad(x, [(0, 0), (0, missing(x))]) for x in rows)


def _alone(plan, q, k, v, k_start, k_end, length, scale):
    return load_backend(plan.backend).forward(q, k, v, k_start, k_end, aligned=plan.aligned, scale=scale)


def _alone_backward(plan, *args):
    *arrays, _, scale = args
    return ring.both(load_backend(plan.backend), *arrays, aligned=plan.aligned, scale=scale)


def _with(function):
    """`function` of ring.py with the plan spelled out."""
    return lambda plan, *args: function(load_backend(plan.backend), plan.axis, plan.layout, plan.window, *args)


# How the keys of other devices come here: (forward, backward). One more entry is one more way (all-to-all over heads, rings of rings).
COMMUNICATION = {
    "ring": (_with(ring.ring_forward), _with(ring.ring_backward)),
    "allgather": (_with(ring.allgather_forward), _with(ring.allgather_backward)),
}
