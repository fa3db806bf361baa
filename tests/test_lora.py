"""Adapters in whole models (LoRA, QLoRA): what they compute against PEFT, bitsandbytes and transformers, over a mesh, beside every form of frozen weights; what
a run of them saves, goes on from and writes; and what is refused.

Not here: folders of adapters and what they may say (test_peft.py), NF4 itself (test_nf4.py, test_bnb.py), and every pair of settings (test_parity.py).
"""

import collections
import contextlib
import copy
import dataclasses
import io
import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from jaxllm import checkpoint, config, convert, fp8, frozen, hf, lora, nf4, peft, sharding, step, train, weights
from jaxllm import state as states
from jaxllm.data.batch import to_device
from jaxllm.models import FAMILIES
from jaxllm.section import UserError
from support import MIXTRAL, batch_on, error, mesh, numpy_tree, ours, rows, tiny, worst

ATTENTION, MLP, ROUTER = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"), "router"
MODELS = {"llama": (), "mixtral": MIXTRAL}
NUM_MATRICES = {"llama": 2 * 7, "mixtral": 2 * (4 + 3 * 4)}  # of attention and MLPs
NUM_EXPERTS, RANK, ALPHA = 4, 4, 8
PLAIN = ("precision.compute=float32", "loss.chunk_size=128", "data.seq_len=64", "data.global_batch_size=8")
WITH_ROUTER = "lora.target_modules=" + json.dumps([*ATTENTION, *MLP, ROUTER])
QUICK = {"xla_backend_optimization_level": 0}  # programs here run once, and take their time to compile
FAMILY = pytest.mark.parametrize("family", MODELS)


