"""Checkpoints: what a run needs to go on, written so that a kill at any moment leaves the one before whole.

    <output_dir>/checkpoints/<step>/
        state        flat dict {"params/layers/...": array, "opt_state/mu/...": array, "step": array}  (orbax)
        data         {"cursors": int64[global_batch_size, 2]}, where each lane of the data stands  (orbax)
        config.toml  the resolved configuration, readable as it is
        meta.json    format number, step, versions, parameter count, what frozen weights belong to it, and the size of every file

Orbax writes the arrays asynchronously, beside; one rename commits the folder when all of it, meta.json last, is there.
So a folder named by a number that holds a meta.json was complete once, and the sizes in it tell whether it still is.
Names come from attribute and dict keys, so a checkpoint outlives the classes of Flax and optax that held the arrays.

Chosen not to do: orbax's Checkpointer and its preservation policies. They take every folder named by a number for
their own and delete it; here a file is removed only if the meta.json beside it lists it, and nothing incomplete is ever
deleted unasked.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import secrets
import shutil
import socket
from typing import Annotated, Literal

import jax
import numpy as np
import pydantic

from jaxllm.section import Section, UserError

FORMAT = 1
FOLDER = "checkpoints"
MOST_NAMES = 20
"""A message lists at most so many leaves."""


class CheckpointConfig(Section):
    every: int = pydantic.Field(1000, ge=0)
    """Steps between checkpoints; one is also saved at the end and on a signal. 0: only then."""
    keep_last: int = pydantic.Field(2, ge=1)
    """So many of the newest checkpoints stay on disk."""
    keep_every: int = pydantic.Field(0, ge=0)
    """Checkpoints whose step is a multiple of this stay for good; 0: none."""
    resume: Literal["auto", "never"] | Annotated[int, pydantic.Field(ge=0)] = "auto"
    """"auto": go on from the newest complete checkpoint in output_dir, if any. "never": refuse a folder that has some.
    A step: that one."""
    export: Literal["float32", "bfloat16", "float16"] | None = None
    """After the last step, also write a Hugging Face folder with weights of this dtype: <output_dir>/export/<step>."""
    overwrite: bool = False
    """Remove the checkpoints of an earlier run in output_dir and start anew. Only files that jaxllm wrote are
    removed."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. Names the path, the cause and the last good step; a fault, not the user's
    mistake."""


# --- names ------------------------------------------------------------------------------------------------------------


def _names(keypaths) -> list[str]:
    """One name for each key path: attribute names and dict keys joined by "/". Tuple indices are dropped, because they
    change with every transformation added to an optax chain; leaves that would share a name keep theirs."""

    def join(keypath, indices: bool) -> str:
        keys = [k for k in keypath if indices or not isinstance(k, jax.tree_util.SequenceKey)]
        return "/".join(str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", None)))) for k in keys)

    short = [join(k, False) for k in keypaths]
    uses = collections.Counter(short)
    names = [s if uses[s] == 1 else join(k, True) for s, k in zip(short, keypaths, strict=True)]
    assert len(set(names)) == len(names), (
        f"two leaves share a name: {sorted(n for n in names if names.count(n) > 1)[:4]}"
    )
    return names


def flatten(state) -> dict:
    """{name: leaf} of any pytree; of a TrainState: "params/layers/self_attn/q_proj/kernel", "opt_state/mu/layers/...",
    "step"."""
    keypaths, leaves = zip(*jax.tree_util.tree_flatten_with_path(state)[0], strict=True)
    return dict(zip(_names(keypaths), leaves, strict=True))


def unflatten(flat: dict, like):
    """The pytree shaped as `like` with the leaves of `flat`, the inverse of `flatten`. KeyError when a name is
    missing."""
    keypaths = [k for k, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in _names(keypaths)])


# --- one folder -------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    packages = {"jaxllm": "jaxllm", "jax": "jax", "flax": "flax", "orbax": "orbax-checkpoint"}
    return {name: version(package) for name, package in packages.items()} | {"python": platform.python_version()}


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commit(partial: pathlib.Path, final: pathlib.Path, meta: dict, config_text: str) -> None:
    """Adds config.toml and meta.json to what orbax wrote in `partial`, then renames it to `final`: from then on it
    exists."""
    (partial / "config.toml").write_text(config_text, encoding="utf-8")
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    meta = {"format": FORMAT, **meta, "versions": _versions(), "files": files}
    (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    for written in (partial / "config.toml", partial / "meta.json", partial):
        _sync(written)
    if final.exists() and any(final.iterdir()):
        _set_aside(final)
    os.rename(partial, final)
    _sync(final.parent)


def _beside(final: pathlib.Path) -> pathlib.Path:
    """The name under which `final` is written until it is complete; no two saves share one, not even across runs."""
    return final.with_name(f"{final.name}.partial-{_agree(secrets.randbits(31)):08x}")


def _set_aside(path: pathlib.Path) -> None:
    names = (path.with_name(f"{path.name}.replaced-{n}") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    os.rename(path, aside)
    print(f"checkpoint: {path} is not continued; it was renamed to {aside.name} and kept", flush=True)


def _read_meta(path: pathlib.Path) -> dict | None:
    """meta.json of a folder; None where there is none, {"unreadable": reason} where it is not what _commit writes. Its
    list of files decides what is removed, so names that lead out of the folder are refused."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        return {"unreadable": str(error)}
    if isinstance(meta, dict) and isinstance(meta.get("format"), int) and meta["format"] > FORMAT:
        return meta | {"unreadable": "its format is newer"}
    if not (isinstance(meta, dict) and isinstance(meta.get("format"), int) and isinstance(meta.get("files"), dict)):
        return {"unreadable": "it has no format number or no list of files"}
    if any(name.startswith("/") or ".." in name.split("/") for name in meta["files"]):
        return {"unreadable": "its list of files leads out of the folder"}
    return meta


