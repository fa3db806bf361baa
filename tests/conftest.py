"""Test switches, set before jax is imported: eight emulated CPU devices, a compilation cache shared by all runs, strict dtypes and ranks."""

import functools
import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"  # also what makes deviceless compilation for CUDA possible
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
CACHE = os.environ.setdefault("JAXLLM_TEST_CACHE", str(pathlib.Path(tempfile.gettempdir()) / "jaxllm-test-cache"))

import jax
import numpy as np
import pytest

jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def torch():
    """What oracles stand on. The extra `test` brings it to Python 3.11 alone, where pip finds a build for CPUs; others pull gigabytes of CUDA."""
    return pytest.importorskip(
        "torch", reason="the oracle needs torch, which the extra `test` brings to Python 3.11 alone"
    )


@pytest.fixture(scope="module")
def functional(torch):
    """bitsandbytes' functions over tensors."""
    reason = "the oracle is bitsandbytes, which the extra `test` brings to Python 3.11 alone"
    return pytest.importorskip("bitsandbytes", reason=reason).functional


@pytest.fixture(scope="module")
def remembered_shuffles():
    """grain takes a millisecond to find where one of a few documents comes in the order, and tests ask for the same ones again and again. That
    processes without this agree on the order is shown in test_resume.py."""
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module as grains

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grains, "index_shuffle", functools.lru_cache(2**20)(grains.index_shuffle))
        yield
