"""`python -m jaxllm.train --config F [section.key=value ...]`: train, fine-tune, go on.

The loop, read top to bottom. What can be known before compiling is checked before compiling, cheapest first: config, devices, output folder,
data, weights. Ctrl-C or SIGTERM ends the step in flight, saves and exits; the same command goes on from there.

Exit codes: 0 done, 1 fault, 2 bad input, 3 diverged, 4 interrupted with a checkpoint saved.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import signal
import sys
import traceback

from jaxllm.section import UserError

DONE, FAULT, BAD_INPUT, DIVERGED, INTERRUPTED = range(5)
RUN_FILES = ("checkpoints", "config.toml", "metrics.jsonl", "tokenizer", "tensorboard", "export")


class Diverged(Exception):
    """Too many steps in a row without a finite loss and gradient norm."""


class OutOfMemory(Exception):
    """A device ran out of memory; the message says what to change."""


class Interruption:
    """Turns the first SIGINT or SIGTERM into a flag that the loop reads between steps; a second one raises at once."""

    def __enter__(self):
        self.signal = None
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _on_signal(self, number, _):
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        # os.write and not print: the signal may have come in the middle of a print
        os.write(
            1,
            f"{self.signal}: the step in flight ends, then the run is saved; once more to stop without saving\n".encode(),
        )

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Replaced:
    """What checkpoint.overwrite gives up: set aside as one folder before the new run writes anything, put back if the new run does not come to
    train, and without its checkpoints from then on. Nothing else is ever removed."""

    def __init__(self, output: pathlib.Path):
        numbers = itertools.count(1)
        self.output, self.aside = output, next(p for n in numbers if not (p := output / f"replaced-{n}").exists())

    def __enter__(self):
        self.names = [name for name in RUN_FILES if (self.output / name).exists()]
        if self.names:
            self.aside.mkdir()
        for name in self.names:
            os.rename(self.output / name, self.aside / name)
        return self

    def give_up(self) -> None:
        from jaxllm import checkpoint

        if self.names:
            checkpoint.erase(self.aside)
            print(f"overwritten: the earlier run's other files are kept in {self.aside}", flush=True)
        self.names = []

    def __exit__(self, *_):
        for name in self.names:
            with contextlib.suppress(OSError):
                (self.output / name).rmdir()
            if (self.output / name).exists():  # what the new run began
                os.rename(self.output / name, self.aside / f"{name}.unfinished")
            os.rename(self.aside / name, self.output / name)
        if self.names:
            with contextlib.suppress(OSError):
                self.aside.rmdir()


def train(cfg) -> int:
    """Runs the config to its last step (or a signal) and returns the exit code."""
    import jax

    from jaxllm import attention, checkpoint, config, linear, moe, sharding, step, weights
    from jaxllm.data.batch import evaluation_sets, make_batches
    from jaxllm.metrics import Metrics, phase

    check_platform(cfg)
    config.check(cfg, jax.device_count())
    device = jax.devices()[0]
    print(
        f"jaxllm on {jax.device_count()} x {device.device_kind} ({device.platform}), {jax.process_count()} process(es)",
        flush=True,
    )
    output, text = pathlib.Path(cfg.output_dir), config.dump(cfg)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        if first:
            if not output.exists():
                stack.callback(remove_untouched, output)
            stack.enter_context(checkpoint.lock(output))
        start = starting_step(cfg)
        if start == cfg.steps:
            export_checkpoint(cfg, start)
            print(
                f"{output}: the checkpoint is at step {start} and steps = {cfg.steps}: nothing to do; raise steps, or use another output_dir",
                flush=True,
            )
            return DONE
        replaced = stack.enter_context(Replaced(output)) if first and cfg.checkpoint.overwrite else None
        interruption = stack.enter_context(Interruption())
        checkpoints = stack.enter_context(checkpoint.Checkpoints(output / checkpoint.FOLDER, cfg.checkpoint))
        checkpoints.latest()  # names unfinished saves
        mesh = sharding.make_mesh(cfg.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        print(f"mesh: {', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())}", flush=True)
        print(attention.describe(cfg.attention, cfg.model, cfg.precision.compute, cfg.data.seq_len), flush=True)
        print(linear.describe(cfg.precision, device.device_kind), flush=True)
        if options := step.compiler_options(cfg.precision):
            named = " ".join(f"{name}={str(value).lower()}" for name, value in options.items())
            print(f"XLA options: {named} (an option of the same name in XLA_FLAGS takes its place)", flush=True)
        if cfg.model.num_local_experts:
            shape = cfg.rows_per_microbatch, cfg.data.seq_len
            print(
                moe.describe(cfg.moe, cfg.model, *shape, cfg.precision.compute, cfg.precision.matmul, cfg.lora.kept),
                flush=True,
            )
        graphdef, abstract = step.abstract_state(cfg)
        print(memory_estimate(abstract, device), flush=True)

        with phase("reading the data"):
            cursors, new_scales = None, True
            if start is not None:
                state, cursors, new_scales = restore(cfg, checkpoints, start, abstract)
            if cfg.precision.matmul == "float8" and new_scales and cfg.precision.fp8.warmup_steps <= (start or 0):
                print(
                    f"FP8: scales start at 1, so the first step loses small numbers; precision.fp8.warmup_steps={(start or 0) + 10} would record "
                    f"magnitudes in {cfg.precision.compute} first",
                    flush=True,
                )
            batches = make_batches(cfg, cursors=cursors)
            stack.callback(batches.close)  # at once: a thread that is at work while Python ends takes the process down
            told = {} if start is None else checkpoints.told(start)
            if start is not None and batches.fingerprint != told["data_fingerprint"]:
                raise UserError(
                    f"data: the documents or the tokenizer are not those of the checkpoint at step {start}, whose position in the data would "
                    "mean nothing; bring them back, or start another output_dir with model.path set to this checkpoint"
                )
            if cfg.evaluation.prompt is not None and batches.tokenizer is None:
                raise UserError("evaluation.prompt: a tokenizer is needed to read it; set data.tokenizer")
            evaluation = evaluation_sets(cfg, batches) if cfg.evaluation.every else {}
        print(f"training on {batches.summary}", flush=True)
        unused = [f"evaluation.{name}" for name in ("path", "sets") if getattr(cfg.evaluation, name)]
        if unused and not cfg.evaluation.every:
            print(
                f"evaluation.every = 0: nothing is evaluated on {' and '.join(unused)}; set evaluation.every to steps between evaluations",
                flush=True,
            )
        for name, held_out in evaluation.items():
            print(f"evaluating on {f'{name}: ' if name else ''}{held_out.summary}", flush=True)
        base, source = None, f"loading weights from {cfg.model.path}" if cfg.model.path else "making random weights"
        with phase(source) if start is None or cfg.lora.rank is not None else contextlib.nullcontext():
            if start is None:
                graphdef, state = step.init_state(cfg)
            elif cfg.lora.rank is not None:
                state = dataclasses.replace(state, frozen=weights.load_frozen(cfg, abstract))
            if cfg.lora.rank is not None:
                base = {
                    "path": cfg.model.path,
                    "revision": cfg.model.revision,
                    "checksum": weights.checksum(state.frozen),
                }
                check_base(base, told.get("base"), start)
                print(lora_line(cfg, state), flush=True)
        if start is None:
            start = 0
        else:
            print(f"resuming from step {start}", flush=True)
            checkpoints.set_aside_after(start)
        run = Run(cfg, graphdef, state, batches, evaluation, checkpoints, text, interruption, base)
        run.compile(step, mesh, start)
        if replaced:
            replaced.give_up()
        if first:
            write_beside(output / "config.toml", text)
        if not start:
            run.show_sample("before", 0)
        log = Metrics(
            output,
            cfg.logging,
            total_steps=cfg.steps,
            start_step=start,
            flops_per_step=cfg.model.flops_per_token(cfg.data.seq_len, frozen=base is not None)
            * cfg.data.global_batch_size
            * cfg.data.seq_len,
            peak_flops=peak_flops(cfg, device),
        )
        with log:
            return run.loop(start, log)


def check_base(base, saved, start) -> None:
    """UserError where adapters were trained beside other frozen weights than these."""
    if saved is not None and saved["checksum"] != base["checksum"]:
        raise UserError(
            f"model.path: {base['path']!r} does not hold the weights that the adapters of step {start} were trained on: their checksum was {saved['checksum']} "
            f"({saved['path']!r}), and it is {base['checksum']}; give that folder, or start another output_dir with these"
        )


def lora_line(cfg, state) -> str:
    """What is trained, in a line."""
    lora, count = cfg.lora, sum(p.size for p in state.params.values())
    return (
        f"adapters: rank {lora.rank}, scale {lora.scale:g}, dropout {lora.dropout:g}, on {', '.join(lora.targets)}: {count:,} trained parameters; "
        f"frozen weights in {lora.base}"
    )


def restore(cfg, checkpoints, start, abstract):
    """(state without frozen weights, cursors, whether the FP8 state is new) of a checkpoint. One of a run that went over to FP8, or away from it, gets a new
    FP8 state, or none."""
    from jaxllm import config
    from jaxllm import state as states

    abstract = dataclasses.replace(abstract, frozen={})
    saved = config.load_config(checkpoints.folder / str(start) / "config.toml", resolve_path=False)
    if (saved.precision.matmul == "compute") == (cfg.precision.matmul == "compute"):
        return *checkpoints.restore(start, abstract)[:2], False
    state, cursors, _ = checkpoints.restore(start, dataclasses.replace(abstract, fp8={}), leave="fp8/")
    scales = states.initial_fp8(cfg.precision.fp8, abstract.fp8)
    return dataclasses.replace(state, fp8=scales), cursors, bool(scales)


class Run:
    """The parts of a run that the loop moves."""

    def __init__(self, cfg, graphdef, state, batches, evaluation, checkpoints, text, interruption, base):
        import jax

        self.base = base

        self.cfg, self.graphdef, self.state, self.batches = cfg, graphdef, state, batches
        self.evaluation, self.checkpoints, self.text, self.interruption = evaluation, checkpoints, text, interruption
        self.bad = 0
        self.alone = jax.process_count() == 1

    def compile(self, step, mesh, start):
        from jaxllm.data.batch import abstract_batch
        from jaxllm.metrics import phase

        cfg = self.cfg
        batch = abstract_batch(
            mesh, cfg.optimizer.num_microbatches, cfg.data.global_batch_size, cfg.data.seq_len, cfg.model.sliding_window
        )
        # While magnitudes are recorded for FP8 there is another step. Nothing is known of them at step 0, so what looks at the model there does not
        # multiply in FP8 either.
        fp8 = cfg.precision.matmul == "float8"
        before = step.recording(cfg) if fp8 else cfg
        recording = (step.abstract_state(before)[0], before) if fp8 else (self.graphdef, cfg)
        self.warmup = cfg.precision.fp8.warmup_steps if fp8 else 0

        def compiled(make, batch, last_step):
            """(what is used up to `last_step`, what is used then)."""
            ways = [recording] * (start < last_step) + [(self.graphdef, cfg)]
            made = [make(*way).lower(self.state, batch).compile() for way in ways]
            return made[0], made[-1]

        with phase("compiling the training step"):
            make = functools.partial(step.make_train_step, after_warmup=True)
            self.train_steps = compiled(make, batch, self.warmup)
        self.graphdefs = recording[0], self.graphdef
        if self.evaluation:
            batch = abstract_batch(mesh, 1, cfg.evaluation.batch_size, cfg.data.seq_len, cfg.model.sliding_window)
            with phase("compiling the evaluation step"):
                self.eval_steps = compiled(step.make_eval_step, batch, max(self.warmup, 1) if fp8 else 0)

    def loop(self, start, log) -> int:
        cfg, step, evaluated = self.cfg, start, None
        positions = cfg.data.global_batch_size * cfg.data.seq_len
        if self.evaluation and start == 0:
            self.evaluate(0, log)
        while step < cfg.steps and not self.interruption.signal:
            try:
                batch = next(self.batches, None)
            except Exception:
                if self.alone:  # a document that went bad costs no step; but others would have to join in saving
                    self.save(step, log)
                    self.checkpoints.wait()
                raise
            if batch is None:
                ending = "data.repeat = false" if cfg.data.epochs is None else f"data.epochs = {cfg.data.epochs}"
                print(f"the data ended after step {step} of {cfg.steps} ({ending})", flush=True)
                break
            self.state, metrics = self.train_steps[step >= self.warmup](self.state, batch)
            step += 1
            self.judge(log.record(step, metrics, positions))
            if self.evaluation and (step % cfg.evaluation.every == 0 or step == cfg.steps):
                evaluated = self.evaluate(step, log)
            if cfg.checkpoint.every and step % cfg.checkpoint.every == 0:
                self.save(step, log)
        self.judge(log.flush())
        self.save(step, log)
        self.checkpoints.wait()
        if self.interruption.signal and step < cfg.steps:
            changed = cfg.checkpoint.overwrite or cfg.checkpoint.resume != "auto"
            again = (
                "checkpoint.overwrite=false checkpoint.resume=auto goes on" if changed else "the same command goes on"
            )
            print(
                f"stopped by {self.interruption.signal} at step {step}; the checkpoint is complete, {again} from here",
                flush=True,
            )
            return INTERRUPTED
        if self.evaluation and evaluated != step:
            self.evaluate(step, log)
        log.close()
        self.show_sample("after", step)
        tokenizer = self.batches.tokenizer  # None: data.kind = "tokens" needs none
        export(cfg, self.state.params, step, tokenizer and tokenizer.folder)
        print(f"done: {step} steps; the last checkpoint is {self.checkpoints.folder / str(step)}", flush=True)
        return DONE

    def judge(self, fetched):
        """Counts steps in a row that were left out, and stops at the limit."""
        for step, metrics in fetched:
            self.bad = self.bad + 1 if metrics["bad"] else 0
            if self.bad:
                values = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, {metrics['tokens']:.0f} trained tokens"
                print(f"step {step}: {values}: not usable, so weights and optimizer keep their state", flush=True)
            if self.bad >= self.cfg.optimizer.max_bad_steps:
                raise Diverged(
                    f"step {step}: loss or gradient norm non-finite (or nothing to train on) for {self.bad} steps in a row "
                    f"(optimizer.max_bad_steps), the last with {values}; {self.culprit()}. The data stood at document "
                    f"{int(self.batches.cursors[0, 0])} of lane 0. Last checkpoint: "
                    f"{'none' if self.checkpoints.last_saved is None else self.checkpoints.last_saved}. "
                    "Lower optimizer.learning_rate, lengthen warmup_steps, or look at the data there"
                )

    def culprit(self) -> str:
        import jax.numpy as jnp

        bad = [path for path, value in self.state.params.items() if not bool(jnp.isfinite(value).all())]
        return f"weights that are not finite: {', '.join(bad[:5])}" if bad else "all weights are finite"

    def save(self, step, log):
        with log.pause():
            state = dataclasses.replace(self.state, frozen={})
            identity = self.batches.fingerprint, self.base
            self.checkpoints.save(step, state, self.batches.cursors, self.text, *identity)

    def evaluate(self, step, log) -> int:
        """Token-weighted mean loss over the documents of every set; given up, without a row, when the run is to stop."""
        with log.pause():
            for name, batches in self.evaluation.items():
                loss_sum = weight_sum = 0.0
                for batch in batches:
                    if self.interruption.signal and step < self.cfg.steps:
                        return step
                    sums = self.eval_steps[step >= max(self.warmup, 1)](self.state, batch)
                    loss_sum, weight_sum = loss_sum + float(sums["loss_sum"]), weight_sum + float(sums["weight_sum"])
                if not weight_sum:
                    where = f"evaluation.sets.{name}" if name else "evaluation.path or a larger evaluation.holdout"
                    raise UserError(f"evaluation: no token to evaluate on; give more documents in {where}")
                log.record_evaluation(step, loss_sum / weight_sum, int(weight_sum), name)
        return step

    def show_sample(self, when, step):
        prompt = self.cfg.evaluation.prompt
        if prompt is None or self.interruption.signal:
            return
        from jaxllm.generate import sample

        tokenizer = self.batches.tokenizer
        ids = [*map(int, self.batches.render.begin), *map(int, tokenizer.encode_batch([prompt])[0])]
        graphdef = self.graphdefs[step >= max(self.warmup, 1)]
        made = sample(graphdef, self.state, ids, self.cfg.evaluation.prompt_tokens, eos_id=tokenizer.eos_id)
        print(f"--- sample {when} training ---\n{prompt}{tokenizer.decode(made)}\n---", flush=True)


def export(cfg, params, step, tokenizer_folder) -> None:
    """Writes <output_dir>/export/<step> when checkpoint.export asks for it and it is not there."""
    from jaxllm import hf, peft
    from jaxllm.models import FAMILIES

    family, folder = FAMILIES[cfg.model.family], pathlib.Path(cfg.output_dir) / "export" / str(step)
    if cfg.checkpoint.export is None or folder.exists():
        return
    folder.parent.mkdir(exist_ok=True)
    if cfg.lora.rank is not None:
        peft.write(folder, family.hf_weights(cfg.model), cfg.lora, params, cfg.model.path or "")
        print(f"PEFT folder: {folder}", flush=True)
        return
    hf.save_folder(
        params,
        family.hf_weights(cfg.model),
        family.config_to_hf(cfg.model),
        folder,
        dtype=cfg.checkpoint.export,
        tokenizer_folder=tokenizer_folder,
    )
    print(f"Hugging Face folder: {folder}", flush=True)


def export_checkpoint(cfg, step) -> None:
    """The export of a finished run that was stopped before it was written, or that is asked for now."""
    from jaxllm import checkpoint
    from jaxllm.data.render import load_tokenizer

    output = pathlib.Path(cfg.output_dir)
    if cfg.checkpoint.export is None or (output / "export" / str(step)).exists():
        return
    trained = output / "tokenizer"
    tokenizer = None if trained.is_dir() else load_tokenizer(cfg)
    folder = trained if trained.is_dir() else tokenizer and tokenizer.folder
    export(cfg, checkpoint.load_params(output / checkpoint.FOLDER / str(step))[0], step, folder)


def starting_step(cfg) -> int | None:
    """The step to resume from, None to begin. UserError when the output folder holds a run that this config does not continue."""
    from jaxllm import checkpoint, config

    output, resume = pathlib.Path(cfg.output_dir), cfg.checkpoint.resume
    found = checkpoint.inspect(output, RUN_FILES)
    if foreign := [name for name in found.foreign if not name.startswith("replaced-")]:
        print(f"{output} also holds {', '.join(foreign[:5])}, which jaxllm did not write and leaves alone", flush=True)
    if cfg.checkpoint.overwrite:
        for name, given in (("model.path", cfg.model.path), ("model.adapter", cfg.model.adapter)):
            if given and output.resolve() in (pathlib.Path(given).resolve(), *pathlib.Path(given).resolve().parents):
                raise UserError(
                    f"checkpoint.overwrite: {name} = {given!r} is inside {output}, which is set aside and whose checkpoints would be removed; use another "
                    "output_dir"
                )
        return None
    if not found.steps:
        if isinstance(resume, int):
            raise UserError(f"checkpoint.resume: step {resume} is asked for, but {output} has no checkpoint")
        refuse_other_run(cfg, output)
        return None
    if resume == "never":
        raise UserError(
            f'output_dir: {output} has checkpoints up to step {found.steps[-1]}, and checkpoint.resume is "never"; set checkpoint.resume=auto to '
            "go on, checkpoint.overwrite=true to remove them, or another output_dir"
        )
    step = found.steps[-1] if resume == "auto" else resume
    if step not in found.steps:
        raise UserError(
            f"checkpoint.resume: {output} has no checkpoint of step {step}; there are {', '.join(map(str, found.steps))}"
        )
    saved = config.load_config(output / checkpoint.FOLDER / str(step) / "config.toml", resolve_path=False)
    refused, shown = config.differences(saved, cfg)
    if refused:
        raise UserError(
            f"output_dir: {output} has checkpoints up to step {found.steps[-1]} of a run with other settings:\n  "
            + "\n  ".join(refused)
            + "\nGo on with the saved settings to resume, set checkpoint.overwrite=true to remove them, or use another output_dir"
        )
    for line in shown:
        print(f"changed since the checkpoint: {line}", flush=True)
    if step > cfg.steps:
        raise UserError(
            f"steps: the checkpoint in {output} is at step {step}, and steps = {cfg.steps}; raise steps, or use another output_dir"
        )
    return step


def refuse_other_run(cfg, output) -> None:
    """UserError when a folder without checkpoints holds files that this run would write over and that are not its own."""
    from jaxllm import config

    file, rows = output / "config.toml", output / "metrics.jsonl"
    same = file.is_file() and file.read_text(encoding="utf-8") == config.dump(cfg)
    if not same and (file.exists() or (rows.is_file() and rows.stat().st_size)):
        raise UserError(
            f"output_dir: {output} holds {'config.toml' if file.exists() else 'metrics.jsonl'} of something else than this run, and no checkpoint; "
            "use another output_dir, or checkpoint.overwrite=true to set it aside"
        )


def remove_untouched(output: pathlib.Path) -> None:
    """Removes a folder that this run made and then had no use for."""
    with contextlib.suppress(OSError):
        if {path.name for path in output.iterdir()} <= {".lock", "checkpoints"}:
            (output / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (output / "checkpoints").rmdir()
            output.rmdir()


def memory_estimate(abstract, device) -> str:
    """Parameters, and bytes at rest on each device."""
    import jax
    import numpy as np

    from jaxllm import hardware

    def on_device(tree):
        leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != "pinned_host"]
        return sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves) / 2**30

    count = sum(int(np.prod(p.shape)) for p in abstract.params.values())
    known, trained = hardware.of(device.device_kind), " trained" if abstract.frozen else ""
    at_rest = on_device((abstract.params, abstract.frozen))
    return (
        f"{count:,}{trained} parameters; on each device {at_rest:.2f} GiB of weights and {on_device(abstract.opt_state):.2f} GiB "
        f"of optimizer state{f', of {known.memory_gib:.0f}' if known else ''}, plus gradients and activations (python -m jaxllm.plan compiles "
        "to find out)"
    )


def out_of_memory_advice(cfg) -> str:
    moments = {"moments": "8bit", "moments_memory": "host"} if cfg.optimizer.kind == "adamw" else {}
    present = ((f"optimizer.{name}", value, getattr(cfg.optimizer, name)) for name, value in moments.items())
    smaller = "".join(f", {name}={value} (now {now})" for name, value, now in present if now != value)
    return (
        f"the device is out of memory. Most helpful first: model.remat={'full' if cfg.model.remat != 'full' else 'offload'} (now "
        f"{cfg.model.remat!r}), optimizer.num_microbatches={2 * cfg.optimizer.num_microbatches} (now {cfg.optimizer.num_microbatches}), more "
        f"devices in mesh.data or mesh.sequence (now {cfg.mesh.described()}), loss.chunk_size={max(cfg.loss.chunk_size // 4, 1)} (now "
        f"{cfg.loss.chunk_size}){smaller}. python -m jaxllm.plan shows what each needs"
    )


def peak_flops(cfg, device) -> float | None:
    import jax

    from jaxllm import hardware

    known = hardware.of(device.device_kind)
    return None if known is None else jax.device_count() * known.peak_flops(cfg.precision.compute)


def write_beside(path: pathlib.Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def guarded(function, *args) -> int:
    """`function(*args)` with every way to end told in one last line and one exit code."""
    try:
        return function(*args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr, flush=True)
        return DIVERGED
    except KeyboardInterrupt:
        print("stopped at once; steps since the last checkpoint are lost", file=sys.stderr, flush=True)
        return FAULT
    except OutOfMemory as error:
        print(f"fault: {error}", file=sys.stderr, flush=True)
        return FAULT
    except Exception as error:
        if type(error).__name__ != "SaveError":  # says all there is to say
            traceback.print_exc()
        print(f"fault: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return FAULT


def check_platform(cfg) -> None:
    """UserError where the config asks for GPUs and JAX runs on something else: versions found, and the way out."""
    import jax

    if cfg.mesh.platform == "gpu" and jax.default_backend() != "gpu":
        versions = []
        for package in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{package} {importlib.metadata.version(package)}")
        raise UserError(
            f'mesh.platform: "gpu" is asked for, but JAX runs on {jax.default_backend()} ({", ".join(versions)}; NVIDIA driver '
            f"{'found' if has_driver() else 'not found'}). Install the CUDA plugin of jax's own version with pip install 'jaxllm[gpu]' on a machine "
            "with a driver, unset JAX_PLATFORMS, or set mesh.platform=any to train here"
        )


def has_driver() -> bool:
    return any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "dxg"))  # dxg: Windows' subsystem for Linux


def choose_platform() -> None:
    """Keeps jax from trying (and complaining about) the CUDA plugin on a machine without an NVIDIA driver, where it is installed for
    `jaxllm.plan` alone. JAX_PLATFORMS, when set, decides."""
    if not has_driver() and importlib.util.find_spec("jax_cuda13_plugin"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.train", description="Train, fine-tune, or go on with a run."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes on top, with TOML values")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config, with the source of each value, and stop"
    )
    options = parser.parse_intermixed_args(arguments)
    choose_platform()

    def run() -> int:
        from jaxllm import config

        cfg = config.load_config(options.config, *options.overrides)
        if options.print_config:
            print(config.describe(cfg), end="")
            return DONE
        try:
            return train(cfg)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemory(f"{str(error).splitlines()[0][:200]}: {out_of_memory_advice(cfg)}") from error

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
