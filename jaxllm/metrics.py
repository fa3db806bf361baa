"""What a run tells: one JSON line per logged step, trackers when asked, and a person at a terminal.

    step, loss, learning_rate, grad_norm
                       of the logged step, as the training step returned them; so is whatever else it returns
    tokens             positions of the logged step that were trained on: neither padding nor masked
    tokens_per_second  rows x seq_len, padding included, over step_time
    step_time          seconds per step, the mean since the row before, ended by a wait for the result. The first step
                       of a process (it compiles) and all that happens under `pause()` stay outside
    mfu                model FLOPs over step_time and the peak of all devices in the compute dtype, with FP8 too; absent where that is
                       unknown
    expert_load, imbalance, idle, entropy
                       of the experts in the logged step; see `moe.report`
    dropped_tokens, dropped_share
                       assignments that found no room since the row before: their number, and their share, the mean over steps
    fp8_saturated, fp8_underflowed, fp8_frozen
                       of each layer in the logged step; see `fp8.report`
    memory             bytes, the peak in use: of the fullest local device, or of this process (resident) on CPU
    bad_steps          steps since the row before that kept the old state (non-finite), when the step reports "bad"
    eval_loss, eval_tokens, eval_perplexity
                       in rows of their own, one per set of documents; eval_set is its name in evaluation.sets

metrics.jsonl is the record and always written; a tracker that fails is reported once and left out from then on. Metrics
stay on the device until a row is due, so that logging never makes a step wait. No network, no W&B or MLflow yet.
"""

import contextlib
import json
import math
import os
import pathlib
import resource
import sys
import threading
import time
from typing import Literal

import jax
import numpy as np
import pydantic

from jaxllm.section import Section, UserError

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
PULSE = 25.0
"""Seconds between lines of a phase that goes on; people take 30 s of silence for a hang."""
FIRST_KEYS = ("loss", "learning_rate", "grad_norm", "tokens")


