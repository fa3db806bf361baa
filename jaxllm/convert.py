"""`python -m jaxllm.convert from-hf SRC DST` and `to-hf CKPT DST`: a Hugging Face folder to a checkpoint, and back.

Conversion runs on the CPU backend unless JAX_PLATFORMS says otherwise: it needs host memory, not an accelerator's. What
is missing or damaged is reported before DST is made, DST appears when it is complete, and one that exists is refused.

Dtypes: by default both directions keep what they find, so that from-hf followed by to-hf gives the same bytes. A
checkpoint of a training run holds float32 masters; say --dtype bfloat16 for the usual half-sized export.
"""

import argparse
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from jaxllm.section import UserError


def from_hf(source: str, destination, dtype: str | None = None) -> None:
    """Hugging Face folder (or hub name) -> params-only checkpoint with the tokenizer's files. dtype: of all arrays;
    None: that of the folder's tensors, float32 where they differ. NaN is a warning here."""
    import jax

    from jaxllm import checkpoint, hf
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
            for path, array in declare(config.model, config.precision, config.attention, config.moe)[1].items()
        }
        weights = FAMILIES[config.model.family].hf_weights(config.model)
        params = hf.load_params(model, weights, wanted, on_nan="warn")
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    try:
        checkpoint.save_params(partial, params, dump(config))
        hf.copy_tokenizer(folder, partial)
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_hf(source, destination, dtype: str | None = None) -> None:
    """Checkpoint (a step's folder, or a run's: its newest step) -> Hugging Face folder. dtype: of all tensors;
    None: that of the checkpoint's parameters."""
    from jaxllm import checkpoint, hf
    from jaxllm.config import load_config
    from jaxllm.hub import resolve_model_path
    from jaxllm.models import FAMILIES

    destination = _free(destination)
    found = checkpoint.find(source)
    config = load_config(found / "config.toml", resolve_path=False)
    family = FAMILIES[config.model.family]
    params, _ = checkpoint.load_params(found)
    dtypes = {str(array.dtype) for array in params.values()}
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
    hf.save_folder(
        params,
        family.hf_weights(config.model),
        family.config_to_hf(config.model),
        destination,
        dtype=dtype or (dtypes.pop() if len(dtypes) == 1 else "float32"),
        tokenizer_folder=tokenizer,
    )


def _free(destination) -> Path:
    destination = Path(destination).absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: already exists, and nothing is written over it. Give another name.")
    return destination


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxllm.convert", description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, source, text in (
        ("from-hf", from_hf, "SRC", "Hugging Face folder (or owner/model on the hub) to a checkpoint"),
        ("to-hf", to_hf, "CKPT", "checkpoint, or a run's newest one, to a Hugging Face folder"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", metavar=source)
        command.add_argument("destination", metavar="DST", help="must not exist, or be an empty folder")
        command.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="of all tensors written (default: as they are)"
        )
        command.set_defaults(function=function)
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("jaxllm").setLevel(logging.INFO)
    try:
        options.function(options.source, options.destination, options.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fault: {options.destination} was not written: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