def _damage(path: pathlib.Path, meta: dict) -> str | None:
    """What a committed folder lacks against the list in its meta.json. Empty files may be absent: object stores drop
    them."""
    if "unreadable" in meta:
        return f"meta.json cannot be read ({meta['unreadable']})"
    for name, size in meta["files"].items():
        file = path / name
        if not file.is_file():
            if size:
                return f"{name} is missing"
        elif file.stat().st_size != size and name != "config.toml":  # a note added to config.toml harms nobody
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def _open(path: pathlib.Path, advice: str) -> dict:
    """meta.json of a folder that can be restored from; UserError when it is absent, damaged or of a newer format."""
    meta = _read_meta(path)
    if meta is None:
        raise UserError(f"{path}: no complete checkpoint here (there is no meta.json); {advice}")
    if meta.get("format", FORMAT) > FORMAT:
        raise UserError(
            f"{path}: checkpoint format {meta['format']} is newer than format {FORMAT}, the newest this jaxllm reads; "
            f"written by {_listed(meta.get('versions', {}))}, running {_listed(_versions())}. Update jaxllm"
        )
    damage = _damage(path, meta)
    if damage:
        raise UserError(
            f"{path}: this checkpoint was complete and is damaged: {damage}. Bring the file back, or {advice}"
        )
    marker = path / "orbax.checkpoint"  # orbax's own, empty: the only file it insists on that a copy may have lost
    if "orbax.checkpoint" in meta["files"] and not marker.exists() and jax.process_index() == 0:
        marker.touch()
    return meta


