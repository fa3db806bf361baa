"""The Hopper kernels compiled for an H100 that is not here: what the compiler made of every plan that ships. Compiled, not measured."""

import re

import jax.numpy as jnp
import pytest

from h100.compiled import MARKS, checked_kernels, compiled_for_h100, dump_kernels
from jaxllm_kernels import attention_hopper as hopper

pytestmark = MARKS
B, T, S, H, K = 2, 1024, 1536, 8, 2


def shapes(head_dim):
    """Of q, k, v, do, lse, delta, k_start, k_end."""
    q, k = ((B, T, H, head_dim), jnp.bfloat16), ((B, S, K, head_dim), jnp.bfloat16)
    rows, place = ((B, H, T), jnp.float32), ((B, T), jnp.int32)
    return q, k, k, q, rows, rows, place, place


def every_kernel(q, k, v, do, lse, delta, k_start, k_end):
    """Each kernel, and each again as a ring calls it: keys and values in one array, and sums that it adds to in place."""
    rest, intervals, pair = (do, lse, delta, k_start, k_end), (k_start, k_end), jnp.stack([k, v])
    dq, dkv = hopper.dq(q, k, v, *rest), hopper.dkv(q, k, v, *rest)
    in_place = (
        hopper.fold(hopper.empty(q), q, pair, pair, *intervals),
        hopper.dq(q, pair, pair, *rest, dq),
        hopper.dkv(q, pair, pair, *rest, dkv),
    )
    return hopper.forward(q, k, v, *intervals), in_place


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_no_plan_spills_or_serialises_and_all_use_tensor_cores_and_tma(head_dim, tmp_path, monkeypatch):
    dump_kernels(tmp_path, monkeypatch)
    compiled_for_h100(every_kernel, *shapes(head_dim))
    found = checked_kernels(tmp_path)
    for name, code in found:
        assert code.count("wgmma.mma_async") >= 24 and code.count("cp.async.bulk.tensor") >= 6, name
    assert sorted(name for name, _ in found) == sorted(["attention_forward", "attention_dq", "attention_dkv"] * 2)


def test_successive_folds_and_sums_copy_nothing():
    sums = [((B, T, H, 64), jnp.float32), *[((B, H, T), jnp.float32)] * 2, *[((B, S, K, 64), jnp.float32)] * 2]

    def ring(q, k, v, do, lse, delta, k_start, k_end, acc, m, l, dk, dv, dq):
        carry, dkv = (acc, m, l), (dk, dv)
        for _ in range(3):
            carry = hopper.fold(carry, q, k, v, k_start, k_end)
            dq = hopper.dq(q, k, v, do, lse, delta, k_start, k_end, dq)
            dkv = hopper.dkv(q, k, v, do, lse, delta, k_start, k_end, dkv)
        return carry, dkv, dq

    text = compiled_for_h100(ring, *shapes(64), *sums, sums[0], donated=range(8, 14)).as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    assert len(calls) == 9 and all("output_to_operand_aliasing" in call for call in calls)
    assert not re.findall(r"\bcopy(?:-start)?\(", text)
