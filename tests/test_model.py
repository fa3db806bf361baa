"""Llama against transformers, live and in float32: logits, every gradient, and the places where implementations part ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import config, generate, hf, layers, step
from jaxllm import state as states
from jaxllm.data.batch import to_device
from jaxllm.models import llama
from jaxllm.section import UserError
from support import VOCAB, T, batch_on, error, hugging_face, mesh, numpy_tree, ours, rows, tiny, worst

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
VARIANTS = {
    "base": {},
    "llama3": dict(rope_parameters=LLAMA3),
    "yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
    ),
    "linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "dynamic": dict(
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0), max_position_embeddings=32
    ),
    "longrope": dict(
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=[1.0] * 8,
            long_factor=[1.0 + 0.5 * n for n in range(8)],
        )  # fmt: skip
    ),
    "mha": dict(num_key_value_heads=4),
    "mqa": dict(num_key_value_heads=1),
    "head_dim": dict(head_dim=32),
    "mistral": dict(sliding_window=9),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "tied": dict(tie_word_embeddings=True),
    "pad": dict(pad_token_id=7, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(transformers model, our config, our parameters, graphdef) of one variant; ours come through a saved folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = hugging_face(**VARIANTS[request.param])
    model.save_pretrained(folder)
    cfg = config.load_config(
        None, f"model.path={folder}", "precision.compute=float32", "loss.chunk_size=128", "data.seq_len=64"
    )
    with jax.set_mesh(mesh()):
        graphdef, abstract, *_ = states.declare(cfg.model, cfg.precision, cfg.attention)
        params = hf.load_params(folder, llama.hf_weights(cfg.model), abstract)
    return model, cfg, params, graphdef


def state_of(params):
    return states.TrainState(step=jnp.zeros((), jnp.int32), params=params, frozen={}, fp8={}, opt_state=None)


def test_logits_and_every_gradient_equal_those_of_transformers(pair):
    model, cfg, params, graphdef = pair
    tokens = rows(num_rows=4, documents=False)["tokens"]
    tokens[:, 5] = 7  # the pad id of one variant, an ordinary token of the others
    with jax.set_mesh(mesh()):
        got = np.asarray(step.logits(graphdef, state_of(params), tokens))
        packed = {**rows(num_rows=4, documents=False), "tokens": tokens, "targets": np.roll(tokens, -1, 1)}
        batch = to_device(packed, 1, mesh())
        grads, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(params, batch)
    count = packed["loss_weights"].sum()
    model.zero_grad()
    ids = torch.tensor(tokens.astype(np.int64))
    out = model(ids, labels=ids)
    out.loss.backward()
    np.testing.assert_allclose(got, out.logits.detach().numpy(), atol=1e-5, rtol=0)
    assert abs(float(parts["loss_sum"]) / count / out.loss.item() - 1) < 1e-5
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    want = ours(theirs, llama.hf_weights(cfg.model), params)
    assert worst({k: np.asarray(g) / count for k, g in grads.items()}, want)[0] < 1e-5


def test_far_positions_on_a_ring_equal_transformers(tmp_path):
    """Llama 3.1's rope at the last positions of its 131,072, over four devices in zigzag order: positions travel with their tokens."""
    rope = LLAMA3 | dict(original_max_position_embeddings=8192)
    model = hugging_face(rope_parameters=rope, max_position_embeddings=131072)
    model.save_pretrained(tmp_path)
    cfg = config.load_config(
        None, f"model.path={tmp_path}", "precision.compute=float32", "loss.chunk_size=128", "data.seq_len=64",
        "attention.communication=ring",
    )  # fmt: skip
    packed = rows(num_rows=4, documents=False)
    packed["positions"] = packed["positions"] + (131072 - T)
    device_mesh = mesh(sequence=4)
    with jax.set_mesh(device_mesh):
        graphdef, abstract, *_ = states.declare(cfg.model, cfg.precision, cfg.attention)
        params = hf.load_params(tmp_path, llama.hf_weights(cfg.model), abstract)
        batch = to_device(packed, 1, device_mesh)
        grads, parts = jax.jit(lambda p, b: step.gradients(graphdef, p, b, cfg))(params, batch)
    ids, places = (torch.tensor(packed[name].astype(np.int64)) for name in ("tokens", "positions"))
    loss = model(ids, position_ids=places, labels=ids).loss
    loss.backward()
    count = packed["loss_weights"].sum()
    assert abs(float(parts["loss_sum"]) / count / loss.item() - 1) < 1e-5
    want = ours({name: p.grad.numpy() for name, p in model.named_parameters()}, llama.hf_weights(cfg.model), params)
    assert worst({k: np.asarray(g) / count for k, g in grads.items()}, want)[0] < 2e-5