def _listed(versions: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown versions"


def _remove(path: pathlib.Path) -> None:
    """Removes the files that the folder's meta.json lists, and the directories this empties; anything else stays where
    it is. The new name comes first and meta.json goes last, so a removal that is cut short neither looks complete nor
    is forgotten."""
    meta = _read_meta(path)
    if meta is None or "unreadable" in meta:
        return
    if path.suffix != ".removing":
        path = path.rename(path.with_name(path.name + ".removing"))
    for name in meta["files"]:
        (path / name).unlink(missing_ok=True)
    (path / "meta.json").unlink()
    for folder in sorted((f for f in path.rglob("*") if f.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    with contextlib.suppress(OSError):
        path.rmdir()


def _scan(folder: pathlib.Path) -> tuple[dict[int, dict], dict[str, str]]:
    """({step: meta} of committed steps in ascending order, {name: reason} of folders that were begun and never
    finished)."""
    committed, unfinished = {}, {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            continue
        if re.fullmatch(r"\d+", path.name):
            meta = _read_meta(path)
            if meta is None:
                unfinished[path.name] = "it has no meta.json, which is written last"
            else:
                committed[int(path.name)] = meta
        elif re.fullmatch(r"\d+\.partial-.*", path.name):
            unfinished[path.name] = "its save was cut short"
    return dict(sorted(committed.items())), unfinished


def _save_arrays(path: pathlib.Path, items: dict):
    from orbax.checkpoint import v1 as ocp

    return ocp.save_checkpointables_async(path, items)


def _stored(path: pathlib.Path) -> dict[str, dict]:
    """{item: {name: .shape, .dtype}} of what orbax wrote into a step's folder."""
    from orbax.checkpoint import v1 as ocp

    with _reading(path):
        return ocp.checkpointables_metadata(path).metadata


def _load_arrays(path: pathlib.Path, items: dict, partial: bool = False) -> dict:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.pytree_options.loading.partial_load = partial
    with _reading(path), context:
        return ocp.load_checkpointables(path, items)


@contextlib.contextmanager
def _reading(path: pathlib.Path):
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: this checkpoint cannot be read: {type(error).__name__}: {error}") from error


def _check_leaves(path: pathlib.Path, meta: dict, stored: dict, wanted: dict, dtypes: bool) -> None:
    """UserError that lists the leaves missing in the checkpoint, unexpected there, or of another shape (with `dtypes`:
    or dtype)."""
    problems = [f"missing: {name}" for name in wanted if name not in stored]
    problems += [f"unexpected: {name}" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        ours, theirs = wanted[name], stored[name]
        if tuple(ours.shape) != tuple(theirs.shape):
            problems.append(
                f"shape: {name} is {tuple(theirs.shape)} in the checkpoint, {tuple(ours.shape)} in this configuration"
            )
        elif dtypes and np.dtype(ours.dtype) != np.dtype(theirs.dtype):
            problems.append(
                f"dtype: {name} is {theirs.dtype} in the checkpoint, {np.dtype(ours.dtype)} in this configuration"
            )
    if problems:
        more = f"\n  and {len(problems) - MOST_NAMES} more" if len(problems) > MOST_NAMES else ""
        raise UserError(
            f"{path}: the checkpoint does not fit this configuration; {len(problems)} leaves differ:\n  "
            + "\n  ".join(sorted(problems)[:MOST_NAMES])
            + f"{more}\nwritten by {_listed(meta.get('versions', {}))}\nrunning    {_listed(_versions())}\n"
            "Restore the settings of its config.toml, or start another output_dir from its weights alone"
        )


def _agree(value: int) -> int:
    """Process 0's value on every process, so that all act on one reading of the disk."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _everyones_cursors(cursors: np.ndarray) -> np.ndarray:
    """int64[global_batch_size, 2] in which every row is known, from one in which each process filled the rows it
    serves (others -1)."""
    cursors = np.array(cursors, np.int64)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        halves = multihost_utils.process_allgather(cursors.view(np.int32))  # int64 would lose its upper half on the way
        cursors = np.ascontiguousarray(halves).view(np.int64).max(axis=0)
    assert cursors.ndim == 2 and cursors.shape[1] == 2 and (cursors >= 0).all(), (
        "a lane whose position no process knows"
    )
    return cursors


# --- a run's checkpoints ----------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run. Every process makes one and calls it alike; process 0 does what must be done once."""

    def __init__(self, folder: str | os.PathLike, config: CheckpointConfig):
        """`folder`: <output_dir>/checkpoints, created at once so that a folder that cannot be written is known before
        training."""
        self.folder = pathlib.Path(folder).absolute()
        self.config = config
        self.last_saved: int | None = None
        """The newest step known to be complete on disk: restored from, or saved and committed."""
        self._pending: tuple[int, concurrent.futures.Future] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        _make_folder(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def latest(self) -> int | None:
        """The newest complete step, None when there is none. Unfinished saves are named in a printed line and passed
        over. UserError when the newest was complete and is damaged: to go back further than asked is for the user to
        decide."""
        committed, unfinished = _scan(self.folder)
        if jax.process_index() == 0:
            for name, reason in unfinished.items():
                print(
                    f"checkpoint: {self.folder / name} is incomplete ({reason}); it is passed over and left as it is",
                    flush=True,
                )
        newest = _agree(max(committed, default=-1))
        if newest >= 0:
            _open(self.folder / str(newest), self._advice(committed, newest))
        return None if newest < 0 else newest

    def restore(self, step: int, abstract_state, leave: str | None = None):
        """(state, cursors int64[global_batch_size, 2], text of the saved config.toml) of `step`.

        `abstract_state`: the state as jax.ShapeDtypeStruct with .sharding; the arrays come with these shardings,
        whatever mesh they were saved on, and bit by bit as saved. UserError when the step is absent, damaged, of a
        newer format, or its leaves differ. leave: leaves whose names begin so stay in the checkpoint; the state asked for has
        none of them.
        """
        path = self.folder / str(step)
        meta = _open(path, self._advice(_scan(self.folder)[0], step))
        stored, wanted = _stored(path), flatten(abstract_state)
        kept = {n: leaf for n, leaf in stored["state"].items() if leave is None or not n.startswith(leave)}
        _check_leaves(path, meta, kept, wanted, dtypes=True)
        lanes = stored["data"]["cursors"]
        loaded = _load_arrays(
            path,
            {"state": wanted, "data": {"cursors": np.empty(lanes.shape, lanes.dtype)}},
            partial=len(kept) < len(stored["state"]),
        )
        self.last_saved = step
        text = (path / "config.toml").read_text(encoding="utf-8")
        return unflatten(loaded["state"], abstract_state), loaded["data"]["cursors"], text

    def told(self, step: int) -> dict:
        """{"data_fingerprint", "base"} as `save` was told them at `step`; None where it was not."""
        meta = _open(self.folder / str(step), self._advice(_scan(self.folder)[0], step))
        return {name: meta.get(name) for name in ("data_fingerprint", "base")}

    def set_aside_after(self, step: int) -> None:
        """Renames every later step, so that a run resumed at an earlier one is not overtaken by the steps it leaves
        behind."""
        if jax.process_index() == 0:
            for later in _scan(self.folder)[0]:
                if later > step:
                    _set_aside(self.folder / str(later))

    def save(
        self,
        step: int,
        state,
        cursors: np.ndarray,
        config_text: str,
        data_fingerprint: str | None = None,
        base: dict | None = None,
    ) -> None:
        """Begins to save `step` and returns as soon as the arrays are copied from the devices: `state` may be donated
        at once.

        base: what frozen weights, which are not saved, are known by; `told` gives it back.
        `cursors`: int64[global_batch_size, 2], >= 0 in the rows whose lanes this process serves, -1 in the others. An
        earlier save is awaited first; SaveError when it failed, or when this one cannot begin. A step that is already
        on disk is not written twice.
        """
        self.wait()
        if step == self.last_saved:
            return
        flat = flatten(state)
        meta = {"step": step, "parameters": sum(int(a.size) for n, a in flat.items() if n.startswith("params/"))}
        meta |= {"data_fingerprint": data_fingerprint, "base": base}
        partial = _beside(self.folder / str(step))
        try:
            if not self.folder.is_dir():
                raise NotADirectoryError(f"{self.folder} is no longer a folder")
            response = _save_arrays(partial, {"state": flat, "data": {"cursors": _everyones_cursors(cursors)}})
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        self._pending = (
            step,
            self._thread.submit(self._finish, response, partial, step, meta, config_text, jax.process_index() == 0),
        )

    def close(self) -> None:
        """Waits for the save under way; SaveError when it failed. May be called twice."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def wait(self) -> None:
        """Waits for the save under way, if any; SaveError when it failed."""
        if self._pending:
            (step, future), self._pending = self._pending, None
            try:
                future.result()
            except Exception as error:
                raise self._failed(step, error) from error

    def _finish(self, response, partial, step: int, meta: dict, config_text: str, first_process: bool) -> None:
        response.result()
        if first_process:
            _commit(partial, self.folder / str(step), meta, config_text)
        self.last_saved = step
        if first_process:
            try:
                self._rotate(step)
            except OSError as error:  # the new checkpoint is safe; a full disk will say so at the next one
                print(f"checkpoint: an old checkpoint could not be removed: {error}", flush=True)

    def _rotate(self, newest: int) -> None:
        """Removes complete steps that no rule keeps, older than the one just committed; and what an earlier removal
        left half done."""
        for path in self.folder.glob("*.removing"):
            _remove(path)
        whole = [
            s for s, meta in _scan(self.folder)[0].items() if s <= newest and not _damage(self.folder / str(s), meta)
        ]
        for step in whole[: -self.config.keep_last]:
            if not (self.config.keep_every and step % self.config.keep_every == 0):
                _remove(self.folder / str(step))

    def _failed(self, step: int, error: Exception) -> SaveError:
        last = "no earlier step of this run is on disk"
        if self.last_saved is not None:
            last = f"the last good step is {self.last_saved} ({self.folder / str(self.last_saved)})"
        return SaveError(
            f"checkpoint of step {step} was not saved to {self.folder}: {type(error).__name__}: {error}; {last}. "
            "Mend the folder or make room, then run the same command again"
        )

    @staticmethod
    def _advice(committed, step: int) -> str:
        others = [str(s) for s in committed if s != step]
        return (
            f"set checkpoint.resume to one of these steps: {', '.join(others)}" if others else "use another output_dir"
        )


# --- weights alone ----------------------------------------------------------------------------------------------------


def save_params(folder: str | os.PathLike, params: dict, config_text: str) -> None:
    """Writes a params-only checkpoint, {path: array} and the configuration, and waits for it. UserError when `folder`
    has content."""
    folder = pathlib.Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; give another name, or remove it")
    _make_folder(folder.parent)
    partial = _beside(folder)
    flat = {f"params/{name}": array for name, array in params.items()}
    _save_arrays(partial, {"state": flat}).result()
    if jax.process_index() == 0:
        _commit(partial, folder, {"step": None, "parameters": sum(int(a.size) for a in flat.values())}, config_text)


def load_params(folder: str | os.PathLike, abstract: dict | None = None) -> tuple[dict, str]:
    """({path: array}, config.toml's text) from a params-only checkpoint, a step's folder, or a run's newest complete
    step.

    `abstract`: {path: jax.ShapeDtypeStruct with .sharding}, which also sets the dtype (the arrays are cast as they are
    read); None: numpy arrays as saved. Only the parameters are read. UserError when nothing is found, or names or
    shapes differ from `abstract`.
    """
    path = find(folder)
    meta = _open(path, "give the folder of another step")
    stored = {n.removeprefix("params/"): leaf for n, leaf in _stored(path)["state"].items() if n.startswith("params/")}
    if abstract is None:
        abstract = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
    _check_leaves(path, meta, stored, abstract, dtypes=False)
    loaded = _load_arrays(path, {"state": {f"params/{name}": leaf for name, leaf in abstract.items()}}, partial=True)
    params = {name: loaded["state"][f"params/{name}"] for name in abstract}
    return params, (path / "config.toml").read_text(encoding="utf-8")


def meta(folder: str | os.PathLike) -> dict:
    """meta.json of a checkpoint's folder, checked."""
    return _open(pathlib.Path(folder), "give the folder of another step")


def find(folder: str | os.PathLike) -> pathlib.Path:
    """The folder with meta.json that `folder` means: itself, or the newest step of a run's folder. UserError when
    there is none."""
    folder = pathlib.Path(folder).absolute()
    if (folder / "meta.json").is_file():
        return folder
    for steps in (folder / FOLDER, folder):
        committed, _ = _scan(steps)
        if committed:
            return steps / str(_agree(max(committed)))
    raise UserError(
        f"{folder}: no checkpoint here; expected meta.json (a checkpoint) or {FOLDER}/<step>/meta.json (a run)"
    )


# --- the output folder ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """What an output folder holds before a run: its committed steps in order, and names that are not a run's."""

    steps: tuple[int, ...]
    foreign: tuple[str, ...]


def inspect(output_dir: str | os.PathLike, known: tuple[str, ...] = ()) -> Found:
    """Looks into output_dir and changes nothing; it may not exist yet. `known`: names in it, besides the checkpoints,
    that a run writes. UserError when it is a file."""
    output_dir = pathlib.Path(output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"output_dir: {output_dir} is a file; give the name of a folder")
    committed, _ = _scan(output_dir / FOLDER)
    names = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    foreign = sorted(names - {FOLDER, ".lock", *known})
    return Found(tuple(sorted(committed)), tuple(foreign))


def erase(output_dir: str | os.PathLike) -> None:
    """Removes the checkpoints of output_dir, finished, set aside or cut short (checkpoint.overwrite). Other files
    stay. Process 0 only."""
    folder = pathlib.Path(output_dir).absolute() / FOLDER
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.fullmatch(r"\d+\.partial-.*", path.name):
            shutil.rmtree(path)  # no list of its files exists yet, and the name is ours
        elif re.fullmatch(r"\d+(\.replaced-\d+|\.removing)*", path.name):
            _remove(path)


@contextlib.contextmanager
def lock(output_dir: str | os.PathLike):
    """Holds output_dir for this process (call it on process 0 only); the system lets go of it at exit or kill.
    UserError when another run has it, or when the folder cannot be written."""
    output_dir = pathlib.Path(output_dir).absolute()
    _make_folder(output_dir)
    try:
        file = open(output_dir / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 (closed by the `with` below)
    except OSError as error:
        raise UserError(f"output_dir: {output_dir} cannot be written: {error}; give another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"output_dir: {output_dir} is in use by {holder}; let that run end, stop it, or give another folder"
            ) from None
        except OSError as error:
            print(
                f"output_dir: this file system cannot lock ({error}); see to it that no second run writes here",
                flush=True,
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be made: {error.strerror}; give another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"output_dir: {folder} cannot be written by this user; give another folder")
