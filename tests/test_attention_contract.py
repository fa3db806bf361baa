"""Every attention backend through one contract (attention_contract.py): out, lse and the gradient blocks, at once and in pieces, and a whole `attention`.

"xla" runs as it is. "hopper" runs in Mosaic's interpreter, with its race detector; "triton" in Triton's. "cudnn" has no gradient blocks and no packed
rows, and JAX does not even trace it where the library is missing: its mask, lse and gradients are tried with the XLA implementation of the same
public function, and cuDNN itself by `python -m benchmarks.gpu`.
"""

import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attention_contract as contract
import triton_children
from jaxllm.attention import one_document
from jaxllm_kernels import attention, load_backend, without_padding

pytestmark = pytest.mark.version
DTYPES = {
    "xla": (np.float32, ml_dtypes.bfloat16, np.float16),
    "hopper": (ml_dtypes.bfloat16,),
    "triton": (np.float32, ml_dtypes.bfloat16, np.float16),
    "cudnn": (np.float32,),
}
KERNELS = ("xla", "hopper", "triton")
# Of q, k, v and do at padding places, finite; with the Hopper kernels, which mask last, products with it may be infinite.
GARBAGE = {"xla": (1e30, 1e30, 1e30, 1e6), "hopper": (1e39,) * 4, "triton": (1e30, 1e30, 1e30, 1e6)}


@pytest.fixture
def load(monkeypatch):
    """load(name): the backend as it can run here, which is then what `attention` gets too."""

    def backend(name):
        if name == "triton":
            if not importlib.util.find_spec("triton") or not importlib.util.find_spec("torch"):
                pytest.skip("needs triton, torch: pip install 'jaxllm[triton,test]'")
            triton_children.interpreted(monkeypatch)
            return load_backend(name)
        if name == "hopper" and jax.version.__version_info__ < (0, 11):
            pytest.skip("the Mosaic interpreter of jax 0.10 cannot run these kernels; the newest pair does")
        monkeypatch.setitem(sys.modules, f"jaxllm_kernels.attention_{name}", contract.compiled(name))
        return contract.compiled(name)

    return backend


@pytest.mark.parametrize("case", contract.CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_out_lse_and_gradient_blocks_are_the_oracles(load, name, case):
    backend, case = load(name), contract.CASES[case]
    for dtype in DTYPES[name][: None if case.garbage or case.change or case.pieces > 1 else 1]:
        q, k, v, *intervals, do = clean = case.inputs(dtype)
        if case.garbage:
            values = np.minimum(GARBAGE[name], float(ml_dtypes.finfo(dtype).max))
            q, k, v, do = contract.filled((q, k, v, do), intervals, values)
        got = contract.blocks(backend, (q, k, v, *intervals, do), case, clean)
        contract.check(dict(zip(contract.RESULTS, got, strict=True)), clean, case.scale)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, rows) for name in KERNELS for rows in ("padded-and-windowed", "packed")),
        *(("cudnn", rows) for rows in ("padded-and-windowed", "padded")),
    ],
)
def test_a_whole_attention_and_its_gradient_are_the_oracles(load, name, rows):
    """150 tokens in heads of 80; NaN stands at padding places, and comes back to them in the backward pass."""
    intervals, window = contract.WHOLE[rows]
    q, k, v, k_start, k_end, do = clean = contract.Case(intervals, H=2, D=80, garbage=True).inputs(DTYPES[name][0])
    nan = contract.filled((q, k, v, do), intervals, (np.nan,) * 4)
    if name == "cudnn":
        run = functools.partial(one_document, window=window, implementation="xla", with_lse=True)
        call = jax.jit(lambda *arrays: run(*without_padding(*arrays, k_start, k_end), k_start, k_end))
    else:
        load(name)
        attend = functools.partial(attention, backend=name, window=window, aligned=True)
        call = lambda *arrays: (attend(*arrays, k_start, k_end), None)
    out, pull, lse = jax.vjp(call, *nan[:3], has_aux=True)
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *pull(jnp.asarray(nan[3]))), strict=True))
    contract.check(got | ({} if lse is None else {"lse": lse}), clean)
