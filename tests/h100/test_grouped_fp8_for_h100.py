"""An expert layer's products in FP8 at Mixtral's width, compiled for H100s that are not here: kernels and their operands, what travels between devices, and
what is written to be multiplied. Compiled, not measured."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from h100.compiled import MARKS, abstract, checked_kernels, compiled_on, dump_kernels, h100s
from jaxllm import fp8
from jaxllm.grouped_linear import fp8_grouped_matmul
from jaxllm.sharding import AT_REST, AXES, spec

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        jax.version.__version_info__ < (0, 11),
        reason="kernels of JAX 0.10 cannot multiply e5m2 by e4m3, and FP8 experts on hopper are refused by name",
    ),
]
E, K, N, R = 8, 4096, 14336, 4096
NAMES = ("experts", "embed", "mlp")


def test_a_layer_s_products_are_three_kernels_of_fp8_operands_each_quantised_in_one_pass(tmp_path, monkeypatch):
    mesh = h100s(data=2, expert=4)
    rows, dy = (abstract(mesh, (8, R, size), jnp.bfloat16, AXES) for size in (K, N))
    sizes, kernel = (
        abstract(mesh, (8, 2), jnp.int32, AXES),
        abstract(mesh, (E, K, N), jnp.float32, *spec(AT_REST, NAMES)),
    )
    shapes = {op: (E,) if op == "kernel" else () for op in fp8.FORMATS}
    scales, seen = ({op: abstract(mesh, (*d, *more), jnp.float32) for op, d in shapes.items()} for more in ((), (2,)))

    def gradients(rows, sizes, kernel, dy, scales, seen):
        static = (NAMES, False, "bfloat16", "float32", "hopper")
        multiply = lambda rows, kernel, scales, seen: fp8_grouped_matmul(
            rows, sizes, kernel, scales, *static, seen=seen
        )
        y, back = jax.vjp(multiply, rows, kernel, scales, seen)
        return y, back(dy)

    dump_kernels(tmp_path, monkeypatch)
    text = compiled_on(mesh, gradients, rows, sizes, kernel, dy, scales, seen).as_text()
    names = sorted(name for name, _ in checked_kernels(tmp_path))
    assert names == ["grouped_forward", "grouped_forward", "grouped_wgrad"]

    what = dict(re.findall(r"^ *(?:ROOT )?(%\S+) = (.*)$", text, re.MULTILINE))
    e4m3, e5m2 = "f8e4m3fn", "f8e5m2"
    calls = [re.search(r"custom-call\((.*?)\)", w)[1].split(", ") for w in what.values() if '"mosaic_gpu' in w]
    operands = [tuple(what[operand.split()[-1]].split("[")[0] for operand in call[:2]) for call in calls]
    assert sorted(operands) == sorted([(e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)])

    travelling = lambda kind: [w.split(f" {kind}")[0] for w in what.values() if re.search(rf" {kind}(-start)?\(", w)]
    weights = [w for w in travelling("all-gather") if re.search(r"\[\d+,\d+,\d+\]", w)]
    assert len(weights) == 1 and set(re.findall(r"(\w+)\[\d+,\d+,\d+\]", weights[0])) == {e4m3}
    (summed,) = travelling("reduce-scatter")
    assert set(re.findall(r"(\w+)\[\d+,\d+,\d+\]", summed)) == {"f32"}

    # Amax and shares are taken where a tensor is quantised: besides FP8 nothing as large is written but the gradient of the kernel, put in order for the sum
    # and after it.
    fusions = [line.split(" fusion(")[0] for line in text[text.index("\nENTRY") :].splitlines() if " fusion(" in line]
    written = [array for fusion in fusions for array in re.findall(r"(\w+)\[([\d,]+)\]", fusion)]
    large = [dtype for dtype, dims in written if math.prod(map(int, dims.split(","))) >= R * K]
    assert set(large) <= {e4m3, e5m2, "f32"} and large.count("f32") <= 2, large
