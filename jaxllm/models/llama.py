"""Llama and Mistral: the block, and how it is written in Hugging Face folders. Mistral is Llama with a sliding window, and nothing else.

A config.json field that this code does not know is refused by name: transformers accepts `logit_scale` or `sliding_window` in a Llama
config and ignores them, and a model trained under such a config is another model than its author meant.
"""

import logging

import jax
from flax import nnx

from jaxllm.layers import MLP, Attention, RMSNorm
from jaxllm.models.decoder import HfWeight, ModelConfig
from jaxllm.section import UserError

logger = logging.getLogger(__name__)


class Block(nnx.Module):
    def __init__(self, config, precision, attention, moe, lora, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.self_attn = Attention(config, precision, lora, attention, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.mlp = MLP(config, precision, lora, rngs=rngs)

    def __call__(self, x, cos, sin, k_start, k_end, layout, noise=None):
        """x [B, T, E] -> ([B, T, E], nothing to record); the rest as in `layers.Attention`. noise: of this layer (see `noise`), None in evaluation."""
        with jax.named_scope("self_attn"):
            x = x + self.self_attn(self.input_layernorm(x), cos, sin, k_start, k_end, layout, noise)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x), noise), {}


def hf_weights(config: ModelConfig) -> dict[str, HfWeight]:
    """{parameter path: tensor in the Hugging Face checkpoint} for the parameters that this config has."""
    table = {
        "embed_tokens/embedding": HfWeight("model.embed_tokens.weight"),
        "norm/weight": HfWeight("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        table["lm_head/kernel"] = HfWeight("lm_head.weight")
    for norm in ("input_layernorm", "post_attention_layernorm"):
        table[f"layers/{norm}/weight"] = HfWeight(f"model.layers.{{layer}}.{norm}.weight")
    for part, projections, use_bias in (
        ("self_attn", {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2}, config.attention_bias),
        ("mlp", {"gate_proj": 1, "up_proj": 1, "down_proj": 1}, config.mlp_bias),
    ):
        for name, num_inputs in projections.items():
            prefix = f"model.layers.{{layer}}.{part}.{name}"
            table[f"layers/{part}/{name}/kernel"] = HfWeight(f"{prefix}.weight", "linear", num_inputs)
            if use_bias:
                table[f"layers/{part}/{name}/bias"] = HfWeight(f"{prefix}.bias")
    return table


_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "initializer_range",
    "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# What an absent field means to transformers' config class of that model_type.
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MISTRAL = {
    **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
_HF_DEFAULTS = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {**_MISTRAL, **_EXPERTS, "sliding_window": None, "rms_norm_eps": 1e-5},
}
_THETA = {"llama": 1e4, "mistral": 1e4, "mixtral": 1e6}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
# Fields of one family and not of Llama.
_OWN = {"llama": (), "mistral": ("sliding_window",), "mixtral": ("sliding_window", *_EXPERTS)}
# Fields without influence on the training maths, and fields that are accepted with their neutral value alone.
_IGNORED = {
    "architectures", "model_type", "dtype", "torch_dtype", "use_cache", "transformers_version", "return_dict", "output_attentions",
    "output_hidden_states", "is_decoder", "is_encoder_decoder", "problem_type", "id2label", "label2id", "is_llama_config", "task_specific_params",
    "transformers.js_config", "unsloth_version", "unsloth_fixed", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "tokenizer_class", "finetuning_task", "prefix", "torchscript", "use_bfloat16", "chunk_size_feed_forward",
    "output_router_logits",  # whether transformers adds the router's loss; here its coefficient says so
}  # fmt: skip
_NEUTRAL = {
    "pretraining_tp": (1, None),
    "attention_dropout": (0, 0.0, None),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, 1.0),
}


def rope_from_hf(hf: dict, default_theta: float) -> dict:
    """rope_parameters of a config.json in either schema (transformers 4: `rope_theta` and `rope_scaling`, whose `type` is an old name of
    `rope_type`; transformers 5: `rope_parameters`). UserError where the two are present and contradict each other: transformers would take
    one of them in silence."""
    old, new = (dict(hf.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))
    for block in (old, new):
        kind = block.pop("type", None)
        if block or kind:
            block.setdefault("rope_type", kind or "default")
    top = {key: hf.get(key) for key in ("rope_theta", "original_max_position_embeddings")}
    for key in sorted({*old, *new, *top}):
        given = {
            f"{where}.{key}".removeprefix("."): block[key]
            for where, block in (("rope_parameters", new), ("rope_scaling", old), ("", top))
            if block.get(key) is not None
        }
        values = list(given.values())
        if any(value != values[0] for value in values[1:]):
            listed = " and ".join(f"{name} = {value!r}" for name, value in given.items())
            raise UserError(f"config.json: {listed} contradict each other; remove the wrong one")
    rope = {"rope_type": "default", **new, **old}
    if (theta := rope.get("rope_theta", top["rope_theta"])) is None:
        logger.warning("config.json gives no rope_theta; the default of transformers is used: %g", default_theta)
        theta = default_theta
    rope["rope_theta"] = float(theta)
    if rope["rope_type"] in ("yarn", "longrope", "llama3") and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = top["original_max_position_embeddings"]
    if rope["rope_type"] in ("yarn", "longrope") and rope["original_max_position_embeddings"] is None:
        rope["original_max_position_embeddings"] = hf.get("max_position_embeddings")
    if rope["rope_type"] != "proportional" and rope.get("partial_rotary_factor") in (1, 1.0):
        del rope["partial_rotary_factor"]
    return {key: value for key, value in rope.items() if value is not None}


def config_from_hf(hf: dict) -> dict:
    """Fields of `ModelConfig` from a config.json of model_type "llama", "mistral" or "mixtral". UserError names a field that is unknown or unsupported."""
    family = hf.get("model_type", "llama")
    own = [*_FIELDS, *_OWN[family]]
    known = {
        *own,
        *_IGNORED,
        *_NEUTRAL,
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
    }
    if unknown := sorted(key for key in set(hf) - known if hf[key] is not None and not key.startswith("_")):
        raise UserError(
            f"config.json: {', '.join(f'{key} = {hf[key]!r}' for key in unknown)}: unknown to jaxllm for model_type {family!r}. If it does not "
            "change the model's maths, remove it from config.json; if it does, this model is not supported."
        )
    for key, allowed in _NEUTRAL.items():
        if key in hf and hf[key] not in allowed:
            raise UserError(f"config.json: {key} = {hf[key]!r} is not supported, only {allowed[0]!r}")
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act = {hf['hidden_act']!r} is not supported, only 'silu'")
    fields = {key: hf[key] for key in own if hf.get(key) is not None}
    # A null id or window means "none", while an absent one means the class default.
    fields |= {key: value for key, value in _HF_DEFAULTS[family].items() if key not in hf and key not in fields}
    return {**fields, "family": family, "rope_parameters": rope_from_hf(hf, default_theta=_THETA[family])}


def config_to_hf(config: ModelConfig) -> dict:
    """config.json fields for transformers 4 and 5 alike: rope in both schemas, ids and tying stated even where they are defaults."""
    rope = dict(config.rope_parameters)
    legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
    fields = {key: getattr(config, key) for key in (*_FIELDS, *_OWN[config.family])}
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        **fields,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "use_cache": True,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if legacy.get("rope_type", "default") == "default" else legacy,
    }
