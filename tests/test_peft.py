"""Adapter folders: what PEFT writes is read as what PEFT computes, what is written PEFT reads as what we merge, and whatever else a folder says is refused."""

import copy
import json
import logging
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support import error, hugging_face, mesh, ours

torch = pytest.importorskip("torch", reason="the oracle is PEFT on torch")
oracle = pytest.importorskip("peft", reason="the oracle is PEFT on torch")
import jax
import ml_dtypes
import transformers

from jaxllm import hf, peft
from jaxllm.attention import AttentionConfig
from jaxllm.linear import PrecisionConfig
from jaxllm.models import FAMILIES
from jaxllm.models.decoder import ModelConfig
from jaxllm.moe import MoEConfig
from jaxllm.section import UserError
from jaxllm.state import declare

IDS = torch.tensor([[1, 9, 77, 30, 12, 5, 60, 41], [3, 3, 8, 50, 2, 90, 17, 64]])
ATTENTION, EXPERTS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("w1", "w2", "w3")
FUSED = "base_model.model.model.layers.{}.mlp.experts"


def tables(config):
    """(table of the family, {path: shape and dtype}) of a ModelConfig."""
    with jax.set_mesh(mesh()):
        abstract = declare(config, PrecisionConfig(), AttentionConfig(), MoEConfig())[1]
    return FAMILIES[config.family].hf_weights(config), abstract


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{family: a tiny model as transformers' folder, as our parameters, and their tables}."""
    found = {}
    for name, options in {"llama": {}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}.items():
        model, folder = hugging_face(**options), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        config = ModelConfig(**FAMILIES[name].config_from_hf(json.loads((folder / "config.json").read_text())))
        weights, shapes = tables(config)
        loaded = load(folder)  # copied, which is faster than to load it again
        plain = logits(copy.deepcopy(loaded))
        params = ours({n: p.detach().numpy() for n, p in model.state_dict().items()}, weights, shapes)
        found[name] = SimpleNamespace(
            name=name,
            folder=folder,
            config=config,
            weights=weights,
            shapes=shapes,
            params=params,
            model=loaded,
            plain=plain,
        )
    return found


def load(folder):
    plain = dict(attn_implementation="eager", experts_implementation="eager")  # which float64 needs
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)


def logits(model):
    with torch.no_grad():  # in float64, so that what differs is what the models hold
        return model.eval().double()(IDS).logits.numpy()


def merged_logits(base, arrays, scale, tmp_path):
    """Logits of transformers on our parameters, merged and exported, and how many matrices were merged."""
    params, count = peft.merge_params(base.params, arrays, scale)
    out = tmp_path / "merged"
    hf.save_folder(params, base.weights, FAMILIES[base.name].config_to_hf(base.config), out, dtype="float32")
    return logits(load(out)), count


def trained(base, b_std=0.1, **options):
    """A PEFT model whose adapter is all random, B included."""
    config = oracle.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **options})
    model = oracle.get_peft_model(copy.deepcopy(base.model), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1 if ".lora_A" in name else b_std)
    return model


def written(base, folder, targets, rank=4, alpha=8.0, use_rslora=False, seed=0, dropout=0.0):
    """A folder of ours with random adapters of these targets: (settings, arrays)."""
    rng, arrays = np.random.default_rng(seed), {}
    for path, name in peft.targets(base.weights).items():
        if name in targets:
            weight, shape = base.weights[path], base.shapes[path].shape
            leading = weight.name.count("{")
            inputs, outputs = (
                shape[: leading + weight.num_inputs],
                (*shape[:leading], rank, *shape[leading + weight.num_inputs :]),
            )
            own = (rng.standard_normal(s, np.float32) / 10 for s in ((*inputs, rank), outputs))
            arrays |= dict(zip(peft.paths(path), own, strict=True))
    settings = peft.Settings(rank, alpha, use_rslora, tuple(targets), dropout, str(base.folder))
    peft.write(folder, base.weights, settings, arrays, str(base.folder))
    return settings, arrays


def same_bytes(a, b):
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and a[n].tobytes() == b[n].tobytes() for n in a)


def config_of(folder, **changes):
    """Changes adapter_config.json, and gives it."""
    path = folder / peft.CONFIG
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))
    return config


