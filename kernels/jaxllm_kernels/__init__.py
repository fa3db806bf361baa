"""Attention for training, with masks as intervals, and grouped products for experts: arrays in, arrays out. Knows no mesh rules, no config, no Flax.

`reference` is the contract; every entry of BACKENDS computes the same (out, lse) and the same gradients.
"""

from jaxllm_kernels import grouped, ring
from jaxllm_kernels.attention import BACKENDS, COMMUNICATION, Plan, attention, load_backend, windowed, without_padding
from jaxllm_kernels.attention import backward as attention_backward
from jaxllm_kernels.attention import forward as attention_forward
from jaxllm_kernels.ring import LAYOUTS, live_steps, token_order

__all__ = [
    "BACKENDS", "COMMUNICATION", "LAYOUTS", "Plan", "attention", "attention_backward", "attention_forward", "grouped", "live_steps", "load_backend", "ring",
    "token_order", "windowed", "without_padding",
]  # fmt: skip
