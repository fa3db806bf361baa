"""The shipped training step compiled for H100s that are not here: memory, collectives, overlap, warnings. Compiled, not measured."""

import dataclasses
import json

import jax
import pytest

from h100.compiled import MARKS, NEWEST
from jaxllm import config, hlo, plan
from jaxllm.section import UserError
from support import MIXTRAL, ROOT, tiny

pytestmark = MARKS


@pytest.fixture(scope="module")
def llama8b():
    return plan.report(config.load_config(ROOT / "configs" / "llama3_8b.toml"), "h100:8")


def test_llama_8b_at_8192_fits_with_room_and_the_compiler_warns_of_nothing(llama8b):
    assert llama8b["memory_gib"]["need"] <= 24 and llama8b["fits"]
    assert llama8b["memory_gib"]["weights"] == pytest.approx(8.03e9 * 4 / 8 / 2**30, rel=1e-3)
    assert llama8b["memory_gib"]["optimizer"] == pytest.approx(8.03e9 * 8 / 8 / 2**30, rel=1e-3)
    assert llama8b["warnings"] == []


def test_weights_are_gathered_in_bfloat16_and_gradients_reduce_scattered_in_float32(llama8b):
    large = [c for c in llama8b["collectives"] if c["bytes"] > 2**20]
    kinds = {(c["kind"], c["dtype"]) for c in large}
    assert kinds == {("all-gather", "bf16"), ("reduce-scatter", "f32"), ("all-to-all", "bf16")}
    assert all(c["asynchronous"] for c in large)
    gathered = sum(c["bytes"] * c["times"] for c in large if c["kind"] == "all-gather")
    scattered = sum(c["bytes"] * c["times"] for c in large if c["kind"] == "reduce-scatter")
    layers, head = 2 * (8.03e9 - 2 * 128256 * 4096), 2 * 128256 * 4096
    assert gathered == pytest.approx(
        2 * layers + head, rel=0.01
    )  # every layer twice (forward, backward), the head once, the embedding never
    assert scattered == pytest.approx(
        4 * (8.03e9 - 128256 * 4096), rel=0.01
    )  # every weight once; the embedding's travels as rows


def test_flops_outside_of_kernels_are_those_of_the_weights(llama8b):
    cfg = config.load_config(ROOT / "configs" / "llama3_8b.toml")
    tokens = cfg.data.seq_len
    linear = 6 * cfg.model.matmul_parameters * tokens
    # remat = "attention" repeats every product of a layer but attention and the last one
    mlp = cfg.model.hidden_size * cfg.model.intermediate_size
    again = (
        2
        * tokens
        * (
            cfg.model.matmul_parameters
            - cfg.model.vocab_size * cfg.model.hidden_size
            - cfg.model.num_hidden_layers * mlp
        )
    )
    assert llama8b["flops_per_step_per_device"] == pytest.approx(linear + again, rel=0.01)
    # attention is in kernels: forward, dq and dkv in each layer; outputs are saved by name, so the backward pass does not compute them again
    assert llama8b["custom_calls"]["mosaic_gpu_v2"] == 3 * cfg.model.num_hidden_layers
    # of 2 + 3 + 4 products, where the model's count has 6: the scores and their gradient come once more in each backward kernel
    attention = cfg.model.flops_per_token(tokens) * tokens - linear
    assert llama8b["kernel_flops_per_step_per_device"] == pytest.approx(9 / 6 * attention, rel=1e-3)


def test_bfloat16_reduction_halves_the_traffic_of_gradients(llama8b):
    facts = plan.report(
        config.load_config(ROOT / "configs" / "llama3_8b.toml", "precision.gradient_reduce=bfloat16"), "h100:8"
    )
    size = lambda report: sum(c["bytes"] * c["times"] for c in report["collectives"] if c["kind"] == "reduce-scatter")
    assert size(facts) == pytest.approx(size(llama8b) / 2, rel=0.01)