# --- PEFT's folders ---------------------------------------------------------------------------------------------------

# (family, what PEFT is told, (rank, alpha, matrices) of what is read)
FOLDERS = {
    "llama": ("llama", dict(target_modules=["q_proj", "o_proj", "down_proj"]), (4, 8, 2 * 3)),
    "llama, all, rslora": ("llama", dict(target_modules="all-linear", use_rslora=True), (4, 8, 2 * 7)),
    "llama, some layers, a regular expression": ("llama", dict(target_modules=r"(?i).*\.1\.self_attn\.[KV]_proj"), (4, 8, 2)),
    "llama, layers_to_transform": ("llama", dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[0], layers_pattern="layers"), (4, 8, 2)),
    "llama, exclude_modules": ("llama", dict(target_modules=["q_proj", "up_proj"], exclude_modules=["layers.0.mlp.up_proj"]), (4, 8, 3)),
    "llama, patterns": (
        "llama",
        dict(
            target_modules="all-linear", rank_pattern={r"layers\.0\..*k_proj": 6, "q_proj": 2},
            alpha_pattern={"self_attn": 5, r"^model.*\.up_proj": 3, "up_proj": 9, "k_proj": 24},
        ),
        (6, 12, 2 * 7),
    ),
    "llama, rslora and a pattern": ("llama", dict(target_modules=["q_proj", "v_proj"], use_rslora=True, rank_pattern={"v_proj": 7}), (7, 4 * 7**0.5, 2 * 2)),
    "llama, one pattern for all": ("llama", dict(target_modules=["q_proj"], alpha_pattern={"q_proj": 3}), (4, 3, 2)),
    "mixtral": ("mixtral", dict(target_modules=[*ATTENTION, *EXPERTS]), (8, 16, 2 * (4 + 3 * 4))),
    "mixtral, all and the router": ("mixtral", dict(target_modules="all-linear"), (8, 16, 2 * (4 + 3 * 4 + 1))),
    "mixtral, rslora": ("mixtral", dict(target_modules=[*EXPERTS], use_rslora=True), (8, 16, 2 * 3 * 4)),
    "mixtral, gate_up_proj alone": (
        "mixtral", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], rank_pattern={"gate_up_proj": 3}),
        (4, 32 / 3, 2 * (1 + 2 * 4)),
    ),
    "mixtral, down_proj alone": ("mixtral", dict(target_modules=[], target_parameters=["down_proj"]), (4, 8, 2 * 4)),
    "mixtral, one layer of one parameter": (
        "mixtral", dict(target_modules=["v_proj"], target_parameters=["layers.1.mlp.experts.down_proj", "gate_up_proj"]), (4, 8, 2 * (1 + 2 * 4) + 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.filterwarnings("ignore")  # PEFT's, about patterns that it has itself made
def test_what_peft_writes_is_what_peft_computes(case, bases, tmp_path):
    family, options, (rank, alpha, count) = FOLDERS[case]
    base = bases[family]
    model = trained(base, **options)
    model.save_pretrained(tmp_path / "adapter")
    settings, arrays = peft.read(tmp_path / "adapter", base.weights, base.shapes)
    want = logits(model)
    got, _ = merged_logits(base, arrays, settings.scale, tmp_path)
    assert error(base.plain, want) > 1e-2  # or the adapter would not show
    assert error(got, want) < 1e-6
    assert (settings.rank, settings.alpha) == (rank, pytest.approx(alpha))
    assert settings.use_rslora == options.get("use_rslora", False)
    adapted = sum(array.any(axis=tuple(range(len(leading), array.ndim))).sum() for array, leading in of_b(base, arrays))
    assert adapted == count


def of_b(base, arrays):
    """(B of every adapted weight, its leading dims)."""
    for path, weight in base.weights.items():
        if (b := peft.paths(path)[1]) in arrays:
            yield arrays[b], arrays[b].shape[: weight.name.count("{")]


def test_ranks_and_scales_of_their_own_are_folded_and_said(bases, tmp_path, caplog):
    base = bases["llama"]
    trained(
        base, target_modules=["q_proj", "v_proj", "o_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 2}
    ).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "jaxllm.peft"):
        settings, arrays = peft.read(tmp_path, base.weights, base.shapes)
    file = load_file(tmp_path / peft.WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    a, b = (arrays[f"layers/self_attn/q_proj/lora_{x}"][1] for x in "ab")
    assert (settings.rank, settings.alpha, settings.scale) == (4, 8, 2)
    assert np.array_equal(a[:, :2], file[name.format("A")].T) and not a[:, 2:].any()
    assert np.array_equal(b[:2], (file[name.format("B")].T / 2).reshape(2, *b.shape[1:])) and not b[2:].any()
    assert "ranks [2, 4]" in caplog.text and "q_proj" in caplog.text and "another rate" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_what_peft_has_just_begun_keeps_its_rank(bases, tmp_path):
    base = bases["mixtral"]
    trained(base, b_std=0, target_modules=["w1", "w2", "w3"]).save_pretrained(tmp_path / "a")
    settings, arrays = peft.read(tmp_path / "a", base.weights, base.shapes)
    a = load_file(tmp_path / "a" / peft.WEIGHTS)[FUSED.format(1) + ".base_layer.lora_A.weight"].reshape(4, 8, 64)
    assert (settings.rank, settings.alpha) == (4, 8)  # that of w1 and of w3, which PEFT has doubled
    assert np.array_equal(arrays["layers/moe/gate_proj/lora_a"][1], a[:, :4].mT)
    assert np.array_equal(arrays["layers/moe/up_proj/lora_a"][1], a[:, 4:].mT)
    trained(base, b_std=0, target_modules=[], target_parameters=["gate_up_proj"]).save_pretrained(tmp_path / "b")
    settings, arrays = peft.read(tmp_path / "b", base.weights, base.shapes)
    a = load_file(tmp_path / "b" / peft.WEIGHTS)[FUSED.format(1) + ".lora_A.weight"].reshape(4, 4, 64)
    assert settings.rank == 4 and all(
        np.array_equal(arrays[f"layers/moe/{n}_proj/lora_a"][1], a.mT) for n in ("gate", "up")
    )


def test_a_pattern_that_nothing_matches_is_said(bases, tmp_path, caplog):
    written(bases["llama"], tmp_path / "a", ["q_proj"])
    config_of(tmp_path / "a", alpha_pattern={"k_proj": 3})
    peft.read(tmp_path / "a", bases["llama"].weights, bases["llama"].shapes)
    assert "alpha_pattern: nothing adapted matches 'k_proj'" in caplog.text


def old_folder(base, folder, rng, **changes):
    """A folder as PEFT with transformers 4 wrote it, without a line of the code under test: all matrices of Mixtral in bfloat16, but the router.
    Returns what is to be added to each, as PEFT defines it."""
    tensors, deltas = {}, {}
    folder.mkdir()
    for name, value in load_file(base.folder / "model.safetensors").items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if "_proj" in name or ".experts." in name:
            rank = 3 if ".experts.2.w1" in name else 4
            a, b = (
                (rng.standard_normal(s) / 10).astype(ml_dtypes.bfloat16)
                for s in ((rank, value.shape[1]), (value.shape[0], rank))
            )
            module = "base_model.model." + name.removesuffix(".weight")
            tensors |= {module + ".lora_A.weight": a, module + ".lora_B.weight": b}
            scale = 12 / 3 if rank == 3 else 2
            deltas[name] = value + scale * (b.astype(np.float32) @ a.astype(np.float32))
    save_file(tensors, folder / peft.WEIGHTS)
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=[*ATTENTION, *EXPERTS], bias="none",
        rank_pattern={r"experts\.2\.w1": 3}, alpha_pattern={r"experts\.2\.w1": 12}, base_model_name_or_path=str(base.folder),
    )  # fmt: skip
    (folder / peft.CONFIG).write_text(json.dumps(config | changes))
    return deltas


def test_one_adapter_per_expert_merges_every_matrix(bases, tmp_path, rng):
    base = bases["mixtral"]
    want = old_folder(base, tmp_path / "old", rng)
    settings, arrays = peft.read(tmp_path / "old", base.weights, base.shapes)
    params, count = peft.merge_params(base.params, arrays, settings.scale)
    out = hf.save_folder(
        params, base.weights, FAMILIES["mixtral"].config_to_hf(base.config), tmp_path / "out", dtype="float32"
    )
    got = hf.ModelFolder(out).tensors
    assert count == 2 * (4 + 3 * 4) == len(want)
    for name, value in want.items():
        ((_, flat),) = got[name].blocks(1)
        assert error(flat.reshape(value.shape), value) < 1e-6, name
    assert settings.target_modules == (*ATTENTION, "gate_proj", "up_proj", "down_proj") and settings.scale == 2


# --- our folders ------------------------------------------------------------------------------------------------------

ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
OURS = {
    "llama": ("llama", ALL, {}),
    "llama, rslora": ("llama", ("q_proj", "down_proj"), dict(use_rslora=True, rank=5, alpha=7.5, dropout=0.05)),
    "mixtral": ("mixtral", (*ATTENTION, "router", *ALL[4:]), {}),
    "mixtral, rslora": ("mixtral", ("q_proj", "gate_proj", "up_proj"), dict(use_rslora=True, dropout=0.05)),
    "mixtral, up_proj alone": ("mixtral", ("up_proj",), {}),
    "mixtral, down_proj alone": ("mixtral", ("down_proj",), {}),
    "mixtral, attention": ("mixtral", ATTENTION, dict(use_rslora=True)),
}


@pytest.mark.parametrize("case", OURS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_is_what_peft_computes(case, bases, tmp_path):
    family, targets, options = OURS[case]
    base = bases[family]
    settings, arrays = written(base, tmp_path / "adapter", targets, **options)
    model = oracle.PeftModel.from_pretrained(copy.deepcopy(base.model), tmp_path / "adapter")
    want, count = merged_logits(base, arrays, settings.scale, tmp_path)
    assert error(base.plain, want) > 1e-2
    assert error(logits(model), want) < 1e-6
    assert count == 2 * sum(4 if family == "mixtral" and t in ALL[4:] else 1 for t in targets)
    # What we read again is what was written, bit for bit, and so is what PEFT writes of it.
    model.save_pretrained(tmp_path / "again")
    for folder in ("adapter", "again"):
        read_settings, read_arrays = peft.read(tmp_path / folder, base.weights, base.shapes)
        assert same_bytes(read_arrays, arrays), folder
        assert math.isclose(read_settings.scale, settings.scale, rel_tol=1e-15) and not read_settings.use_rslora
        dropout = 0.0 if family == "mixtral" else settings.dropout
        assert read_settings == settings._replace(alpha=read_settings.alpha, use_rslora=False, dropout=dropout)


def test_old_peft_knows_every_field_that_is_written(bases, tmp_path):
    written(bases["llama"], tmp_path / "a", ["q_proj"], use_rslora=True)
    # LoraConfig of PEFT 0.4.0, which passes over others without a word.
    known = {
        "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r", "target_modules", "lora_alpha",
        "lora_dropout", "fan_in_fan_out", "bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern",
    }  # fmt: skip
    assert config_of(tmp_path / "a").keys() <= known


def test_nothing_is_written_over_and_nothing_half_is_left(bases, tmp_path, monkeypatch):
    written(bases["llama"], tmp_path / "a", ["q_proj"])
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    with pytest.raises(UserError, match="already exists"):
        written(bases["llama"], tmp_path / "a", ["q_proj"], seed=1)
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before

    def fails(*_):
        raise OSError("no")

    monkeypatch.setattr(hf, "write_json", fails)
    with pytest.raises(OSError, match="no"):
        written(bases["llama"], tmp_path / "b", ["q_proj"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_arrays_leave_devices(bases, tmp_path):
    base = bases["mixtral"]
    settings, arrays = written(base, tmp_path / "a", ["o_proj", "down_proj"])
    peft.write(
        tmp_path / "b", base.weights, settings, {p: jax.numpy.asarray(a) for p, a in arrays.items()}, str(base.folder)
    )
    files = [(tmp_path / folder / peft.WEIGHTS).read_bytes() for folder in "ab"]
    assert files[0] == files[1]


# --- what is merged and counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading, inputs, outputs", [((), (6,), (4, 2)), ((2, 3), (4, 2), (5,))])
def test_merge_rounds_once(leading, inputs, outputs, rng):
    n, out, axes = math.prod(inputs), math.prod(outputs), (*leading,)
    kernel, a, b = (rng.standard_normal(s) for s in ((*axes, n, out), (*axes, n, 3), (*axes, 3, out)))
    kernel = kernel.astype(ml_dtypes.bfloat16)
    a, b = a.astype(np.float32), b.astype(np.float32)
    want = (kernel.astype(np.float64) + 0.3 * (a.astype(np.float64) @ b)).astype(np.float32)
    got = peft.merge(
        kernel.reshape(*axes, *inputs, *outputs), a.reshape(*axes, *inputs, 3), b.reshape(*axes, 3, *outputs), 0.3
    )
    assert got.dtype == kernel.dtype and got.shape == (*axes, *inputs, *outputs)
    ulp = np.abs(want) * 2.0**-8  # half of bfloat16's step is at most this
    assert (np.abs(got.reshape(want.shape).astype(np.float32) - want) <= ulp + 1e-6).all()


def test_an_adapter_of_another_base_is_not_merged(bases, tmp_path):
    base = bases["llama"]
    settings, arrays = written(base, tmp_path / "a", ["q_proj"])
    short = base.params | {"layers/self_attn/q_proj/kernel": base.params["layers/self_attn/q_proj/kernel"][:, :32]}
    with pytest.raises(UserError, match="q_proj.*does not fit"):
        peft.merge_params(short, arrays, settings.scale)
    with pytest.raises(UserError, match="no weights for layers/mlp/lost/lora_a"):
        peft.merge_params(base.params, arrays | {"layers/mlp/lost/lora_a": np.zeros((2, 3, 4))}, settings.scale)


def test_aws_preset_has_as_many_parameters_as_aws_counts():
    config = ModelConfig(
        family="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02, router_jitter_noise=0.0,
    )  # fmt: skip
    weights, shapes = tables(config)
    named = {name: path for path, name in peft.targets(weights).items()}
    count = {}
    for name, path in named.items():
        leading = math.prod(shapes[path].shape[: weights[path].name.count("{")])
        count[name] = 16 * leading * sum(hf.file_shape(weights[path], shapes[path].shape))
    assert sum(count.values()) == 242_225_152
    assert sum(count[name] for name in ATTENTION) == 13_631_488


# --- refusals ---------------------------------------------------------------------------------------------------------

FIELDS = {
    "peft_type": "IA3", "task_type": "SEQ_CLS", "bias": "lora_only", "use_dora": True, "fan_in_fan_out": True, "lora_bias": True,
    "layer_replication": [[0, 2]], "modules_to_save": ["lm_head"], "alora_invocation_tokens": [1], "trainable_token_indices": [3], "use_qalora": True,
    "velora_config": {"num_groups": 4}, "kasa_config": {"beta": 1}, "arrow_config": {"top_k": 3}, "eva_config": {"rho": 2.0}, "use_bdlora": {"nblocks": 2},
    "megatron_config": {"a": 1}, "loftq_config": {"loftq_bits": 4}, "init_lora_weights": "pissa", "monteclora_config": {"num_samples": 2},
    "corda_config": {"verbose": False}, "lora_ga_config": {"direction": "ArBr"}, "ensure_weight_tying": True, "a_field_of_tomorrow": 0, "r": 0,
    "lora_alpha": -1,
    "rank_pattern": {"q_proj": 1.5}, "alpha_pattern": {"(": 3}, "use_rslora": 1, "lora_dropout": 2, "target_modules": [], "target_parameters": "q_proj",
    "layers_to_transform": "0", "exclude_modules": "[",
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_not_honoured_is_refused_by_name(field, bases, tmp_path):
    written(bases["llama"], tmp_path / "a", ["q_proj"])
    config_of(tmp_path / "a", **{field: FIELDS[field]})
    with pytest.raises(UserError, match=rf"adapter_config\.json: {field} = "):
        peft.read(tmp_path / "a", bases["llama"].weights, bases["llama"].shapes)


def test_every_field_of_peft_is_known_and_neutral_values_are_no_fault(bases, tmp_path):
    base = bases["llama"]
    trained(base, target_modules=["q_proj"]).save_pretrained(tmp_path)
    config = config_of(tmp_path, runtime_config=None, a_field_of_tomorrow=None, another=False, more={})
    assert len(config) > 40
    peft.read(tmp_path, base.weights, base.shapes)


def tensors_of(folder, change):
    tensors = load_file(folder / peft.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / peft.WEIGHTS)


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
FAULTS = {
    "missing": (lambda t: t.pop(NAME), r"1 tensors missing:\n  " + NAME),
    "unread": (
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[NAME]}),
        r"1 tensors unexpected.*\n  base_model.model.lm_head",
    ),
    "misshapen": (
        lambda t: t.update({NAME: t[NAME][:, :3].copy()}),
        r"another shape.*\n.*found \[64, 3\], wanted \[64, 4\]",
    ),
    "of integers": (lambda t: t.update({NAME: t[NAME].astype(np.int32)}), r"of a dtype other.*\n.*I32"),
    "NaN": (lambda t: t.update({NAME: t[NAME] * np.nan}), "1 tensors hold NaN.*" + NAME),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(fault, bases, tmp_path):
    change, words = FAULTS[fault]
    written(bases["llama"], tmp_path / "a", ["q_proj"])
    tensors_of(tmp_path / "a", change)
    with pytest.raises(UserError, match=words):
        peft.read(tmp_path / "a", bases["llama"].weights, bases["llama"].shapes)


def test_the_base_of_other_sizes_is_refused(bases, tmp_path):
    base = bases["llama"]
    written(base, tmp_path / "a", ["q_proj", "down_proj"])
    wider = tables(base.config.model_copy(update={"intermediate_size": 128}))[1]
    with pytest.raises(
        UserError,
        match=r"2 tensors of another shape[^:]*:\n.*layers\.0\.mlp\.down_proj\.lora_A.*found \[4, 96\], wanted \[4, 128\]",
    ):
        peft.read(tmp_path / "a", base.weights, wider)
    deeper = tables(base.config.model_copy(update={"num_hidden_layers": 3}))[1]
    with pytest.raises(UserError, match=r"4 tensors missing:\n.*layers\.2\."):
        peft.read(tmp_path / "a", base.weights, deeper)
    with pytest.raises(UserError, match="unexpected"):
        peft.read(tmp_path / "a", bases["mixtral"].weights, bases["mixtral"].shapes)


def test_targets_without_tensors_and_tensors_without_targets_are_refused(bases, tmp_path):
    base = bases["llama"]
    written(base, tmp_path / "a", ["q_proj", "v_proj"])
    for targets, words in (
        (["q_proj"], "unexpected"),
        (["q_proj", "v_proj", "k_proj"], "missing"),
        (["lm_head"], "name none of"),
    ):
        config_of(tmp_path / "a", target_modules=targets)
        with pytest.raises(UserError, match=words):
            peft.read(tmp_path / "a", base.weights, base.shapes)


def test_a_pickle_is_never_opened(bases, tmp_path):
    base = bases["llama"]
    _, arrays = written(base, tmp_path / "a", ["q_proj"])

    class Opened:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    (tmp_path / "a" / "adapter_model.bin").write_bytes(pickle.dumps({NAME: Opened()}))
    assert same_bytes(peft.read(tmp_path / "a", base.weights, base.shapes)[1], arrays)
    (tmp_path / "a" / peft.WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"only as pickle \(adapter_model\.bin\)(.|\n)*weights_only=True"):
        peft.read(tmp_path / "a", base.weights, base.shapes)
    assert not (tmp_path / "opened").exists()


def test_what_is_no_adapter_folder_is_refused(bases, tmp_path):
    base = bases["llama"]
    read = lambda: peft.read(tmp_path / "a", base.weights, base.shapes)
    with pytest.raises(UserError, match="does not exist"):
        read()
    written(base, tmp_path / "a", ["q_proj"])
    weights, config = tmp_path / "a" / peft.WEIGHTS, tmp_path / "a" / peft.CONFIG
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(UserError, match="cut off"):
        read()
    weights.unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        read()
    config.write_text("[]")
    with pytest.raises(UserError, match="wanted a JSON object"):
        read()
    config.unlink()
    with pytest.raises(UserError, match="no adapter_config.json"):
        read()
