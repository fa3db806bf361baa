"""What every attention backend must do: cases, a float64 oracle, ways of calling and bounds, none of which knows a backend; and how those run here.

test_attention_contract.py runs each backend through all of it. A backend is a module as jaxllm_kernels/attention.py describes it, or whatever has
its functions. Lengths and head dims of CASES fit the tiles of all of them, and more tiles are streamed than a kernel has slots.

Not here: what one backend alone promises (which tiles it skips, what it refuses, what a compiler makes of it); that is in the backend's own file.
"""

import dataclasses
import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxllm_kernels import load_backend, ring
from support import error, no_races

RESULTS = ("out", "lse", "dq", "dk", "dv")
FLOAT32 = 2e-6  # relative error of float32 sums


def oracle(q, k, v, k_start, k_end, do, scale=None, half=lambda x: x):
    """RESULTS in float64 numpy, written independently of the package. half: rounds what kernels keep in half precision, which is p, ds and out."""
    q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    k_all, v_all = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    index = np.arange(k.shape[1])
    seen = ((index >= np.asarray(k_start)[..., None]) & (index < np.asarray(k_end)[..., None]))[:, None]
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", q, k_all) * scale, -np.inf)
    peak = np.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0)
    p = np.exp(scores - peak)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    total = np.where(total > 0, total, 1)
    out = half(np.einsum("bhts,bshd->bthd", half(p) / total, v_all))
    p, dp = p / total, np.einsum("bthd,bshd->bhts", do, v_all)
    ds = half(p * (dp - (p * dp).sum(-1, keepdims=True)))
    by_key = lambda x: x.reshape(*x.shape[:2], k.shape[2], groups, -1).sum(3)
    dq = np.einsum("bhts,bshd->bthd", ds, k_all) * scale
    dk = by_key(np.einsum("bhts,bthd->bshd", ds, q)) * scale
    return out, lse, dq, dk, by_key(np.einsum("bhts,bthd->bshd", half(p), do))


def delta_of(out, do):
    """f32[B, H, T], as the backward kernels take it."""
    return np.einsum("bthd,bthd->bht", *(np.asarray(x).astype(np.float64) for x in (do, out))).astype(np.float32)


# --- cases -----------------------------------------------------------------------------------------------------------


def causal(T, *rows, window=None):
    """(k_start, k_end), i32[B, T], of packed causal documents: the lengths of each row's, with padding behind them."""
    start, end = np.zeros((2, len(rows) or 1, T), np.int32)
    for b, documents in enumerate(rows or ((T,),)):
        first = 0
        for length in documents:
            place = np.arange(first, first + length)
            start[b, place], end[b, place] = np.maximum(first, place + 1 - (window or T)), place + 1
            first += length
    return start, end


@dataclasses.dataclass(frozen=True)
class Case:
    """intervals: (k_start, k_end) of every query; S: keys, as many as queries unless given. pieces: the keys come in so many, the last first.
    aligned: the hint of `forward`. change(q, k) -> q, k, instead of standard normal ones. garbage: something stands at padding places."""

    intervals: tuple
    S: int | None = None
    H: int = 1
    K: int = 1
    D: int = 64
    pieces: int = 1
    scale: float | None = None
    aligned: bool = True
    change: Callable | None = None
    garbage: bool = False

    def inputs(self, dtype):
        """(q, k, v, k_start, k_end, do), numpy arrays, without garbage."""
        rng = np.random.default_rng(0)
        (B, T), S = self.intervals[0].shape, self.S or self.intervals[0].shape[1]
        shapes = (B, T, self.H, self.D), *((B, S, self.K, self.D),) * 2, (B, T, self.H, self.D)
        q, k, v, do = (rng.standard_normal(shape) for shape in shapes)
        if self.change:
            q, k = self.change(q, k)
        if self.garbage:
            q, k, v, do = filled((q, k, v, do), self.intervals, (0.0,) * 4)
        q, k, v, do = (x.astype(np.float32).astype(dtype) for x in (q, k, v, do))
        return q, k, v, *self.intervals, do


def filled(arrays, intervals, values):
    """[B, T, heads, D] arrays with these values at padding places."""
    padding = (intervals[1] <= intervals[0])[..., None, None]
    return [np.where(padding, np.asarray(value).astype(x.dtype), x) for x, value in zip(arrays, values, strict=True)]


def _large_logits(q, k):
    """Scores of thousands: the running maximum rises up to the last key, and the first query's only key has a score near -10,000."""
    q, k = q * 1e3, k * np.linspace(0.1, 1, k.shape[1])[:, None, None]
    q[:, 0] = -1e5 * k[:, 0] / np.linalg.norm(k[:, 0], axis=-1, keepdims=True)
    return q, k


def _nowhere(start, end):
    """The same with intervals of padding that are empty in another way."""
    return np.where(end > start, start, 10**6).astype(np.int32), np.where(end > start, end, -3).astype(np.int32)


def _of_a_ring():
    """A device's queries against all keys of the row: two documents and padding."""
    start, end = np.zeros((1, 128), np.int32), 390 + np.arange(128, dtype=np.int32)[None]
    start[0, 100:], end[0, 120:] = 485, 0
    return start, end


