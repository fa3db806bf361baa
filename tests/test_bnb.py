"""bitsandbytes: our codes, scales and values against its own on a CPU, live, and its checkpoint tensors read and written again as the same bytes."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import bnb, nf4
from jaxllm.nf4 import NF4
from jaxllm.section import UserError

NAME = "model.layers.0.mlp.up_proj.weight"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
dequantise = jax.jit(nf4.dequantise, static_argnums=1)


def bits(array):
    """The bytes of an array of numpy, JAX or torch."""
    if hasattr(array, "detach"):
        import torch

        array = array.detach().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(array).tobytes()


def weights(torch, shape, dtype, std=0.02, seed=0):
    """(tensor, the same as numpy float32): normal, rows of different sizes, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=generator) * std * (0.3 + torch.rand(shape[0], 1, generator=generator))
    w.view(-1)[64:128] = 0
    w = w.to(getattr(torch, dtype))
    return w, w.float().numpy()


def of_state(packed, state):
    """NF4 of numpy of what quantize_4bit gives for a matrix."""
    outputs, inputs = state.shape
    table = lambda x: None if x is None else x.numpy()
    nested = state.state2
    return NF4(
        packed.numpy().reshape(outputs, inputs // 2),
        state.absmax.numpy().reshape(outputs, inputs // 64),
        state.code.numpy(),
        *((table(nested.absmax), table(state.offset), table(nested.code)) if nested else ()),
    )


# --- against bitsandbytes ---------------------------------------------------------------------------------------------


def test_both_tables_are_its_own_bit_for_bit(torch, functional):
    assert bits(nf4.CODEBOOK) == bits(functional.get_4bit_type("nf4", device="cpu"))
    assert bits(nf4.ABSMAX_MAP) == bits(functional.create_dynamic_map())


@pytest.mark.parametrize(
    "shape, std", [((96, 512), 0.02), ((7, 130), 1.0), ((5, 77), 0.02), ((2048, 64), 3e-5), ((1, 1), 1)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_absmax_are_its_own_bit_for_bit_odd_tails_included(torch, functional, dtype, shape, std):
    w, _ = weights(torch, shape, dtype, std)
    packed, state = functional.quantize_4bit(w, quant_type="nf4")
    codes, absmax = nf4.encode(w.float().numpy().astype(DTYPES[dtype]))
    assert bits(codes) == bits(packed) and bits(absmax) == bits(state.absmax)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_its_own_bit_for_bit(torch, functional, dtype, double_quant):
    for shape in ((96, 1024), (640, 192)):
        w, _ = weights(torch, shape, dtype)
        packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=double_quant)
        got = dequantise(jax.tree.map(jnp.asarray, of_state(packed, state)), dtype)
        assert got.shape == shape and bits(got) == bits(functional.dequantize_4bit(packed, state))


def binned(values):
    """Codes as bitsandbytes' CPU quantiser takes them: the nearest of the middle of one of 65,536 bins, not of the value (functions in cpu_ops.cpp)."""
    top, middles = np.float32(65535), np.float32(0.5) * (nf4.ABSMAX_MAP[1:] + nf4.ABSMAX_MAP[:-1])
    bins = np.float32(-1) + np.float32(2) * np.arange(65536, dtype=np.float32) / top
    place = ((values + np.float32(1)) * np.float32(0.5) * top + np.float32(0.5)).astype(np.uint16)
    return np.searchsorted(middles, bins, side="left")[place].astype(np.uint8)


def test_absmax_are_rounded_as_on_gpus_and_differ_from_its_cpu_quantiser_by_its_bins_alone(torch, functional):
    different = total = 0
    for seed in range(4):
        w, w32 = weights(torch, (2048, 512), "bfloat16", seed=seed)
        _, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        theirs, offset = state.absmax.numpy(), state.offset.numpy()
        _, absmax = nf4.encode(w32)
        codes, nested, same = nf4.encode_absmax(absmax, offset)
        assert bits(nested) == bits(state.state2.absmax) and bits(same) == bits(offset)
        x = (absmax - offset).reshape(-1, 256)
        inverse = np.float32(1) / nested
        assert np.array_equal(binned((x * inverse[:, None]).reshape(-1)), theirs)
        different, total = different + int((codes != theirs).sum()), total + theirs.size
        own = nf4.quantise(w32)
        assert abs(own.offset.view(np.int32) - offset.view(np.int32)) <= 1  # its float32 sum
    assert total == 65536 and 0 < different <= 0.003 * total


# --- checkpoints ------------------------------------------------------------------------------------------------------


def as_numpy(torch, tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_a_checkpoint_s_tensors_are_read_and_written_as_the_same_bytes(torch, functional, double_quant, storage):
    w, _ = weights(torch, (96, 256), "float16" if storage == "uint8" else "bfloat16")
    options = dict(quant_type="nf4", compress_statistics=double_quant, quant_storage=getattr(torch, storage))
    packed, state = functional.quantize_4bit(w, **options)
    saved = {NAME: packed, **{f"{NAME}.{suffix}": part for suffix, part in state.as_dict(packed=True).items()}}
    saved = {name: as_numpy(torch, tensor) for name, tensor in saved.items()}
    assert {name: sorted(parts) for name, parts in bnb.quantised([*saved, "norm.weight"], "f").items()} == {
        NAME: sorted(saved)
    }

    matrix, form = bnb.read(saved, NAME, "model.safetensors")
    got = dequantise(jax.tree.map(jnp.asarray, matrix), form.dtype)
    assert bits(got) == bits(functional.dequantize_4bit(packed, state))
    written = bnb.write(NAME, jax.tree.map(jnp.asarray, matrix), form)
    assert [*written] == [*saved]
    for name, array in saved.items():
        assert (written[name].dtype, written[name].shape) == (array.dtype, array.shape), name
        assert bits(written[name]) == bits(array), name


def test_it_loads_what_is_newly_quantised_here(torch, functional):
    _, w = weights(torch, (96, 256), "bfloat16")
    made = nf4.quantise(w)
    parts = {
        name.removeprefix(NAME + "."): torch.from_numpy(array.copy())
        for name, array in bnb.write(NAME, made, bnb.Form()).items()
    }
    packed = parts.pop(NAME)
    got = functional.dequantize_4bit(packed, functional.QuantState.from_dict(parts, device="cpu"))
    assert bits(got) == bits(dequantise(jax.tree.map(jnp.asarray, made), "bfloat16"))


# --- refusals, without bitsandbytes -----------------------------------------------------------------------------------


def file(double_quant=True):
    w = np.random.default_rng(0).normal(size=(16, 128)).astype(np.float32)
    return bnb.write(NAME, nf4.quantise(w, double_quant), bnb.Form())


def with_fields(**changes):
    """A file whose JSON has these fields changed; None: left out."""
    tensors = file()
    fields = json.loads(tensors[NAME + bnb.STATE].tobytes()) | changes
    text = json.dumps({key: value for key, value in fields.items() if value is not None})
    return tensors | {NAME + bnb.STATE: np.frombuffer(text.encode(), np.uint8)}


def with_text(text):
    return file() | {NAME + bnb.STATE: np.frombuffer(text, np.uint8)}


def with_tensor(suffix, change, double_quant=True):
    tensors = file(double_quant)
    return tensors | {NAME + suffix: change(tensors[NAME + suffix])}


def nan_at_0(array):
    array = array.copy()
    array[0] = np.nan
    return array


def test_both_maps_and_the_offset_are_the_file_s():
    tensors = with_fields(nested_offset=0.25)
    own = {".quant_map": np.linspace(-1, 1, 16), ".nested_quant_map": np.linspace(-0.5, 1, 256)}
    tensors |= {NAME + suffix: values.astype(np.float32) for suffix, values in own.items()}
    matrix, form = bnb.read(tensors, NAME, "model.st")
    assert matrix.offset == np.float32(0.25)
    assert bits(matrix.codebook) == bits(tensors[NAME + ".quant_map"])
    assert bits(matrix.absmax_map) == bits(tensors[NAME + ".nested_quant_map"])
    written = bnb.write(NAME, matrix, form)
    assert {name: bits(array) for name, array in written.items()} == {name: bits(a) for name, a in tensors.items()}


REFUSED = {
    "fp4": (lambda: with_fields(quant_type="fp4"), r'nf4: quant_type: wanted "nf4", got "fp4"'),
    "blocksize": (lambda: with_fields(blocksize=128), "nf4: blocksize: wanted 64, got 128"),
    "bool": (lambda: with_fields(blocksize=64.0), "nf4: blocksize: wanted 64, got 64.0"),
    "nested": (lambda: with_fields(nested_blocksize=128), "nf4: nested_blocksize: wanted 256, got 128"),
    "nested_dtype": (lambda: with_fields(nested_dtype="float16"), "nf4: nested_dtype: wanted .*float32.*, got .*float16"),
    "dtype": (lambda: with_fields(dtype="int8"), 'nf4: dtype: wanted .*, got "int8"'),
    "unknown": (lambda: with_fields(outliers=[1]), "nf4: unknown fields outliers"),
    "half": (lambda: with_fields(nested_offset=None), "nf4: lacks nested_offset"),
    "lacks": (lambda: with_fields(shape=None), "nf4: lacks shape"),
    "vector": (lambda: with_fields(shape=[2048]), r"nf4: shape: wanted \[outputs, inputs\], got \[2048\]"),
    "offset": (lambda: with_fields(nested_offset=float("nan")), "nf4: nested_offset: wanted a finite number, got NaN"),
    "text": (lambda: with_fields(nested_offset="0.1"), "nf4: nested_offset: wanted a finite number"),
    "inputs": (lambda: with_fields(shape=[64, 32]), f"model.st: {NAME}: NF4 has blocks of 64 .* got 32 inputs"),
    "no JSON": (lambda: with_text(b"\xff{"), "nf4: is not JSON"),
    "list": (lambda: with_text(b"[]"), "nf4: wanted a JSON object"),
    "twice": (lambda: with_text(b'{"dtype": "float32", "dtype": "float16"}'), "nf4: is not JSON: a field stands twice among dtype, dtype"),
    "short": (lambda: with_tensor("", lambda a: a[:-1]), r"weight: wanted uint8 \[1024, 1\], got uint8 \[1023, 1\]"),
    "int8": (lambda: with_tensor("", lambda a: a.view(np.int8)), "weight: wanted bytes, .* got int8"),
    "absmax": (lambda: with_tensor(".absmax", lambda a: a[:-1]), r"absmax: wanted uint8 \[32\], got uint8 \[31\]"),
    "absmax float": (lambda: with_tensor(".absmax", lambda a: a.astype(np.float32)), "absmax: wanted uint8 .* got float32"),
    "map": (lambda: with_tensor(".quant_map", lambda a: a[:8]), r"quant_map: wanted float32 \[16\], got float32 \[8\]"),
    "nan": (lambda: with_tensor(".nested_absmax", nan_at_0), "nested_absmax: holds NaN"),
    "plain nan": (lambda: with_tensor(".absmax", nan_at_0, False), "absmax: holds NaN"),
    "nested map": (lambda: with_tensor(".nested_quant_map", lambda a: a[1:]), r"nested_quant_map: wanted float32 \[256\]"),
    "missing": (lambda: {k: v for k, v in file().items() if k != NAME + ".nested_absmax"}, "nested_absmax: is missing"),
    "no state": (lambda: {k: v for k, v in file().items() if k != NAME + bnb.STATE}, "nf4: is missing"),
    "extra": (lambda: file() | {NAME + bnb.STATE: file(False)[NAME + bnb.STATE]}, "no nested_offset, but there is .*nested_absmax"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_as_it_should_be_is_refused_by_file_and_tensor(fault):
    tensors, message = REFUSED[fault]
    with pytest.raises(UserError, match=message) as caught:
        bnb.read(tensors(), NAME, "model.st")
    assert str(caught.value).startswith(f"model.st: {NAME}")


def test_folders_in_8_bits_or_fp4_or_in_part_are_refused_by_name():
    names = [*file()]
    assert bnb.quantised(["lm_head.weight"], "dir") == {}
    cases = {
        r"q_proj\.SCB: weights in 8 bits": [*names, "q_proj.weight", "q_proj.SCB"],
        "weights quantised as bitsandbytes__fp4, and only NF4": [*names, "x.weight.quant_state.bitsandbytes__fp4"],
        r"nf4 is there, but not .*weight\.quant_map": [n for n in names if not n.endswith(".quant_map")],
        r"weight\.absmax is there, but no .*nf4": [n for n in names if not n.endswith(bnb.STATE)],
    }
    for message, there in cases.items():
        with pytest.raises(UserError, match=message) as caught:
            bnb.quantised(there, "dir")
        assert str(caught.value).startswith("dir: ")
