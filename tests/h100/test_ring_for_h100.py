"""Context parallelism compiled for H100s that are not here: the ring's schedule, its memory, and the long targets. Compiled, not measured."""

import re

import jax
import jax.numpy as jnp
import pytest

from h100.compiled import GIB, MARKS, NEWEST, abstract, compiled_on, h100s, need
from jaxllm import config, hlo, plan, sharding
from jaxllm.attention import AttentionConfig, attention, calls_per_pass, describe
from support import ROOT

pytestmark = [mark for mark in MARKS if mark.name != "version"]  # on both versions only what says so


def load(*overrides, name="llama3_8b_128k"):
    return config.load_config(ROOT / "configs" / f"{name}.toml", *overrides)


@pytest.fixture(scope="module")
def step_128k():
    """(the compiled step, its text, lines that the compiler printed) of Llama-3.1-8B at 131,072 tokens on 8 H100s."""
    compiled, _, _, lines = plan.compile_step(load(), "h100:8")
    return compiled, compiled.as_text(), lines


@pytest.mark.version
def test_every_hop_of_the_ring_hides_behind_a_kernel_and_nothing_is_copied(step_128k):
    _, text, lines = step_128k
    rings = hlo.schedules(text, "collective-permute")
    assert sorted(ring.hops for ring in rings) == [7, 15], "forward: keys; backward: keys, gradients, the way home"
    for ring in rings:
        assert not ring.synchronous and not ring.branches, ring
        assert all("kernel" in work for work in ring.between), ring
        assert ring.kernels == (8 if ring.hops == 7 else 16)
        travelling = [c for c in ring.copies if re.match(r"\w+\[([12],)?1,16384,8,128\]", c)]
        assert not travelling, travelling
    assert not [line for line in lines if "rematerialization" in line]


@pytest.mark.version
def test_at_131072_tokens_nothing_but_weights_is_gathered_and_32_gib_are_enough(step_128k):
    compiled, text, _ = step_128k
    program = hlo.read(text)
    assert need(compiled) <= 32
    large = [c for c in program.collectives if c.bytes > 2**20]
    assert all(c.asynchronous for c in large)
    gathered = sum(c.bytes * c.times for c in large if c.kind == "all-gather")
    layers, head = 2 * (8.03e9 - 2 * 128256 * 4096), 2 * 128256 * 4096
    assert gathered == pytest.approx(2 * layers + head, rel=0.01)
    assert not [c for c in large if c.kind == "all-reduce"]
    # 24 kernels a layer: forward, dq and dkv in each of 8 steps; outputs are saved by name, so the forward ring is not repeated
    assert program.custom_calls["mosaic_gpu_v2"] == 32 * 24
    # together they do the causal half of 9 products, an eighth on each device; the model's count has 6 (test_step_for_h100)
    cfg = load()
    tokens = cfg.data.seq_len
    attention = tokens * (cfg.model.flops_per_token(tokens) - 6 * cfg.model.matmul_parameters)
    with jax.set_mesh(sharding.make_mesh(cfg.mesh, plan.devices("h100:8"))):
        assert sum(plan.kernel_flops(program.kernels, cfg)) == pytest.approx(9 / 6 * attention / 8, rel=1e-3)


@NEWEST
@pytest.mark.parametrize(
    ("on", "overrides", "limit"),
    [
        ("h100:4", ["mesh.sequence=4"], 60),
        ("h100:8", ["data.seq_len=524288", "model.max_position_embeddings=524288", "model.remat=full"], 60),
    ],
    ids=["131072-on-4", "524288-on-8"],
)
def test_longer_and_fewer(on, overrides, limit):
    facts = plan.report(load(*overrides), on)
    assert facts["memory_gib"]["need"] <= limit and all(
        c["asynchronous"] for c in facts["collectives"] if c["bytes"] > 2**20
    )


@NEWEST
def test_a_million_tokens_on_8_with_layer_inputs_in_host_memory():
    facts = plan.report(load(name="llama3_8b_1m"), "h100:8")
    assert facts["memory_gib"]["need"] <= 60
    assert facts["memory_gib"]["host"] == pytest.approx(32 * 131072 * 4096 * 2 / GIB, rel=0.01)
    assert not [c for c in facts["collectives"] if not c["asynchronous"] and c["bytes"] > 2**20]


@NEWEST
def test_activations_fall_with_the_axis(step_128k):
    """Bytes that one more token of the row costs a device: on 8 devices at most 1 / (0.9 x 8) of what it costs on one."""
    size = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    compiled = lambda n, length: plan.compile_step(load(f"mesh.sequence={n}", f"data.seq_len={length}"), f"h100:{n}")[0]
    on_1 = (size(compiled(1, 32768)) - size(compiled(1, 16384))) / 16384
    on_8 = (size(step_128k[0]) - size(compiled(8, 65536))) / 65536
    assert on_1 / on_8 >= 0.9 * 8, (on_1, on_8)


@pytest.mark.parametrize(("expert", "calls"), [(1, 8), (2, 1)])
def test_the_communication_described_and_counted_is_the_one_traced_where_experts_take_a_ring_out_of_its_node(
    expert, calls
):
    """4,096 tokens a device hide a hop inside a node, and not one between nodes, where a ring of 8 ends that leaves out every second device."""
    how, model = AttentionConfig(), load().model
    with jax.set_mesh(h100s(sequence=8, expert=expert)):
        q, k = (jax.ShapeDtypeStruct((expert, 32768, heads, 128), jnp.bfloat16) for heads in (32, 8))
        interval = jax.ShapeDtypeStruct((expert, 32768), jnp.int32)
        traced = str(jax.make_jaxpr(lambda *a: attention(*a, how, layout="zigzag"))(q, k, k, interval, interval))
        assert ("ring" in describe(how, model, "bfloat16", 32768)) == ("ppermute" in traced) == (calls > 1)
        assert calls_per_pass(how, model, 32768) == calls


def attention_memory(ranks, length, heads=32, kv_heads=8, head_dim=128, backward=True):
    """Bytes of temporaries of attention alone over a ring, `length` tokens a device."""
    mesh = h100s(sequence=ranks)
    array = lambda *shape, dtype=jnp.bfloat16: abstract(mesh, (1, ranks * length, *shape), dtype, None, "sequence")
    q, k, interval = array(heads, head_dim), array(kv_heads, head_dim), array(dtype=jnp.int32)

    def total(*arrays):
        out = attention(*arrays, AttentionConfig(communication="ring"), layout="zigzag")
        return jnp.sum(out.astype(jnp.float32))

    function = jax.grad(total, (0, 1, 2)) if backward else total
    return compiled_on(mesh, function, q, k, k, interval, interval).memory_analysis().temp_size_in_bytes


@NEWEST
def test_memory_of_attention_alone_is_the_formula_and_does_not_grow_with_the_ring():
    """Residuals q, k, v, out (bf16) and lse, and beside them what travels: keys and values once more, and in float32 the carry forward; dq and
    two buffers of dk, dv backward."""
    length, heads, kv_heads, head_dim = 16384, 32, 8, 128
    q, kv = 2 * length * heads * head_dim, 4 * length * kv_heads * head_dim
    residuals = 2 * q + kv + 4 * length * heads
    forward, backward = 2 * q + kv, 2 * q + 2 * (2 * kv) + kv
    # Forward alone keeps no residuals; q without padding and the output beside the two.
    assert attention_memory(8, length, backward=False) <= 1.1 * (2 * q + forward)
    on_8 = attention_memory(8, length)
    assert on_8 <= 1.1 * (residuals + backward)
    assert attention_memory(2, length) == pytest.approx(on_8, rel=0.01)