class LoggingConfig(Section):
    every: int = pydantic.Field(10, ge=1)
    """Steps between rows of metrics.jsonl; also how often the host waits for the device."""
    to: list[Literal["tensorboard"]] = pydantic.Field(default_factory=list)
    """Trackers besides metrics.jsonl; each needs its package."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """A progress bar, or one line per logged step; "auto": the bar on a terminal, lines elsewhere."""


class Metrics:
    """The log of one run. Every process makes one and calls it alike; only the one with `write` writes and prints."""

    def __init__(
        self,
        output_dir: str | os.PathLike,
        config: LoggingConfig,
        *,
        total_steps: int,
        start_step: int = 0,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        write: bool | None = None,
    ):
        """Opens <output_dir>/metrics.jsonl, from which lines later than `start_step`, left by a run that died, are cut.

        `flops_per_step`: model FLOPs of one optimizer step, over all devices; `peak_flops`: FLOP/s of all devices
        together; with either None there is no mfu. `write`: by default process 0 does. UserError when a tracker in
        `config.to` is not installed.
        """
        self.folder = pathlib.Path(output_dir)
        self.config = config
        self.total_steps = total_steps
        self.flops_per_step, self.peak_flops = flops_per_step, peak_flops
        self.write = jax.process_index() == 0 if write is None else write
        self._window: list[tuple[int, dict]] = []
        self._restart_clock()
        self._since = None  # the clock starts when the first step, the one that compiles, has ended
        self._pauses = 0  # how many `pause()` are open
        self._file = None
        self._trackers, self._display = {}, None
        if self.write:
            self._trackers = {name: TRACKERS[name](self.folder, start_step) for name in config.to}
            self._file = _open_cut(self.folder / FILE, start_step)
            self._display = _display(config.progress, total_steps, start_step)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._release()  # after a fault there may be no device left to fetch from

    def record(self, step: int, device_metrics: dict, positions: int) -> list[tuple[int, dict]]:
        """Takes the metrics that `step` (1 for the first) returned, scalars or short vectors still on the device, and
        `positions`, rows x seq_len.

        Returns [] at once, except every `config.every` steps and at the last one: then the values of all steps since
        are fetched, a row is written, and they are returned as [(step, {name: number})] for the caller to judge.
        """
        self._window.append((step, device_metrics))
        if self._since is None:
            jax.block_until_ready(device_metrics)
            self._restart_clock()
        else:
            self._timed_steps += 1
            self._timed_positions += positions
        if self._display:
            self._display.advance(step)
        return self.flush() if step % self.config.every == 0 or step == self.total_steps else []

    def flush(self) -> list[tuple[int, dict]]:
        """Fetches and returns what `record` holds and writes its row, also between two due ones (a run that is
        stopped)."""
        if not self._window:
            return []
        fetched = [
            (step, {k: np.asarray(v).tolist() for k, v in m.items()}) for step, m in jax.device_get(self._window)
        ]
        self._window = []
        step, last = fetched[-1]
        row = {"step": step, **{key: last[key] for key in FIRST_KEYS if key in last}}
        if self._timed_steps:
            elapsed = time.perf_counter() - self._since - self._paused
            row["tokens_per_second"] = self._timed_positions / elapsed
            row["step_time"] = elapsed / self._timed_steps
            if self.flops_per_step and self.peak_flops:
                row["mfu"] = self.flops_per_step / (row["step_time"] * self.peak_flops)
        row["memory"] = _peak_memory()
        row |= {key: value for key, value in last.items() if key not in row and key != "bad"}
        if "bad" in last:
            row["bad_steps"] = sum(bool(metrics["bad"]) for _, metrics in fetched)
        if "dropped_tokens" in last:  # of every step: those between two rows drop as well, and nobody would be warned
            row["dropped_tokens"] = sum(metrics["dropped_tokens"] for _, metrics in fetched)
            row["dropped_share"] = sum(metrics["dropped_share"] for _, metrics in fetched) / len(fetched)
        self._restart_clock()
        self._write(row)
        return fetched

    def record_evaluation(self, step: int, loss: float, tokens: int, name: str = "") -> None:
        """Writes a row of its own: mean loss in nats over `tokens` held-out tokens after `step` steps, and its
        perplexity; of the evaluation set `name`, if it has one."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        row = {"step": step, "eval_loss": loss, "eval_tokens": tokens, "eval_perplexity": perplexity}
        self._write(row | ({"eval_set": name} if name else {}))

    @contextlib.contextmanager
    def pause(self):
        """What happens inside (evaluation, saving, a sample) is no training time. Steps under way are awaited first."""
        if self._window:
            jax.block_until_ready(self._window[-1][1])
        begin = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused += time.perf_counter() - begin

    def close(self) -> None:
        """Writes the row under way and lets go of files and terminal. May be called twice."""
        try:
            self.flush()
        finally:
            self._release()

    def _release(self) -> None:
        if self._display:
            self._display.close()
            self._display = None
        for name in list(self._trackers):
            self._track(name, lambda tracker: tracker.close())
        self._trackers = {}
        if self._file:
            self._file.close()
            self._file = None

    def _restart_clock(self) -> None:
        self._since, self._paused, self._timed_steps, self._timed_positions = time.perf_counter(), 0.0, 0, 0

    def _write(self, row: dict) -> None:
        if not self._file:
            return
        end = self._file.seek(0, os.SEEK_END)
        line = to_json(row).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError("the line did not fit")
        except OSError as error:  # a full disk: the run is worth more than a row, and half a row would spoil the file
            self._file.truncate(end)
            print(
                f"metrics: the row of step {row['step']} was not written to {self.folder / FILE}: {error}", flush=True
            )
        for name in list(self._trackers):
            self._track(name, lambda tracker: tracker.log(row["step"], _named_values(row)))
        if self._display:
            self._display.show(row)

    def _track(self, name: str, action) -> None:
        try:
            action(self._trackers[name])
        except Exception as error:
            print(f"logging.to: {name} failed and is switched off: {type(error).__name__}: {error}", flush=True)
            del self._trackers[name]


def to_json(row: dict) -> str:
    """One line of valid JSON: a number that is not finite becomes null and is named under "non_finite"."""
    numbers = lambda value: value if isinstance(value, list) else [value]
    finite = lambda value: all(not isinstance(number, float) or math.isfinite(number) for number in numbers(value))
    odd = {key: repr(value) for key, value in row.items() if not finite(value)}
    row = {key: None if key in odd else value for key, value in row.items()}
    return json.dumps(row | ({"non_finite": odd} if odd else {}), allow_nan=False)


def _named_values(row: dict) -> dict:
    """{name: number} of a row, where an evaluation set's values are named after it, and a vector's after their place."""
    of_set, named = f"/{row['eval_set']}" if "eval_set" in row else "", {}
    for key, value in row.items():
        if isinstance(value, list):
            named |= {f"{key}/{place}": number for place, number in enumerate(value)}
        elif key not in ("step", "eval_set"):
            named[f"{key}{of_set}"] = value
    return named


def _open_cut(path: pathlib.Path, start_step: int):
    """The file, open for appending, without the lines of steps after `start_step` (all of them at step 0) and without
    a last line that a kill cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith(b"\n") and start_step and _step_of(line) <= start_step]
    if kept != lines:
        beside = path.with_name(path.name + ".tmp")
        with open(beside, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    return open(path, "ab", buffering=0)


def _step_of(line: bytes) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0  # not ours, so not ours to remove


def _peak_memory() -> int:
    """Bytes: the peak in use on the fullest local device; where JAX reports none (CPU), this process's peak resident
    set."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(s.get("peak_bytes_in_use", 0) for s in stats)
    unit = 1 if sys.platform == "darwin" else 1024
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- trackers ---------------------------------------------------------------------------------------------------------


