"""jaxllm: Llama and Mixtral training in JAX, on long contexts, for NVIDIA Hopper GPUs.

The public names are looked up on first use, so that `import jaxllm` starts no accelerator and needs no data or tokenizer library.
"""

import importlib
import importlib.util
import pathlib
import sys

if importlib.util.find_spec("jaxllm_kernels") is None:  # a checkout that is not installed
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "kernels"))

_PUBLIC = {
    "load_config": "config",
    "Config": "config",
    "UserError": "section",
    "make_mesh": "sharding",
    "TrainState": "state",
    "init_state": "step",
    "make_train_step": "step",
    "make_eval_step": "step",
    "logits": "step",
    "Batch": "data.batch",
    "make_batches": "data.batch",
}
__all__ = list(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxllm.{_PUBLIC[name]}"), name)


def __dir__():
    return sorted(__all__)
