"""Attention for training, with masks as intervals: arrays in, arrays out. Knows no mesh rules, no config, no Flax.

`reference` is the contract; every entry of BACKENDS computes the same (out, lse) and the same gradients.
"""

from jaxllm_kernels.attention import BACKENDS, attention, without_padding

__all__ = ["BACKENDS", "attention", "without_padding"]