def drawn(shapes, std=0.08):
    """Random values of these shapes: matrices around 0; vectors, those of norms, around 1; large enough that every term shows."""
    rng = np.random.default_rng(0)
    centre = lambda path: float(path.endswith("norm/weight"))
    spread = lambda path: 0.5 if path.endswith("norm/weight") else std
    return {path: rng.normal(centre(path), spread(path), s.shape).astype(np.float32) for path, s in shapes.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{family: a tiny model's folder in bfloat16, a PEFT folder of random adapters for all its matrices and routers, and these as arrays}."""
    found = {}
    for family, model in MODELS.items():
        targets = (WITH_ROUTER,) if family == "mixtral" else ()
        cfg = tiny(
            *model,
            "model.intermediate_size=128",
            "model.vocab_size=300",
            f"lora.rank={RANK}",
            f"lora.alpha={ALPHA}",
            *targets,
        )
        with jax.set_mesh(mesh()):
            whole = states.declare(cfg.model, cfg.precision, cfg.attention, cfg.moe).params
            adapters = drawn(weights.declare(cfg).params)
        folder, table = tmp_path_factory.mktemp(family), FAMILIES[family].hf_weights(cfg.model)
        for name in ("model", "adapter"):
            (folder / name).mkdir()
        hf.save_folder(
            drawn(whole), table, FAMILIES[family].config_to_hf(cfg.model), folder / "model", dtype="bfloat16"
        )
        peft.write(folder / "adapter", table, cfg.lora, adapters, str(folder / "model"))
        found[family] = SimpleNamespace(
            family=family,
            folder=folder / "model",
            adapter=folder / "adapter",
            adapters=adapters,
            table=table,
            targets=targets,
        )
    return found


def of_folder(folder, *overrides):
    return config.load_config(None, f"model.path={folder}", *PLAIN, *overrides)


def adapted(base, *overrides, folder=None):
    """A config of the family's folder with its random adapters."""
    return of_folder(folder or base.folder, f"model.adapter={base.adapter}", *base.targets, *overrides)


def gradients_of(cfg, sizes=None, state_of=step.init_state, **kwargs):
    """(loss, gradients) of a training step, in numpy."""
    device_mesh = mesh(**(sizes or {}))
    with jax.set_mesh(device_mesh):
        graphdef, state = state_of(cfg)
        found = jax.jit(lambda p, f, b, s: step.gradients(graphdef, p, b, cfg, 3, s, f), compiler_options=QUICK)
        batch = batch_on(device_mesh, cfg.optimizer.num_microbatches, **kwargs)
        grads, parts = found(state.params, state.frozen, batch, fp8.observed(state.fp8))
    return float(parts["loss_sum"]), numpy_tree(grads)


# --- the oracles ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(torch, made):
    """{family: transformers' model of that folder}."""
    return {family: transformers_model(base.folder) for family, base in made.items()}


def transformers_model(folder):
    """In float32, into which it is read: a cast later on would leave rotary frequencies rounded."""
    import torch
    import transformers

    options = dict(
        dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )  # which float64 needs
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def their_logits(model, tokens):
    """In float64, so that what differs is our rounding alone."""
    import torch

    with torch.no_grad():
        return copy.deepcopy(model).eval().double()(torch.tensor(tokens.astype(np.int64))).logits.numpy()


TOKENS = rows(num_rows=4, documents=False)["tokens"]


# --- against PEFT -----------------------------------------------------------------------------------------------------


def by_matrix(named):
    """PEFT's tensors of A and B, with transformers 5's fused experts (`mlp.experts`: w2; `mlp.experts.base_layer`: w1 and w3, with twice the rank) taken apart
    into those of each matrix, named as transformers 4 named these."""
    found = {}
    for name, array in named.items():
        name = name.replace(".default", "").replace(".mlp.gate.", ".block_sparse_moe.gate.")
        layer, is_fused, rest = name.partition(".mlp.experts.")
        if not is_fused:
            found[name] = array
            continue
        parts, kind = ("w1", "w3") if rest.startswith("base_layer") else ("w2",), rest[-len("lora_A.weight") :]
        r = RANK * len(parts)
        if kind == "lora_A.weight":
            array = array.reshape(NUM_EXPERTS, r, -1)  # expert after expert
        else:
            array = array.reshape(len(array), r, NUM_EXPERTS).transpose(2, 0, 1)  # experts innermost
        for e in range(NUM_EXPERTS):
            for i, part in enumerate(parts):
                ranks, size = slice(i * RANK, (i + 1) * RANK), array.shape[1] // len(parts)
                own = array[e, ranks] if kind == "lora_A.weight" else array[e, i * size : (i + 1) * size, ranks]
                found[f"{layer}.block_sparse_moe.experts.{e}.{part}.{kind}"] = own
    return found


@FAMILY
@pytest.mark.filterwarnings("ignore")  # PEFT's
def test_logits_loss_and_gradients_of_adapters_are_those_of_peft(family, made, theirs, torch):
    import peft as oracle

    base = made[family]
    cfg = adapted(base, "lora.base=float32", *(["model.router_aux_loss_coef=0"] if family == "mixtral" else []))
    packed = rows(num_rows=4, documents=False)
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        got = np.asarray(step.logits(graphdef, state, TOKENS))
        gradients = jax.jit(lambda p, f, b: step.gradients(graphdef, p, b, cfg, frozen=f), compiler_options=QUICK)
        grads, parts = gradients(state.params, state.frozen, to_device(packed, 1, mesh()))
    assert state.params.keys() == base.adapters.keys() and len(grads) == 2 * (7 + (family == "mixtral"))
    assert all(np.array_equal(state.params[path], array) for path, array in base.adapters.items())
    model = oracle.PeftModel.from_pretrained(copy.deepcopy(theirs[family]), base.adapter, is_trainable=True).eval()
    want = their_logits(model, TOKENS)
    assert error(their_logits(theirs[family], TOKENS), want) > 0.1
    assert error(got, want) < 1e-6
    ids, count = torch.tensor(TOKENS.astype(np.int64)), packed["loss_weights"].sum()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(float(parts["loss_sum"]) / count / loss.item() - 1) < 1e-5
    named = by_matrix({name: p.grad.numpy() for name, p in model.named_parameters() if ".lora_" in name})
    want = ours(named, {path: w for path, w in peft.hf_weights(base.table).items() if path in grads}, grads)
    assert worst({path: np.asarray(grad) / count for path, grad in grads.items()}, want)[0] < 1e-5


THEIRS = {  # what PEFT is told, and what of it a user has to say again
    "llama": (dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "down_proj"]), ()),
    "mixtral": (
        dict(r=4, lora_alpha=8, target_modules=["v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("lora.target_modules=" + json.dumps(["v_proj", *MLP]),),
    ),
}  # fmt: skip


@FAMILY
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_made_by_peft_is_gone_on_from(family, made, theirs, torch, tmp_path):
    import peft as oracle

    options, said = THEIRS[family]
    model = oracle.get_peft_model(copy.deepcopy(theirs[family]), oracle.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    cfg = of_folder(made[family].folder, f"model.adapter={tmp_path}", "lora.base=float32", *said)
    assert (cfg.lora.rank, cfg.lora.alpha) == (options["r"], options["lora_alpha"])
    with jax.set_mesh(mesh()):
        got = np.asarray(step.logits(*step.init_state(cfg), TOKENS))
    want = their_logits(model, TOKENS)
    assert error(their_logits(theirs[family], TOKENS), want) > 1e-2
    assert error(got, want) < 1e-6


# --- against bitsandbytes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_bits(made, torch, functional, tmp_path_factory):
    """{family: a folder in which bitsandbytes quantised every matrix of every layer, experts and routers of transformers 4 among them; a folder of what its
    bytes mean, in float32}. Compute is float32 in what is compared, so bitsandbytes is kept from rounding to the bfloat16 that it quantised; but routers rest
    in that."""
    from safetensors.torch import load_file, save_file

    found = {}
    for family, base in made.items():
        folder = tmp_path_factory.mktemp(family)
        tensors, floats = {}, {}
        for name, tensor in load_file(base.folder / "model.safetensors").items():
            tensors[name], floats[name] = tensor, tensor.float()
            if tensor.ndim == 2 and ".layers." in name:
                tensors[name], quantised = functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
                tensors |= {f"{name}.{part}": value for part, value in quantised.as_dict(packed=True).items()}
                quantised.dtype = torch.bfloat16 if name.endswith(".gate.weight") else torch.float32
                floats[name] = functional.dequantize_4bit(tensors[name], quantised).float()
        settings = json.loads((base.folder / "config.json").read_text())
        method = dict(
            quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        for kind, held, how in (("bits", tensors, {"quantization_config": method}), ("meant", floats, {})):
            (folder / kind).mkdir()
            save_file(held, folder / kind / "model.safetensors", metadata={"format": "pt"})
            (folder / kind / "config.json").write_text(json.dumps(settings | how))
        found[family] = SimpleNamespace(folder=folder / "bits", meant=folder / "meant")
    return found


@FAMILY
def test_a_folder_that_bitsandbytes_quantised_is_read_as_what_its_bytes_mean(family, theirs, in_bits):
    there = in_bits[family]
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(
            of_folder(there.folder, "lora.rank=4", "lora.base=nf4", "lora.target_modules=['q_proj']")
        )
        got = np.asarray(step.logits(graphdef, state, TOKENS))
    want = their_logits(transformers_model(there.meant), TOKENS)
    assert error(their_logits(theirs[family], TOKENS), want) > 1e-2
    assert error(got, want) < 1e-5


def test_a_matrix_in_four_bits_of_another_shape_is_refused_by_name(in_bits, functional, torch, tmp_path):
    """The router, which becomes floats again, and a weight that stays in 4 bits."""
    shutil.copytree(in_bits["mixtral"].folder, tmp_path / "changed")
    file, names = tmp_path / "changed" / "model.safetensors", ("gate", "experts.1.w1")
    tensors = load_file(file)
    for name in (f"model.layers.0.block_sparse_moe.{name}.weight" for name in names):
        codes, quantised = functional.quantize_4bit(torch.ones(2, 64), quant_type="nf4", compress_statistics=True)
        parts = {f"{name}.{part}": value for part, value in quantised.as_dict(packed=True).items()}
        tensors |= {part: value.numpy() for part, value in {name: codes, **parts}.items()}
    save_file(tensors, file)
    wrong = r"2 tensors of another shape.*\.gate\.weight: found \[2, 64\], wanted \[4, 64\].*w1\.weight: found \[2, 64\], wanted \[128, 64\]"
    with jax.set_mesh(mesh()), pytest.raises(UserError, match=f"(?s){wrong}"):
        step.init_state(of_folder(tmp_path / "changed", "lora.rank=4", "lora.base=nf4"))


@FAMILY
def test_what_is_quantised_while_a_folder_is_read_has_the_bits_of_bitsandbytes(family, made, functional):
    from safetensors.torch import load_file

    base = made[family]
    cfg = of_folder(base.folder, "lora.rank=4", "lora.base=nf4", "lora.double_quant=false")
    with jax.set_mesh(mesh()):
        kept = frozen.joined(weights.load_frozen(cfg, weights.declare(cfg)))
    tensors, count = load_file(base.folder / "model.safetensors"), 0
    for path, weight in base.table.items():
        if not isinstance(kept[path], nf4.NF4):
            assert not path.endswith("_proj/kernel") and kept[path].dtype == jnp.bfloat16, path
            continue
        for name, leading in hf.tensors_of(weight, kept[path].codebook.shape[:-1]):
            packed, quantised = functional.quantize_4bit(tensors[name], quant_type="nf4", compress_statistics=False)
            assert np.array_equal(np.asarray(kept[path].codes[leading]).reshape(-1), packed.numpy().reshape(-1)), name
            assert np.array_equal(np.asarray(kept[path].absmax[leading]).reshape(-1), quantised.absmax.numpy()), name
            count += 1
    assert count == NUM_MATRICES[family]


# --- over a mesh, and beside each base --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "sizes"),
    [
        ("llama", ("optimizer.num_microbatches=2",), dict(replica=2, data=2, sequence=2)),
    ],
    ids=["llama-replica2-data2-sequence2"],
)
def test_loss_and_gradients_with_dropout_are_those_of_one_device_in_one_piece(family, settings, sizes, made):
    qlora = ("lora.base=nf4", "lora.dropout=0.3", "model.remat=none")
    loss, grads = gradients_of(adapted(made[family], *qlora, *settings), sizes)
    want_loss, want = gradients_of(adapted(made[family], *qlora))
    assert abs(loss / want_loss - 1) < 1e-5
    assert worst(grads, want)[0] < 1e-4


def test_frozen_weights_in_fp8_are_what_their_bytes_mean_and_near_the_floats(made):
    bases = (adapted(made["mixtral"], f"lora.base={base}", "model.remat=none") for base in ("float8", "float32"))
    in_fp8, in_floats = (
        bases  # what is kept of a block goes through a rounding of jax.checkpoint, which takes e4m3's largest numbers for infinite
    )

    def meant(cfg):
        graphdef, state = step.init_state(cfg)
        held = frozen.joined(step.init_state(in_fp8)[1].frozen)
        assert sum(isinstance(weight, frozen.Float8) for weight in held.values()) == 7
        floats = {path: frozen.dequantised(held[path], like.shape) for path, like in state.frozen.items()}
        return graphdef, dataclasses.replace(state, frozen=floats)

    loss, grads = gradients_of(in_fp8)
    same_loss, same = gradients_of(in_floats, state_of=meant)
    assert abs(loss / same_loss - 1) < 1e-5 and worst(grads, same)[0] < 1e-5
    float_loss, _ = gradients_of(in_floats)
    assert 1e-6 < abs(loss / float_loss - 1) < 1e-2
    with jax.set_mesh(mesh()):
        held, floats = (frozen.joined(step.init_state(cfg)[1].frozen) for cfg in (in_fp8, in_floats))
    for path in (path for path, weight in held.items() if isinstance(weight, frozen.Float8)):
        want, largest = np.asarray(floats[path]), 448 / np.asarray(held[path].scale)
        largest = largest.reshape(*largest.shape, *[1] * (want.ndim - largest.ndim))
        # Three bits behind the point of normal numbers; below those, steps of 2^-9.
        allowed = np.maximum(np.abs(want) * 2.0**-4, largest / 448 * 2.0**-10) * (1 + 1e-6)
        assert np.all(np.abs(frozen.dequantised(held[path], want.shape) - want) <= allowed), path


def equations(jaxpr, name=""):
    """(name stack, equation) of all equations, inner ones included."""
    for eqn in jaxpr.eqns:
        stack = f"{name}/{eqn.source_info.name_stack}"
        yield stack, eqn
        holds = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=holds):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, stack)


def traced_gradients(cfg):
    """[(name stack, equation)] of the gradients."""
    device_mesh = mesh()
    with jax.set_mesh(device_mesh):
        graphdef, state = step.abstract_state(cfg)
        found = jax.jit(lambda p, f, b, s: step.gradients(graphdef, p, b, cfg, 3, fp8.observed(s), f))
        traced = found.trace(state.params, state.frozen, batch_on(device_mesh), state.fp8)
    return list(equations(traced.jaxpr.jaxpr))


def in_float8(made, family, base):
    return adapted(made[family], f"lora.base={base}", "precision.matmul=float8", "model.remat=none")


BASES_IN_FP8 = [("mixtral", "nf4"), ("llama", "float8"), ("llama", "bfloat16")]


@pytest.mark.parametrize(("family", "base"), BASES_IN_FP8)
def test_frozen_weights_may_be_multiplied_in_fp8_and_adapters_are_not(family, base, made):
    products, casts = collections.defaultdict(set), collections.Counter()
    is_fp8 = lambda dtype: "float8" in str(dtype)
    for stack, eqn in traced_gradients(in_float8(made, family, base)):
        scopes = ("adapter", "loss", "attention", "router", "experts")
        where = next((name for name in scopes if name in stack), "dense")
        if eqn.primitive.name == "dot_general":
            products[where] |= {is_fp8(x.aval.dtype) for x in eqn.invars}
        casts[where] += eqn.primitive.name == "convert_element_type" and is_fp8(eqn.params["new_dtype"])
    # Products of experts are emulated on a CPU: their operands are cast to FP8 and back.
    own = {"router": {False}, "experts": {False}} if family == "mixtral" else {}
    assert products == {"dense": {True}, "adapter": {False}, "loss": {False}, "attention": {False}} | own
    assert set(+casts) == {"dense"} | ({"experts"} if family == "mixtral" else set())


@pytest.mark.parametrize(("family", "base"), BASES_IN_FP8[:2])
def test_training_in_fp8_beside_frozen_weights_is_near_training_in_floats(family, base, made):
    loss, grads = gradients_of(in_float8(made, family, base))
    want_loss, want = gradients_of(adapted(made[family], f"lora.base={base}"))
    apart = {path: np.sqrt(np.mean((grads[path] - want[path]) ** 2) / np.mean(want[path] ** 2)) for path in want}
    # Scales start at 1, so small numbers are lost; and a token at the border of two experts may go to the other.
    assert max(apart.values()) < {"llama": 0.2, "mixtral": 0.5}[family]
    assert 1e-6 < abs(loss / want_loss - 1) < 1e-2
    assert len(grads) == 2 * (7 + (family == "mixtral"))


def test_a_base_in_fp8_is_multiplied_in_fp8_as_the_bytes_that_it_rests_in():
    w = jnp.asarray(np.random.default_rng(0).normal(0, 0.05, (4, 64, 128)), jnp.float32)
    place = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P()))
    held = frozen.to_float8(w, frozen.Float8(place(*w.shape, dtype="float8_e4m3fn"), place(4)))
    others = {"input": jnp.float32(3), "kernel": jnp.ones(4), "output_grad": jnp.float32(5)}
    scales = frozen.scales(held, others)
    floats, _ = frozen.opened(held, ("experts", "embed", "mlp"), 1, w.shape, "bfloat16")
    again = fp8.quantise(floats, scales["kernel"][:, None, None], held.values.dtype)
    assert np.asarray(again).tobytes() == np.asarray(held.values).tobytes()
    assert scales["input"] is others["input"] and scales["output_grad"] is others["output_grad"]