class _TensorBoard:
    def __init__(self, folder: pathlib.Path, start_step: int):
        try:
            from tensorboardX import SummaryWriter  # an event writer alone; TensorFlow and torch are not needed
        except ImportError:
            raise UserError(
                'logging.to: "tensorboard" needs the package tensorboardX, not installed here: pip install tensorboardX'
            ) from None
        self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=start_step + 1)

    def log(self, step: int, values: dict) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


TRACKERS = {"tensorboard": _TensorBoard}
"""Name in logging.to -> class with log(step, {name: number}) and close(), made with (output_dir, start_step)."""


# --- what a person sees -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def phase(what: str):
    """Prints that `what` begins, that it goes on (at least every 30 s), and how many seconds it took."""
    begin, ended = time.perf_counter(), threading.Event()

    def pulse():
        while not ended.wait(PULSE):
            print(f"{what}: {time.perf_counter() - begin:.0f} s so far", flush=True)

    print(f"{what} ...", flush=True)
    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    outcome = "stopped after"
    try:
        yield
        outcome = "took"
    finally:
        ended.set()
        thread.join()
        print(f"{what}: {outcome} {time.perf_counter() - begin:.1f} s", flush=True)


def _display(progress: str, total_steps: int, start_step: int):
    if progress == "none":
        return None
    bar = progress == "bar" or (progress == "auto" and sys.stdout.isatty())
    return (_Bar if bar else _Lines)(total_steps, start_step)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class _Lines:
    """One line per row, flushed at once, for pipes and log files."""

    def __init__(self, total_steps: int, start_step: int):
        self.total_steps = total_steps

    def advance(self, step: int) -> None:
        pass

    def show(self, row: dict) -> None:
        if "eval_loss" in row:
            loss, perplexity, tokens = row["eval_loss"], row["eval_perplexity"], row["eval_tokens"]
            of_set = f" of {row['eval_set']}" if "eval_set" in row else ""
            text = f"validation loss{of_set} {loss:.4f}, perplexity {perplexity:,.2f}, {tokens:,} tokens"
            print(f"step {row['step']}/{self.total_steps}  {text}", flush=True)
            return
        parts = [f"step {row['step']}/{self.total_steps}"]
        formats = {"loss": "loss {:.4f}", "learning_rate": "learning rate {:.3g}", "grad_norm": "grad norm {:.3g}"}
        formats |= {"tokens_per_second": "{:,.0f} tokens/s", "step_time": "{:.3g} s/step", "mfu": "mfu {:.1%}"}
        formats |= {
            "aux_loss": "aux loss {:.3f}",
            "router_z_loss": "z loss {:.3f}",
            "entropy": "router entropy {:.2f}",
            "imbalance": "experts' imbalance {:.2f}",
        }
        parts += [text.format(row[key]) for key, text in formats.items() if key in row]
        if "fp8_saturated" in row:
            parts.append(f"FP8 clips {max(row['fp8_saturated']):.2%}")
        if "expert_load" in row:
            parts.append(f"experts' load {min(row['expert_load']):.1%} to {max(row['expert_load']):.1%}")
        if row.get("bad_steps"):
            parts.append(f"{row['bad_steps']} bad steps kept the old state")
        if row.get("dropped_tokens"):
            parts.append(f"WARNING: experts dropped {row['dropped_share']:.2%}, raise moe.buffer_factor")
        if "step_time" in row:
            parts.append(f"{_clock((self.total_steps - row['step']) * row['step_time'])} left")
        print("  ".join(parts), flush=True)

    def close(self) -> None:
        pass


class _Bar(_Lines):
    """A bar that stays on the last line of a terminal; printed lines, evaluations among them, pass above it."""

    def __init__(self, total_steps: int, start_step: int):
        from rich import progress

        super().__init__(total_steps, start_step)
        columns = [
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[now]}"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}"),
        ]
        self.progress = progress.Progress(*columns)
        self.task = self.progress.add_task("", total=total_steps, completed=start_step, now="", left="")
        self.progress.start()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def show(self, row: dict) -> None:
        if "eval_loss" in row or row.get("bad_steps") or row.get("dropped_tokens"):
            super().show(row)
            return
        now = f"loss {row['loss']:.4f}" if "loss" in row else ""
        if "imbalance" in row:
            now += f"  imbalance {row['imbalance']:.2f}"
        if "step_time" in row:
            left = _clock((self.total_steps - row["step"]) * row["step_time"])
            now += f"  {row['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, now=now, left=f"{left} left")
        else:
            self.progress.update(self.task, now=now)

    def close(self) -> None:
        self.progress.stop()