def test_bfloat16_is_as_close_to_float32_as_transformers_own_bfloat16(pair):
    model, cfg, params, graphdef = pair
    tokens = rows(num_rows=4, documents=False)["tokens"]
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        reference = model(ids).logits.numpy()
        theirs = model.to(torch.bfloat16)(ids).logits.float().numpy()
        model.to(torch.float32)
    half = cfg.precision.model_copy(update={"compute": "bfloat16"})
    with jax.set_mesh(mesh()):
        graphdef, *_ = states.declare(cfg.model, half, cfg.attention)
        # transformers rounds the weights themselves to bfloat16 before and after: the same weights for both
        rounded = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in params.items()}
        got = np.asarray(step.logits(graphdef, state_of(rounded), tokens))
    root_mean_square = lambda x: np.sqrt(np.mean(x**2))
    assert root_mean_square(got - reference) <= 1.5 * root_mean_square(theirs - reference)


@pytest.mark.parametrize("kind", sorted(layers.ROPE_KEYS))
def test_rope_frequencies_equal_those_of_transformers(kind):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": 50000.0}
    rope |= {
        "linear": dict(factor=4.0),
        "dynamic": dict(factor=2.0),
        "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512),
        "yarn": dict(factor=8.0, original_max_position_embeddings=512, beta_fast=16, mscale=0.7, mscale_all_dim=0.9),
        "longrope": dict(
            factor=8.0,
            original_max_position_embeddings=512,
            short_factor=[1.5] * 32,
            long_factor=[2.0 + n for n in range(32)],
        ),
        "proportional": dict(partial_rotary_factor=0.5, factor=2.0),
    }.get(kind, {})
    reference = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(rope)
    )
    for length in (256, 8192):
        if kind == "default":
            want, factor = (
                transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
            )
        else:
            want, factor = ROPE_INIT_FUNCTIONS[kind](reference, seq_len=length)
        got, our_factor = layers.rope_frequencies(rope, 64, 4096, length)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)  # float32 rounding of powers and blends
        assert our_factor == pytest.approx(float(factor), rel=1e-7)


def test_llama3_frequencies_have_the_published_values():
    rope = {**LLAMA3, "original_max_position_embeddings": 8192}
    got = layers.rope_frequencies(rope, 128, 131072, 8192)[0][[0, 16, 28, 32, 36, 40, 63]]
    want = [1, 0.037606031, 0.0032114461, 0.00052484602, 7.7846555e-05, 3.4281024e-05, 3.0689259e-07]
    np.testing.assert_allclose(got, want, rtol=4e-7)


def test_far_positions_are_told_apart_in_bfloat16():
    positions = jnp.asarray([[131070, 131071]], jnp.int32)
    inverse, _ = layers.rope_frequencies({"rope_type": "default", "rope_theta": 500000.0}, 128, 131072, 131072)
    cos, sin = layers.rotary_tables(positions, inverse, 1.0, jnp.bfloat16)
    angle = np.asarray([131070, 131071], np.float32)[:, None] * inverse
    assert np.abs(np.asarray(cos[0, :, 0], np.float32) - np.cos(angle)).max() < 2**-8
    assert np.abs(np.asarray(sin[0, :, 0], np.float32) - np.sin(angle)).max() < 2**-8


def test_packed_documents_do_not_see_each_other():
    cfg = tiny()
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg)
        packed = rows(num_rows=2, seed=3)
        run = jax.jit(
            lambda s, r: states.merge(graphdef, s.params)(r["tokens"], r["positions"], r["k_start"], r["k_end"])[0]
        )
        got = np.asarray(run(state, packed))
        for r in range(2):
            for number in np.unique(packed["segment_ids"][r])[1:]:
                here = packed["segment_ids"][r] == number
                alone = np.zeros((2, T), np.int32)
                alone[0, : here.sum()] = packed["tokens"][r, here]
                index = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))
                single = {"tokens": alone, "positions": index, "k_start": np.zeros_like(alone), "k_end": index + 1}
                want = np.asarray(run(state, single))[0, : here.sum()]
                assert error(got[r, here], want) < 5e-6