# --- what is frozen ---------------------------------------------------------------------------------------------------


def test_twenty_steps_learn_and_leave_every_bit_of_the_base_alone(made):
    cfg = adapted(
        made["mixtral"], "lora.base=nf4", "steps=20", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0"
    )
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        before, trained = numpy_tree(state.frozen), numpy_tree(state.params)
        one, batch, losses = step.make_train_step(graphdef, cfg), batch_on(jax.sharding.get_mesh()), []
        for _ in range(20):
            state, metrics = one(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5, losses
    assert state.frozen.keys() == before.keys()
    for path, array in before.items():
        assert np.asarray(state.frozen[path]).tobytes() == array.tobytes(), path
    assert all(not np.array_equal(state.params[path], array) for path, array in trained.items())
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert sorted(a.shape for a in moments) == sorted(2 * [a.shape for a in trained.values()])


def test_no_gradient_of_a_frozen_weight_is_computed(made):
    counts = collections.Counter()
    for stack, eqn in traced_gradients(adapted(made["llama"], "lora.base=bfloat16", "model.remat=none")):
        if eqn.primitive.name == "dot_general":
            where = next((w for w in ("adapter", "loss", "attention") if w in stack), "frozen")
            counts[where] += 1
    # Seven weights, forward and towards their inputs; lm_head likewise; each A and B, forward and both gradients.
    assert counts == {"frozen": 2 * 7, "loss": 2, "adapter": 6 * 7, "attention": counts["attention"]}


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_sets_the_share_to_zero_that_is_asked_for_and_scales_the_rest():
    cfg = lora.LoRAConfig(rank=4, dropout=0.3)
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (4, 64, 8, 32)), jnp.float32)
    places = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (4, 64))
    noise = jax.random.key(0), jnp.arange(4, dtype=jnp.int32), places
    outs = {name: np.asarray(lora.dropout(x, noise, cfg, name)) for name in ("q_proj", "k_proj")}
    for out in outs.values():
        is_zero = out == 0
        assert abs(is_zero.mean() - 0.3) < 4 * (0.3 * 0.7 / x.size) ** 0.5
        by_token = is_zero.reshape(256, 256)
        assert len({row.tobytes() for row in by_token}) == 256  # every token draws for itself
        np.testing.assert_allclose(out[~is_zero], np.asarray(x)[~is_zero] / 0.7, rtol=1e-6)
    apart = (outs["q_proj"] == 0) != (outs["k_proj"] == 0)
    assert abs(apart.mean() - 2 * 0.3 * 0.7) < 0.01  # and so does every weight
    assert lora.dropout(x, None, cfg, "q_proj") is x
    assert lora.dropout(x, noise, lora.LoRAConfig(rank=4), "q_proj") is x


