"""QLoRA compiled for H100s that are not here: memory, what is multiplied, what travels. Compiled, not measured."""

import collections
import math

import jax
import pytest

from h100.compiled import GIB, MARKS, NEWEST, at_rest, h100s, need
from jaxllm import config, hlo, plan, state
from support import ROOT

pytestmark = MARKS

LAYERS, HIDDEN, INNER, EXPERTS, RANK = 32, 4096, 14336, 8, 16  # Mixtral 8x7B
ATTENTION = 2 * HIDDEN * (HIDDEN + 1024)  # weights of a layer; keys and values are 1,024 wide
EXPERT = 3 * HIDDEN * INNER
HEAD = 32000 * HIDDEN


def load(name, *overrides):
    return config.load_config(ROOT / "configs" / f"{name}.toml", *overrides)


def declared(cfg, **sizes):
    with jax.set_mesh(h100s(**sizes)):
        return state.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe, cfg.lora)


def count(arrays):
    return sum(math.prod(x.shape) for x in arrays.values())


@pytest.fixture(scope="module")
def mixtral():
    """(config, compiled, abstract state, hlo.Program) of Mixtral 8x7B at 4,096 tokens on one H100."""
    cfg = load("mixtral_8x7b_qlora")
    compiled, abstract, *_ = plan.compile_step(cfg, "h100:1")
    return cfg, compiled, abstract, hlo.read(compiled.as_text())


def test_mixtral_8x7b_at_4096_needs_at_most_36_gib_of_one_gpu(mixtral):
    """The last bound leaves no room for dequantised weights in float32: one projection of all experts would take 1.75 GiB."""
    cfg, compiled, abstract, _ = mixtral
    assert cfg.data.seq_len == 4096 and cfg.lora.rank == RANK and cfg.lora.target_modules == "all-linear"
    assert at_rest(abstract.frozen) == pytest.approx(22.8, rel=0.02)
    assert need(compiled) <= 36
    assert compiled.memory_analysis().temp_size_in_bytes / GIB == pytest.approx(8.6, abs=0.5)


@NEWEST
def test_mixtral_8x7b_at_16384_needs_at_most_48_gib_of_one_gpu():
    compiled, *_ = plan.compile_step(load("mixtral_8x7b_qlora", "data.seq_len=16384"), "h100:1")
    assert need(compiled) <= 48


def test_llama_70b_at_2048_needs_at_most_50_gib_of_one_gpu():
    facts = plan.report(load("llama3_70b_qlora"), "h100:1")
    assert facts["memory_gib"]["need"] <= 50 and facts["fits"] and facts["warnings"] == []
    assert facts["memory_gib"]["frozen"] == pytest.approx((68.45e9 * 4.127 / 8 + 2 * 2 * 1.05e9) / GIB, rel=1e-2)


def test_frozen_weights_of_mixtral_have_no_gradient(mixtral):
    """FLOPs per token: 6 of a frozen weight (forward, the same again, gradient of the input); 4 of lm_head, which is not multiplied again; 8 of an adapter,
    whose own gradient is added. Adapters of experts are multiplied side by side, each of a token's two rows by those of all experts."""
    cfg, _, _, program = mixtral
    tokens = cfg.data.seq_len * cfg.data.global_batch_size
    adapters = RANK * (4 * HIDDEN + 2 * (HIDDEN + 1024)) + 2 * EXPERTS * RANK * 3 * (HIDDEN + INNER)
    outside = LAYERS * (6 * (ATTENTION + HIDDEN * EXPERTS) + 8 * adapters) + 4 * HEAD
    assert program.flops == pytest.approx(tokens * outside, rel=2e-3)
    with jax.set_mesh(h100s(data=1)):
        inside = sum(plan.kernel_flops(program.kernels, cfg))
    scores = cfg.model.flops_per_token(cfg.data.seq_len) - 6 * cfg.model.matmul_parameters
    assert inside == pytest.approx(tokens * (LAYERS * 6 * 2 * EXPERT + 9 / 6 * scores), rel=2e-3)
    called = collections.Counter()
    for kernel in program.kernels:
        called[kernel.name] += kernel.times
    layers = LAYERS * cfg.optimizer.num_microbatches
    assert called.pop("grouped_forward") == 9 * layers, "no grouped_wgrad"
    assert {name: times for name, times in called.items() if name} == {
        f"attention_{name}": layers for name in ("forward", "dq", "dkv")
    }


@NEWEST
def test_weights_travel_as_their_bytes():
    """On 8 GPUs, experts over 4 of them: all that is gathered of the layers are codes, twice each; in bfloat16 lm_head, and tokens on their way to experts.
    What is summed are tokens on their way back and adapters: nothing else as large as the smallest frozen matrix's gradient, 16 MiB."""
    cfg = load("mixtral_8x7b_qlora", "mesh.data=2", "mesh.expert=4", "optimizer.num_microbatches=1")
    facts = plan.report(cfg, "h100:8")
    moved = lambda *kinds: [c for c in facts["collectives"] if c["kind"] in kinds]
    gathered, tokens = [c for c in moved("all-gather") if c["bytes"] > 2**20], 4 * cfg.data.seq_len * HIDDEN
    assert {c["dtype"] for c in gathered} == {"u8", "bf16"}
    bytes_of_codes = sum(c["bytes"] * c["times"] for c in gathered if c["dtype"] == "u8")
    assert bytes_of_codes == pytest.approx(2 * LAYERS * (ATTENTION + 2 * EXPERT) * (1 / 2 + 1 / 64), rel=0.01)
    assert {c["bytes"] for c in gathered if c["dtype"] == "bf16"} == {2 * HEAD, 2 * tokens}
    summed = [c for c in moved("all-reduce", "reduce-scatter") if c["bytes"] >= 4 * HIDDEN * 1024]
    assert {(c["dtype"], c["bytes"]) for c in summed} == {("bf16", 2 * tokens), ("f32", 4 * tokens)}
    assert not [line for line in facts["warnings"] if "copied whole" in line]


def test_the_adapters_of_the_recipe_are_counted_as_it_counts_them():
    recipe = load("mixtral_8x7b_qlora_aws")
    assert count(declared(recipe, expert=8).params) == 242_225_152
    router = RANK * (HIDDEN + EXPERTS)
    assert count(declared(load("mixtral_8x7b_qlora"), data=1).params) == 242_225_152 - LAYERS * router == 240_123_904


@NEWEST
@pytest.mark.parametrize("base", ["bfloat16", "float8", "nf4"])
def test_beside_adapters_all_products_of_layers_are_in_fp8(base):
    """Adapters, which stay in bfloat16, would be 0.8 % of them."""
    facts = plan.report(load("llama3_8b_qlora", "precision.matmul=float8", f"lora.base={base}"), "h100:1")
    assert facts["fp8_share"] >= 0.999
    assert facts["memory_gib"]["temporaries"] < 8, "weights of all layers are not turned round together"


def test_a_base_in_fp8_rests_in_a_byte_a_weight():
    frozen = declared(load("llama3_8b_qlora", "lora.base=float8"), data=1).frozen
    layers = {path: x for path, x in frozen.items() if "_proj" in path}
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert {x.dtype for path, x in layers.items() if path.endswith("/values")} == {jax.numpy.dtype("float8_e4m3fn")}
    assert at_rest(layers) * GIB == pytest.approx(weights, rel=1e-6)
