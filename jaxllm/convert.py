"""`python -m jaxllm.convert from-hf SRC DST` and `to-hf CKPT DST`: a Hugging Face folder to a checkpoint, and back.

Conversion runs on the CPU backend unless JAX_PLATFORMS says otherwise: it needs host memory, not an accelerator's. What
is missing or damaged is reported before DST is made, DST appears when it is complete, and one that exists is refused.

Dtypes: by default both directions keep what they find, so that from-hf followed by to-hf gives the same bytes. A
checkpoint of a training run holds float32 masters; say --dtype bfloat16 for the usual half-sized export.

Adapters: a checkpoint of a LoRA run becomes a PEFT folder, always float32; or with --merge a model, in which they are added to their base, the original one or
what they were trained on (4 bits made floats again). from-hf --adapter adds those of a PEFT folder to the model that it reads.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from jaxllm.section import UserError


def from_hf(source: str, destination, dtype: str | None = None, adapter: str | None = None) -> None:
    """Hugging Face folder (or hub name) -> params-only checkpoint with the tokenizer's files. dtype: of all arrays;
    None: that of the folder's tensors, float32 where they differ. NaN is a warning here. adapter: PEFT folder to be merged in."""
    import jax

    from jaxllm import checkpoint, hf, peft
    from jaxllm.config import dump, load_config
    from jaxllm.hub import resolve_model_path
    from jaxllm.models import FAMILIES
    from jaxllm.sharding import MeshConfig, make_mesh
    from jaxllm.state import declare

    destination = _free(destination)
    folder, revision = resolve_model_path(source)
    hf.read_config(folder)  # says more about folders that cannot be read than the run's config does
    model = hf.ModelFolder(folder)
    dtype = dtype or model.dtype
    origin = {"path": source} | ({"revision": revision} if revision else {})
    config = load_config(None, *(f"model.{key}={json.dumps(text, ensure_ascii=False)}" for key, text in origin.items()))
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        wanted = {
            path: jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding)
            for path, array in declare(config.model, config.precision, config.attention, config.moe).params.items()
        }
        weights = FAMILIES[config.model.family].hf_weights(config.model)
        found = None if adapter is None else peft.read(adapter, weights, wanted)
        params = hf.load_params(model, weights, wanted, on_nan="warn")
    if found is not None:
        settings, arrays = found
        params, count = peft.merge_params(params, arrays, settings.scale)
        print(f"{count} matrices of {source} have the adapters of {adapter} merged in (scale {settings.scale:g})")
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    try:
        checkpoint.save_params(partial, params, dump(config))
        hf.copy_tokenizer(folder, partial)
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_hf(source, destination, dtype: str | None = None, merge: str | None = None) -> None:
    """Checkpoint (a step's folder, or a run's: its newest step) -> Hugging Face folder; of adapters a PEFT folder, or with `merge` ("original" or
    "dequantised", the base that they are added to) a model. dtype: of all tensors; None: that of the checkpoint's parameters, or of the base's."""
    from jaxllm import checkpoint, hf, peft
    from jaxllm.config import load_config
    from jaxllm.models import FAMILIES

    destination = _free(destination)
    found = checkpoint.find(source)
    config = load_config(found / "config.toml", resolve_path=False)
    family = FAMILIES[config.model.family]
    params, _ = checkpoint.load_params(found)
    has_adapters = config.lora.rank is not None
    if merge and not has_adapters:
        raise UserError(f"--merge: {found} holds no adapters but a whole model; leave it out")
    if has_adapters and not merge:
        if dtype not in (None, "float32"):
            raise UserError(
                f"--dtype: {dtype}, but adapters are written as float32, which PEFT keeps them in; leave it out"
            )
        peft.write(destination, family.hf_weights(config.model), config.lora, params, config.model.path or "")
        return
    if merge:
        params, dtype = merged(config, found, params, merge, dtype)
    dtypes = {str(array.dtype) for array in params.values()}
    hf.save_folder(
        params,
        family.hf_weights(config.model),
        family.config_to_hf(config.model),
        destination,
        dtype=dtype or (dtypes.pop() if len(dtypes) == 1 else "float32"),
        tokenizer_folder=_tokenizer_folder(config, found),
    )


def _tokenizer_folder(config, found: Path) -> Path | None:
    from jaxllm import checkpoint
    from jaxllm.hub import resolve_model_path

    trained = found.parents[1] / "tokenizer" if found.parent.name == checkpoint.FOLDER else found
    places = [Path(p) for p in (config.data.tokenizer, trained, found, config.model.path) if p]
    places = [p.parent if p.is_file() else p for p in places]
    if (
        config.model.path and not Path(config.model.path).is_dir()
    ):  # a hub name: its files are in huggingface_hub's cache
        places.append(resolve_model_path(config.model.path, config.model.revision)[0])
    tokenizer = next((p for p in places if (p / "tokenizer.json").is_file()), None)
    if tokenizer is None:
        print("no tokenizer was found beside the checkpoint; the folder is written without one")
    return tokenizer