def test_an_unknown_config_field_is_refused_by_name():
    plain = dict(model_type="llama", hidden_size=64, vocab_size=100)
    for field, value in dict(
        logit_scale=0.5, final_logit_softcapping=30.0, sliding_window=128, never_heard_of=1
    ).items():
        with pytest.raises(UserError, match=field):
            llama.config_from_hf({**plain, field: value})
    for field, value in dict(
        hidden_act="gelu", attention_dropout=0.1, pretraining_tp=2, partial_rotary_factor=0.5
    ).items():
        with pytest.raises(UserError, match=field):
            llama.config_from_hf({**plain, field: value})
    with pytest.raises(UserError, match="quantum.*llama3"):
        layers.check_rope({"rope_type": "quantum", "rope_theta": 1e4})
    with pytest.raises(UserError, match="low_freq_factor"):
        layers.check_rope(
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            }
        )


def test_old_and_new_rope_schemas_mean_the_same():
    block = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    new = llama.config_from_hf({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **block}})
    old = llama.config_from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **block}})
    assert new["rope_parameters"] == old["rope_parameters"]
    assert llama.config_from_hf({})["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    written = llama.config_to_hf(tiny().model.model_copy(update={"rope_parameters": new["rope_parameters"]}))
    assert written["rope_theta"] == 5e5 and written["rope_scaling"] == {"rope_type": "llama3", **block}
    assert written["rope_parameters"] == new["rope_parameters"]


def test_contradicting_rope_fields_are_refused_and_a_missing_theta_is_told(caplog):
    with pytest.raises(UserError, match=r"rope_parameters.rope_theta = 1000000.0 and rope_theta = 10000.0"):
        llama.config_from_hf({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    with pytest.raises(UserError, match="factor"):
        llama.config_from_hf(
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            }
        )
    with pytest.raises(
        UserError, match="original_max_position_embeddings"
    ):  # not taken from max_position_embeddings in silence
        layers.check_rope(
            llama.config_from_hf(
                {
                    "max_position_embeddings": 131072,
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                    },
                }
            )["rope_parameters"]
        )
    caplog.clear()
    llama.config_from_hf({})
    assert "rope_theta" in caplog.text


def test_model_flops_are_the_published_count():
    seven = dict(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    model = tiny(*(f"model.{k}={v}" for k, v in seven.items()), "model.num_key_value_heads=32").model
    assert model.matmul_parameters == 6_607_077_376
    assert model.flops_per_token(8192) == 46_084_915_200


def test_initial_values_do_not_depend_on_the_mesh():
    cfg = tiny()
    made = []
    for sizes in (dict(), dict(data=4, sequence=2)):
        with jax.set_mesh(mesh(**sizes)):
            made.append(numpy_tree(step.init_state(cfg)[1].params))
    assert all(np.array_equal(made[0][k], made[1][k]) for k in made[0])
    assert made[0]["layers/mlp/up_proj/kernel"].std() == pytest.approx(0.02, rel=0.05)
    assert made[0]["embed_tokens/embedding"].shape[0] == VOCAB


def test_more_positions_than_a_model_knows_need_scaled_rope(tmp_path, caplog):
    hugging_face(rope_parameters=LLAMA3).save_pretrained(tmp_path)
    longer = (f"model.path={tmp_path}", "model.max_position_embeddings=1024", "data.seq_len=1024")
    with pytest.raises(
        UserError, match=r"max_position_embeddings: 1024 .* more than the 256 .*model.rope_parameters are scaled"
    ):
        config.load_config(None, *longer)
    scaled = LLAMA3 | {"factor": 32.0}
    given = ", ".join(
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in scaled.items()
    )
    cfg = config.load_config(None, *longer, f"model.rope_parameters={{{given}}}")
    assert cfg.model.max_position_embeddings == 1024 and "mean something else" in caplog.text


def test_rows_longer_than_the_model_is_meant_for_are_refused_where_they_are_computed():
    """Also where no config speaks of them: research code with batches of its own, logits and samples of any length."""
    with jax.set_mesh(mesh()):
        graphdef, state = step.init_state(cfg := tiny("model.max_position_embeddings=32", "data.seq_len=32"))
        refused = pytest.raises(UserError, match="a row: 33 tokens are more than model.max_position_embeddings = 32")
        with refused:
            step.logits(graphdef, state, jnp.zeros((1, 33), jnp.int32))
        with refused:
            generate.sample(graphdef, state, [1, 2, 3], 30)
        with refused:
            step.make_train_step(graphdef, cfg)(state, batch_on(mesh(), length=33))
        assert step.logits(graphdef, state, jnp.zeros((1, 32), jnp.int32)).shape == (1, 32, VOCAB)
