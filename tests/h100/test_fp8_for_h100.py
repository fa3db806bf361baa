"""FP8 products compiled for H100s that are not here: what cuBLAS is given, what travels between devices. Compiled, not measured."""

import re

import jax
import jax.numpy as jnp
import pytest

from h100.compiled import MARKS, abstract, compiled_on, h100s
from jaxllm import fp8, step
from jaxllm.linear import PrecisionConfig, gather
from jaxllm.sharding import AT_REST, constrain, spec

pytestmark = MARKS


@pytest.fixture(scope="module")
def instructions():
    """{name: what it is} of the instructions of two products in a scan with rematerialisation, forward and backward, compiled for 8 H100s."""
    sizes, names = {"embed": 1024, "mlp": 2048}, (("embed", "mlp"), ("mlp", "embed"))

    def project(x, kernel, scales, names):
        used = lambda q: gather(q, names, q.dtype)
        rests = lambda dw: constrain(dw, *names, table=AT_REST)
        return fp8.matmul(x, kernel, scales, "bfloat16", "float32", used=used, rests=rests)

    def layer(x, own):
        y = jax.nn.silu(project(x, own[0][0], own[1][0], names[0]))
        return x + project(y, own[0][1], own[1][1], names[1]), None

    def loss(kernels, scales, x):
        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, (kernels, scales))[0].astype(jnp.float32)))

    mesh, axes = h100s(data=8), [spec(AT_REST, ("layers", *n)) for n in names]
    kernels = [abstract(mesh, (2, *map(sizes.get, n)), jnp.float32, *a) for n, a in zip(names, axes, strict=True)]
    scales = [{operand: abstract(mesh, (2,), jnp.float32) for operand in fp8.FORMATS} for _ in names]
    x = abstract(mesh, (8, 1024, 1024), jnp.bfloat16, "data")
    text = compiled_on(mesh, jax.grad(loss, argnums=(0, 1)), kernels, scales, x).as_text()
    return dict(re.findall(r"^ *(?:ROOT )?(%\S+) = (.*)$", text, re.MULTILINE))


def test_h100s_multiply_in_fp8_and_round_what_a_float32_factor_has_scaled_once(instructions):
    calls = [what for what in instructions.values() if '"__cublas$lt$matmul$f8"' in what]
    assert len(calls) == 7, "three for each product, and the first again in the backward pass"
    assert not [what for what in instructions.values() if re.search(r" dot\(|cublas\$(gemm|lt\$matmul\")", what)]
    assert sorted(re.findall(r"\w+", what)[0] for what in calls) == ["bf16"] * 5 + ["f32"] * 2  # y and dx; dw
    rounded = [what for what in instructions.values() if re.match(r"bf16\[\] (convert|bitcast)\(", what)]
    assert not rounded, "a factor of a product"
    for what in calls:
        # Behind both operands: what is added, if anything, and a factor for each operand.
        behind = re.search(r"custom-call\((.*?)\)", what)[1].split(", ")[2:]
        assert [instructions[name].split()[0] for name in behind][-2:] == ["f32[]", "f32[]"]
        fast = '"operand_precision":["DEFAULT","DEFAULT"]' in what
        assert fast == ("transpose(jvp" not in what or "rematted" in what), what


def test_h100s_gather_weights_in_fp8_and_agree_on_all_amax_of_a_layer_at_once(instructions):
    gathered = [what for what in instructions.values() if re.search(r" all-gather(-start)?\(", what)]
    assert gathered and all(
        set(re.findall(r"(\w+)\[\d+,", what.split("all-gather")[0])) == {"f8e4m3fn"} for what in gathered
    )
    reduced = [what for what in instructions.values() if re.search(r" all-reduce(-start)?\(", what)]
    assert [what.split("{")[0] for what in reduced if what.startswith("u32")] == ["u32[6]"]


def test_the_options_of_xla_are_set_for_gpus_and_left_to_xla_flags(monkeypatch):
    precision = lambda matmul: PrecisionConfig(matmul=matmul)
    monkeypatch.delenv("XLA_FLAGS")
    with jax.set_mesh(h100s(data=8)):
        assert step.compiler_options(precision("float8")) == {"xla_gpu_enable_triton_gemm": False}
        assert step.compiler_options(precision("record")) == step.compiler_options(precision("compute")) == {}
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
        assert step.compiler_options(precision("float8")) == {}
    assert step.compiler_options(precision("float8")) == {}  # on a CPU