def merged(config, found: Path, adapters: dict, onto: str, dtype: str | None = None) -> tuple[dict, str]:
    """({path: numpy array} of the model with `adapters` added to its "original" or "dequantised" base in float32, rounded once, their dtype). UserError where
    the base is not the one that the checkpoint `found` names. Prints how many matrices were merged, and how far the logits of what is written are from those
    that were trained. Host memory: the base in its form, what is written, and a matrix."""
    import jax
    import numpy as np

    from jaxllm import checkpoint, frozen, hf, peft, step, weights
    from jaxllm.attention import AttentionConfig
    from jaxllm.hub import resolve_model_path
    from jaxllm.lora import NO_ADAPTERS
    from jaxllm.models import FAMILIES
    from jaxllm.moe import MoEConfig
    from jaxllm.sharding import MeshConfig, make_mesh

    where, table = config.model.path, FAMILIES[config.model.family].hf_weights(config.model)
    # What this machine can compute, whatever the run asked of its own: the weights are the same.
    precision = config.precision.model_copy(update={"compute": "float32", "matmul": "compute", "param": "float32"})
    here = {"precision": precision, "attention": AttentionConfig(), "moe": MoEConfig(router=config.moe.router)}
    config = config.model_copy(update=here)
    whole = config.model_copy(update={"lora": NO_ADAPTERS})
    count = min(64, config.model.longest_row)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, count)).astype(np.int32)
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        logits = lambda graphdef, *held: np.asarray(step.logits(graphdef, step.TrainState(None, *held, {}, ()), tokens))
        declared, plain = weights.declare(config), weights.declare(whole)
        base = weights.load_frozen(config, declared)
        saved, now = checkpoint.meta(found).get("base"), weights.checksum(base)
        if saved is not None and saved["checksum"] != now:
            raise UserError(
                f"{where}: not the weights that these adapters were trained on (checksum {saved['checksum']}, and here {now}); "
                + (
                    f"bring back {saved['path']}"
                    if where
                    else "random weights are those of one JAX version and kind of device"
                )
            )
        trained = logits(declared.graphdef, adapters, base)
        base = frozen.joined(base)
        if onto == "original":
            del base
            dtype_found = _original_dtype(where and resolve_model_path(where, config.model.revision)[0])
            in_dtype = lambda like: jax.ShapeDtypeStruct(like.shape, dtype_found, sharding=like.sharding)
            wanted = plain._replace(params={path: in_dtype(like) for path, like in plain.params.items()})
            base, _ = weights.load(whole, wanted)
            dtype = dtype or dtype_found
        else:
            dtype = dtype or config.lora.frozen_dtype
        dequantised = jax.jit(frozen.dequantised, static_argnums=1)
        floats, added, left = {}, 0, set(adapters)
        for path, like in plain.params.items():
            weight, num_leading = base.pop(path), table[path].name.count("{")
            ab = [name for name in peft.paths(path) if name in adapters] if path in peft.targets(table) else []
            out = np.empty(like.shape, np.dtype(dtype))
            for at in np.ndindex(*like.shape[:num_leading]):
                one = jax.tree.map(lambda x, at=at: x[at], weight)
                matrix = np.asarray(dequantised(one, like.shape[num_leading:]))
                if ab:
                    matrix = peft.merge(matrix, *(adapters[name][at] for name in ab), config.lora.scale)
                    added += 1
                out[at] = hf.cast(matrix, out.dtype, path)
            floats[path], left = out, left - {*ab}
        if left:
            raise UserError(f"{found}: the model has no weights for {', '.join(sorted(left))}")
        written = logits(plain.graphdef, floats, {})
    named = f"the original weights of {where}"
    if onto == "dequantised":
        named = f"{where} as it was trained on ({config.lora.base}, made floats again)"
    apart = np.abs(written - trained)
    print(
        f"{added} matrices merged into {named}, as {dtype}. On {count} random tokens its logits (in float32) differ from those of base and adapters as trained "
        f"by at most {apart.max():.3g}, by {np.sqrt((apart**2).mean()):.3g} in root mean square; their standard deviation is {trained.std():.3g}"
    )
    return floats, dtype


def _original_dtype(source: Path | None) -> str:
    """Of the weights in `source` (None: random ones). UserError where they are not the original ones."""
    from jaxllm import hf

    if source is None or not (source / "config.json").is_file():
        return "float32"
    if "quantization_config" in json.loads((source / "config.json").read_text(encoding="utf-8")):
        raise UserError(
            f"--merge: original: {source} is itself in 4 bits, so the original weights are not there; say --merge dequantised"
        )
    return str(hf.ModelFolder(source).dtype)


def _free(destination) -> Path:
    destination = Path(destination).absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: already exists, and nothing is written over it. Give another name.")
    return destination


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxllm.convert", description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = {}
    for name, function, source, text in (
        ("from-hf", from_hf, "SRC", "Hugging Face folder (or owner/model on the hub) to a checkpoint"),
        (
            "to-hf",
            to_hf,
            "CKPT",
            "checkpoint, or a run's newest one, to a Hugging Face folder, or of adapters to a PEFT folder",
        ),
    ):
        command = made[name] = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", metavar=source)
        command.add_argument("destination", metavar="DST", help="must not exist, or be an empty folder")
        command.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="of all tensors written (default: as they are)"
        )
        command.set_defaults(function=function)
    made["from-hf"].add_argument("--adapter", metavar="DIR", help="PEFT folder to be merged in")
    made["to-hf"].add_argument(
        "--merge",
        choices=("original", "dequantised"),
        help="add adapters to their base and write a model: to the original weights, or to those that they were trained on, made floats again",
    )
    options = vars(parser.parse_args(arguments))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("jaxllm").setLevel(logging.INFO)
    function, destination = options.pop("function"), options["destination"]
    del options["command"]
    try:
        function(**options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fault: {destination} was not written: {error}", file=sys.stderr)
        return 1
    print(f"wrote {destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