_BEYOND = np.full((1, 128), -200, np.int32), np.full((1, 128), 684, np.int32)  # both ends to be cut off
CASES = {
    "causal": Case(causal(384)),
    "packed-with-garbage-at-padding": Case(_nowhere(*causal(384, (70, 230, 60))), garbage=True),
    "windowed": Case(causal(384, (60, 250), window=70)),
    "nobody-sees-anything": Case((np.full((1, 384), 7, np.int32),) * 2, aligned=False),
    "large-logits": Case(causal(384), change=_large_logits),
    "8-query-heads-of-2-key-heads-see-every-key": Case(_BEYOND, S=256, H=8, K=2, aligned=False),
    "windowed-rows-of-wide-heads": Case(causal(256, (100, 140), (60,), window=70), D=256),
    "wide-heads-in-pieces": Case(_of_a_ring(), S=512, D=256, pieces=2, aligned=False),
    "4-query-heads-of-2-key-heads-in-pieces": Case(
        _of_a_ring(), S=768, H=4, K=2, D=128, pieces=2, scale=80**-0.5, aligned=False
    ),
}

# For a whole `attention`: lengths and head dims that fit no tile. The first two are rows of one document.
WHOLE = {
    "padded": (causal(150, (130,)), None),
    "padded-and-windowed": (causal(150, (130,), window=70), 70),
    "packed": (causal(150, (60, 70)), None),
}  # (intervals, window)


# --- ways of calling -------------------------------------------------------------------------------------------------


def blocks(backend, given, case, clean):
    """RESULTS by a backend's own functions, all keys at once or in pieces as a ring brings them. The gradients' lse and delta are the oracle's,
    of `clean`: no error but the kernel's own is in them."""
    q, k, v, k_start, k_end, do = (jnp.asarray(x) for x in given)
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    exact_out, exact_lse, *_ = oracle(*clean, case.scale)
    rows = (do, jnp.asarray(exact_lse, jnp.float32), jnp.asarray(delta_of(exact_out, clean[5])))
    if case.pieces == 1:
        rest = (q, k, v, *rows, k_start, k_end)
        out, lse = backend.forward(q, k, v, k_start, k_end, aligned=case.aligned, scale=scale)
        return out, lse, backend.dq(*rest, into=None, scale=scale), *backend.dkv(*rest, into=None, scale=scale)
    size = k.shape[1] // case.pieces
    carry, dq, dkv = backend.empty(q), None, []
    for first in reversed(range(0, k.shape[1], size)):
        pair, ends = jnp.stack([x[:, first : first + size] for x in (k, v)]), (k_start - first, k_end - first)
        keys = ring.halves(backend, pair)
        carry = backend.fold(carry, q, *keys, *ends, scale=scale)
        dq = backend.dq(q, *keys, *rows, *ends, into=dq, scale=scale)
        # what was there before shows when it is forgotten, or added twice
        before = tuple(jnp.full(pair.shape[1:], value, jnp.float32) for value in (0.5, -0.5))
        sums = backend.dkv(q, *keys, *rows, *ends, into=before, scale=scale)
        dkv.insert(0, [x - y for x, y in zip(sums, before, strict=True)])
    return *backend.finish(carry, q.dtype), dq, *(np.concatenate(parts, axis=1) for parts in zip(*dkv, strict=True))


# --- bounds ----------------------------------------------------------------------------------------------------------


def check(got, given, scale=None):
    """`got`, {name of RESULTS: array}, is the oracle's: in float32 to within FLOAT32, in half precision to within twice the error that rounding p,
    ds and out makes, at least that of one rounding of the result. Scores in the thousands are known to 2^-22 of them.

    lse is float32 in any case. Queries that see nothing and keys that nobody sees: exactly 0, and lse -inf."""
    q, k, _, k_start, k_end, _ = given
    want = dict(zip(RESULTS, oracle(*given, scale), strict=True))
    bounds = dict.fromkeys(RESULTS, FLOAT32)
    if q.dtype != np.float32:
        rounded = oracle(*given, scale, half=lambda x: x.astype(q.dtype).astype(np.float64))
        once = float(ml_dtypes.finfo(q.dtype).eps) / 2
        bounds |= {
            name: 2 * max(error(x, want[name]), once) for name, x in zip(RESULTS, rounded, strict=True) if name != "lse"
        }
    finite = np.isfinite(want["lse"])
    largest = np.abs(want["lse"]).max(where=finite, initial=0)
    key = np.arange(k.shape[1])
    seen = (key >= k_start[..., None]) & (key < k_end[..., None])
    blind, unseen = ~seen.any(2), ~seen.any(1)
    for name, x in got.items():
        x = np.asarray(x).astype(np.float64)
        if name == "lse":
            assert np.array_equal(x == -np.inf, ~finite), "lse is -inf exactly where nothing is seen"
            x, want[name] = (np.where(finite, y, 0) for y in (x, want[name]))
        else:
            bounds[name] += 2.0**-22 * largest * (largest > 100)
            assert not x[blind if name in ("out", "dq") else unseen].any(), f"{name} is 0 where nothing is seen"
        assert error(x, want[name]) < bounds[name], name


# --- backends on a CPU -----------------------------------------------------------------------------------------------


@functools.cache
def compiled(name):
    """ "xla", or "hopper" in Mosaic's interpreter with its race detector (from JAX 0.11): functions that are compiled once for a shape.

    triton_children.py does the like for "triton"."""
    module, more = load_backend(name), {"interpret": True} if name == "hopper" else {}
    static = dict(forward=("aligned", "scale"), fold="scale", dq="scale", dkv="scale", backward=("aligned", "scale"))
    functions = {
        part: jax.jit(functools.partial(getattr(module, part), **more), static_argnames=names)
        for part, names in static.items()
        if hasattr(module, part)
    }
    if name == "hopper":
        checked = lambda function: lambda *args, **options: no_races(function(*args, **options))
        functions = {part: checked(function) for part, function in functions.items()}
    kept = ("empty", "finish", "TILE", "HEAD_DIMS", "PAIRED")
    return types.SimpleNamespace(**functions, **{part: getattr(module, part) for part in kept if hasattr(module, part)})