@FAMILY
def test_every_adapter_has_dropout_in_training_and_none_in_evaluation(family, made, monkeypatch):
    drawn_for, uniform = set(), lora.uniform

    def watched(noise, name, size):
        drawn_for.add((name, size))
        return uniform(noise, name, size)

    monkeypatch.setattr(lora, "uniform", watched)
    cfg = adapted(made[family], "lora.base=bfloat16", "lora.dropout=0.3", "model.remat=none")
    device_mesh = mesh()
    with jax.set_mesh(device_mesh):
        graphdef, state = step.abstract_state(cfg)
        step.make_eval_step(graphdef, cfg).trace(state, batch_on(device_mesh))
        step.logits.trace(graphdef, state, TOKENS)
    assert not drawn_for
    traced_gradients(cfg)
    wanted = {(name, 128 if name == "down_proj" else 64) for name in (*ATTENTION, *MLP)}
    assert drawn_for == wanted | ({(ROUTER, 64)} if family == "mixtral" else set())


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = """
[precision]
compute = "float32"
[data]
kind = "text"
tokenizer = "bpe:300"
seq_len = 64
global_batch_size = 8
workers = 0
[optimizer]
schedule = "constant"
learning_rate = 1e-2
warmup_steps = 0
[loss]
chunk_size = 128
[checkpoint]
every = 2
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(output, *overrides) -> (exit code, what was printed): a training of four steps on one device."""
    folder = tmp_path_factory.mktemp("run")
    words = [f"item {i % (n % 7 + 2)} of list {n}." for n in range(60) for i in range(10 + n)]
    (folder / "data.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "run.toml").write_text(RUN)
    one = mesh()

    def run(output, *overrides):
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            patch.setattr(sharding, "make_mesh", lambda *_: one)  # programs for eight take longer to compile
            settings = (f"output_dir={output}", f"data.path={folder / 'data.txt'}", "steps=4", *overrides)
            code = train.main(["--config", str(folder / "run.toml"), *settings])
        return code, said.getvalue()

    return run


def finished(run, folder, *settings):
    code, said = run(folder / "run", *settings)
    assert code == 0, said
    return folder / "run", settings


@pytest.fixture(scope="module")
def llama_run(run, made, tmp_path_factory):
    """(output folder, settings) of adapters beside float32."""
    folder = made["llama"].folder
    return finished(run, tmp_path_factory.mktemp("llama"), f"model.path={folder}", "lora.rank=4", "lora.base=float32")


@pytest.fixture(scope="module")
def qlora_run(run, in_bits, tmp_path_factory):
    """(output folder, settings) of adapters beside a Mixtral that bitsandbytes quantised, of a rank whose checkpoints are more than their overhead."""
    folder = in_bits["mixtral"].folder
    return finished(run, tmp_path_factory.mktemp("qlora"), f"model.path={folder}", "lora.rank=64", "lora.base=nf4")


def trained_logits(output, settings):
    """tokens -> logits of ours, of the base and the adapters that a run has saved."""
    cfg = config.load_config(None, *PLAIN, *settings)
    with jax.set_mesh(mesh()):
        declared = weights.declare(cfg)
        adapters, kept = checkpoint.load_params(output)[0], weights.load_frozen(cfg, declared)
    assert adapters.keys() == declared.params.keys()
    state = step.TrainState(None, adapters, kept, {}, ())

    def logits(tokens):
        with jax.set_mesh(mesh()):
            return np.asarray(step.logits(declared.graphdef, state, tokens))

    return logits


def test_a_merged_model_gives_the_logits_and_the_tokens_of_its_adapters(
    llama_run, made, theirs, torch, tmp_path, capsys
):
    """The merged folder in transformers against adapters and base here, on 50 prompts."""
    output, settings = llama_run
    convert.to_hf(output, tmp_path / "merged", dtype="float32", merge="original")
    said = capsys.readouterr().out
    number = r"[0-9.e-]+"
    wanted = rf"14 matrices merged into the original weights of {made['llama'].folder}, as float32\. .* by at most ({number}),"
    assert float(re.search(wanted, said)[1]) < 1e-5
    merged, ours_of = transformers_model(tmp_path / "merged"), trained_logits(output, settings)
    prompts = np.random.default_rng(0).integers(3, 256, (50, 8)).astype(np.int32)
    with torch.no_grad():
        want = merged.generate(
            torch.tensor(prompts.astype(np.int64)), do_sample=False, max_new_tokens=8, min_new_tokens=8
        )
    got = np.pad(prompts, [(0, 0), (0, 8)])
    for place in range(8, 16):
        logits = ours_of(got)
        got[:, place] = logits[:, place - 1].argmax(-1)
    assert np.array_equal(got, want.numpy())
    assert error(ours_of(got), their_logits(merged, got)) < 1e-5
    assert error(ours_of(got), their_logits(theirs["llama"], got)) > 1e-2


def test_adapters_that_a_run_exports_are_gone_on_from_and_never_set_aside(llama_run, run, tmp_path):
    output, settings = llama_run
    copied = tmp_path / "run"
    shutil.copytree(output, copied)
    code, said = run(copied, *settings, "checkpoint.export=float32")
    assert code == 0 and f"PEFT folder: {copied / 'export' / '4'}" in said
    convert.to_hf(output, tmp_path / "adapter")
    of = lambda folder: load_file(folder / "adapter_model.safetensors")
    assert sorted(of(tmp_path / "adapter")) == sorted(of(copied / "export" / "4"))
    assert all(
        np.array_equal(array, of(copied / "export" / "4")[name]) for name, array in of(tmp_path / "adapter").items()
    )
    trained = checkpoint.load_params(output)[0]
    with jax.set_mesh(mesh()):
        _, state = step.init_state(config.load_config(None, *PLAIN, *settings, f"model.adapter={tmp_path / 'adapter'}"))
    assert all(np.array_equal(array, trained[path]) for path, array in state.params.items())
    code, said = run(copied, *settings, f"model.adapter={copied / 'export' / '4'}", "checkpoint.overwrite=true")
    assert code == 2 and "checkpoint.overwrite: model.adapter = " in said


def test_an_adapter_with_another_rule_and_the_same_scale_is_taken(made, tmp_path):
    """Ours are written with alpha x sqrt(rank) and without use_rslora."""
    there, of = (
        f"model.adapter={tmp_path / 'adapter'}",
        lambda *more: of_folder(made["llama"].folder, "lora.rank=4", *more),
    )
    rule = "lora.use_rslora=true", "lora.alpha=6"
    with jax.set_mesh(mesh()):
        params = step.init_state(of(*rule))[1].params
        peft.write(tmp_path / "adapter", made["llama"].table, of(*rule).lora, params, "")
        again = step.init_state(of(*rule, there))[1].params
        assert all(np.array_equal(array, again[path]) for path, array in params.items())
        with pytest.raises(UserError, match=r"needs lora\.alpha = 12\.0; got lora\.alpha = 6"):
            step.init_state(of("lora.alpha=6", there))


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_four_bits_are_merged_into_what_the_bits_mean(qlora_run, in_bits, tmp_path, capsys):
    output, settings = qlora_run
    with pytest.raises(UserError, match=r"--merge: original: .* is itself in 4 bits.*say --merge dequantised"):
        convert.to_hf(output, tmp_path / "merged", merge="original")
    convert.to_hf(output, tmp_path / "merged", dtype="float32", merge="dequantised")
    said = capsys.readouterr().out
    wanted = rf"32 matrices merged into {in_bits['mixtral'].folder} as it was trained on \(nf4, made floats again\), as float32\. .* by at most (\S+),"
    assert float(re.search(wanted, said)[1]) < 1e-5
    tokens = TOKENS[:1]  # a program of the shape that `to_hf` has compiled
    want = their_logits(transformers_model(tmp_path / "merged"), tokens)
    assert error(trained_logits(output, settings)(tokens), want) < 1e-5
    assert error(their_logits(transformers_model(in_bits["mixtral"].meant), tokens), want) > 1e-2


def without_the_last_step(output, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(output, copied)
    shutil.rmtree(copied / "checkpoints" / "4")
    return copied


def test_checkpoints_hold_adapters_and_optimizer_and_little_else(qlora_run):
    output, settings = qlora_run
    folder = output / "checkpoints" / "4"
    trained = sum(4 * array.size for array in checkpoint.load_params(folder)[0].values())
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert on_disk < 1.1 * 3 * trained
    with jax.set_mesh(mesh()):
        declared = weights.declare(config.load_config(None, *PLAIN, *settings))
    adapters = declared.params.keys()
    moments = {f"opt_state/{moment}/{path}" for moment in ("mu", "nu") for path in adapters}
    stored = ocp.checkpointables_metadata(folder).metadata["state"]
    assert stored.keys() == {"step", "opt_state/count", *moments, *(f"params/{path}" for path in adapters)}


def test_a_run_goes_on_to_the_bit_and_only_beside_the_same_weights(qlora_run, run, in_bits, tmp_path):
    output, settings = qlora_run
    copied = without_the_last_step(output, tmp_path)
    changed = tmp_path / "changed"
    shutil.copytree(in_bits["mixtral"].folder, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"][7] ^= 1  # one of 100,000
    save_file(tensors, changed / "model.safetensors")
    code, said = run(copied, *settings, f"model.path={changed}")
    saved = checkpoint.meta(output / "checkpoints" / "4")["base"]
    found = re.search(
        r"error: model\.path: '(.*)' does not hold the weights .* was (\w{8}) \('(.*)'\), and it is (\w{8});", said
    )
    assert code == 2 and found, said
    assert found.group(1, 2, 3) == (str(changed), saved["checksum"], saved["path"]) and found[4] != found[2]
    assert saved["path"] == str(in_bits["mixtral"].folder)

    code, said = run(copied, *settings)
    assert code == 0 and "resuming from step 2" in said, said
    want, got = (checkpoint.load_params(folder)[0] for folder in (output, copied))
    assert all(np.array_equal(got[path], array) and array.any() for path, array in want.items())


# --- refusals ---------------------------------------------------------------------------------------------------------

ADAPTERS = ("lora.rank=4", "model.intermediate_size=128")
REFUSED = {
    "base": (["lora.base=nf4"], r"lora\.base: 'nf4' is for adapters, and lora\.rank is not set"),
    "alpha": (["lora.alpha=8"], r"lora\.alpha: 8\.0 is for adapters, and lora\.rank is not set"),
    "name of transformers": (
        [*ADAPTERS, "lora.target_modules=['w1']", *MIXTRAL], r"lora\.target_modules: 'w1' is no weight .*; here w1 is called gate_proj",
    ),
    "embedding": ([*ADAPTERS, "lora.target_modules=['embed_tokens']"], r"lora\.target_modules: 'embed_tokens' is no weight that can have adapters"),
    "no router": (
        [*ADAPTERS, "lora.target_modules=['router']"], r"lora\.target_modules: 'router' is no weight that can have adapters; they are q_proj.* down_proj$",
    ),
    "none": ([*ADAPTERS, "lora.target_modules=[]"], r"lora\.target_modules: names nothing to adapt"),
    "twice": ([*ADAPTERS, "lora.target_modules=['q_proj', 'k_proj', 'q_proj']"], r"lora\.target_modules: names q_proj twice"),
    "blocks": (["lora.rank=4", "lora.base=nf4"], r"model\.intermediate_size: 96 is no multiple of 64"),
    "blocks of attention": ([*ADAPTERS, "lora.base=nf4", "model.head_dim=8"], r"model\.num_attention_heads x model\.head_dim: 32 is no multiple of 64"),
    "double": ([*ADAPTERS, "lora.double_quant=false"], r'lora\.double_quant: false is for lora\.base = "nf4", and that is "bfloat16"'),
    "export": ([*ADAPTERS, "checkpoint.export=bfloat16"], r'checkpoint\.export: "bfloat16", but adapters are written as float32'),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_settings_that_contradict_each_other_are_refused_by_name(fault):
    overrides, message = REFUSED[fault]
    with pytest.raises(UserError) as caught:
        tiny(*overrides)
    assert re.search(message, str(caught.value), re.MULTILINE), caught.value


def test_an_adapter_without_a_rank_and_one_of_another_rank_are_refused(made, tmp_path):
    base = made["llama"]
    cfg = of_folder(base.folder, f"model.adapter={base.adapter}", "lora.rank=2")
    wanted = r"^model\.adapter: .* needs lora\.rank = 4; got lora\.rank = 2$"
    with jax.set_mesh(mesh()), pytest.raises(UserError, match=wanted):
        step.init_state(cfg)
    with pytest.raises(UserError, match=rf"model\.adapter: '{tmp_path}' is no PEFT folder: adapter_config\.json"):
        of_folder(base.folder, f"model.adapter={tmp_path}")


def test_a_folder_in_four_bits_is_for_adapters_beside_four_bits_alone(made, tmp_path):
    settings = json.loads((made["llama"].folder / "config.json").read_text())
    method = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": method}))
    for overrides in ([], ["lora.rank=4"], ["lora.rank=4", "lora.base=float8"], ["lora.base=nf4"]):
        with pytest.raises(
            UserError, match=r'quantization_config: the weights are in 4 bits .* set lora\.rank and lora\.base = "nf4"'
        ):
            of_folder(tmp_path, *overrides)
    assert of_folder(tmp_path, "lora.rank=4", "lora.base=nf4").lora.base == "nf4"


def test_adapters_alone_are_no_model_to_start_from(llama_run):
    output, _ = llama_run
    with pytest.raises(
        UserError, match=r"model\.path: .* holds adapters alone; give the model that they were trained on"
    ):
        of_folder(output / "checkpoints" / "4")