def test_in_fp8_all_products_of_layers_are_and_half_the_bytes_are_gathered(llama8b):
    facts = plan.report(config.load_config(ROOT / "configs" / "llama3_8b.toml", "precision.matmul=float8"), "h100:8")
    assert facts["fp8_share"] >= 0.99 and llama8b["fp8_share"] == 0 and facts["warnings"] == []
    assert facts["flops_per_step_per_device"] == llama8b["flops_per_step_per_device"]
    assert facts["memory_gib"]["temporaries"] <= 1.1 * llama8b["memory_gib"]["temporaries"]
    size = lambda report, *dtypes: sum(
        c["bytes"] * c["times"] for c in report["collectives"] if c["kind"] == "all-gather" and c["dtype"] in dtypes
    )
    head = 2 * 128256 * 4096  # stays in bfloat16, and so do 65 norms
    assert size(facts, "bf16") == pytest.approx(head, rel=0.01)
    assert size(facts, "f8e4m3fn") == pytest.approx((size(llama8b, "bf16") - head) / 2, rel=0.01)


@NEWEST
def test_each_rematerialisation_policy_does_on_the_device_what_it_says():
    """Its memory, and what it computes again: products of a layer but the last, attention, or neither."""
    need, host = {}, {}
    policies = {"none": (0, 0), "dots": (0, 0), "attention": (1, 0), "full": (1, 1), "offload": (1, 1)}
    for policy, (products, kernels) in policies.items():
        cfg = tiny(
            f"model.remat={policy}", "model.num_hidden_layers=8", "model.hidden_size=1024", "model.intermediate_size=2816", "model.head_dim=128",
            "model.max_position_embeddings=4096", "model.num_attention_heads=8", "data.seq_len=4096", "precision.compute=bfloat16",
        )  # fmt: skip
        facts = plan.report(cfg, "h100:8")
        memory, model = facts["memory_gib"], cfg.model
        need[policy], host[policy] = memory["need"], memory["host"]
        layers = model.num_hidden_layers
        again = model.matmul_parameters - model.hidden_size * (model.vocab_size + layers * model.intermediate_size)
        flops = 4096 * (6 * model.matmul_parameters + products * 2 * again)
        assert facts["flops_per_step_per_device"] == pytest.approx(flops, rel=0.01), policy
        assert facts["custom_calls"]["mosaic_gpu_v2"] == layers * (3 + kernels), policy
    assert need["none"] > need["dots"] > need["attention"] > need["full"] > need["offload"], need
    inputs = 8 * 4096 * 1024 * 2 / 2**30
    assert host["offload"] == pytest.approx(inputs, rel=0.2) and not any(host[p] for p in need if p != "offload"), host


@NEWEST
def test_a_mesh_of_all_axes_compiles_without_rematerialisation():
    cfg = tiny(
        "mesh.data=2", "mesh.sequence=2", "mesh.expert=2", *MIXTRAL, "model.hidden_size=128", "precision.compute=bfloat16",
    )  # fmt: skip
    facts = plan.report(cfg, "h100:8")
    assert not [w for w in facts["warnings"] if "copied whole" in w]


def test_the_share_of_fp8_counts_products_of_layers_alone():
    """Not the head, the router and attention; kernels of experts by their operands; and a product of one FP8 operand is none in FP8."""
    f8, e5, bf16 = "f8e4m3fn", "f8e5m2", "bf16"
    kernel = lambda *dtypes: hlo.Kernel("mosaic_gpu_v2", "grouped_forward", [(d, (8, 8)) for d in dtypes], [], 1)
    products = [
        hlo.Product((f8, e5), 6.0, "jit(f)/transpose(jvp(mlp))/dot_general"),
        hlo.Product((f8, bf16), 2.0, "jit(f)/self_attn/dot_general"),
        *(hlo.Product((bf16, bf16), 50.0, f"jit(f)/{scope}/dot_general") for scope in ("jvp(loss)", "moe/router", "self_attn/attention")),
    ]  # fmt: skip
    program = hlo.Program([], products, [kernel(f8, f8), kernel(bf16, bf16)], 0)
    assert plan.fp8_share(program, [3.0, 1.0]) == pytest.approx(9 / 12)
    assert plan.fp8_share(program, None) is None


def test_the_command_prints_json_and_a_page(capsys, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(config.dump(tiny()), encoding="utf-8")
    assert plan.main(["--config", str(file), "--on", "h200:8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"] == "h200" and facts["devices"] == 8 and facts["evidence"] == "compiled, not measured"
    assert plan.main(["--config", str(file), "--on", "h100:8"]) == 0
    assert "compiled, not measured" in capsys.readouterr().out
    assert plan.main(["--config", str(file), "--on", "b9000:8"]) == 2
    assert "h100" in capsys.readouterr().err


def test_devices_are_parsed_as_hosts_times_gpus():
    assert plan.parse_devices("h100:8") == ("h100", 1, 8)
    assert plan.parse_devices("h100:16") == ("h100", 2, 8)
    assert plan.parse_devices("h200:4x8") == ("h200", 4, 8)
    for wrong in ("h100", "h100:0", "h100:12", "tpu:8", "h100:8x"):
        with pytest.raises(UserError):
            plan.parse_devices(wrong)


def test_loops_and_async_forms_are_counted():
    text = """
HloModule m
%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,32]{1,0} constant({...})
  %y = f32[8,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %ags = (f32[8,16]{1,0}, f32[64,16]{1,0}) all-gather-start(%x), dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %agd = f32[64,16]{1,0} all-gather-done(%ags)
  %ars = f32[8,32]{1,0} all-reduce-start(%y), backend_config={"collective_backend_config":{"is_sync":true}}
}
%wrapped (q: f32[64,16]) -> f32[8,16] {
  %q = f32[64,16]{1,0} parameter(0)
  %rs = f32[8,16]{1,0} reduce-scatter(%q), dimensions={0}
}
ENTRY %main (a: f32[64,16]) -> f32[8,16] {
  %a = f32[64,16]{1,0} parameter(0)
  %loop = (s32[], f32[8,16]{1,0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %s = ((f32[64,16]{1,0}), f32[8,16]{1,0}) async-start(%a), calls=%wrapped
  %k = f32[8,16]{1,0} custom-call(%a), custom_call_target="my_kernel"
  %q = bf16[2,128,4,64]{3,2,1,0} constant({...})
  %dq = f32[2,128,4,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/self_attn/attention_dq/mpmd_map"}
}
"""
    program = hlo.read(text)
    assert program.flops == 5 * 2 * 8 * 32 * 16
    found = {c.kind: (c.bytes, c.times, c.asynchronous) for c in program.collectives}
    assert found == {
        "all-gather": (64 * 16 * 4, 5, True), "all-reduce": (8 * 32 * 4, 5, False), "reduce-scatter": (64 * 16 * 4, 1, True),
    }  # fmt: skip
    assert program.custom_calls == {"my_kernel": 1, "mosaic_gpu_v2": 1} and program.unknown_loops == 0
    unknown, dq = program.kernels
    assert (unknown.name, dq.name, dq.operands) == ("", "attention_dq", [("bf16", (2, 128, 4, 64))] * 3)
    # three products of 128 queries with 64 keys each, and 8 in a window of 8 (less at the beginning); what is not ours does not count
    assert plan.kernel_flops(program.kernels, tiny("data.seq_len=128")) == [0, 3 * 2 * (2 * 128 * 4 * 64) * 64]
    narrow = tiny("data.seq_len=128", "model.family=mistral", "model.sliding_window=8")
    assert plan.kernel_flops([dq], narrow) == [3 * 2 * (2 * 128 * 4 * 64) * (8 - 64 / 256)]
    assert plan.kernel_flops([dataclasses.replace(unknown, target="triton_kernel_call")], narrow) is None
    assert jax.default_backend() == "cpu"
