"""Processes that render documents ahead, by number; what comes back does not depend on how many there are.

They are new Python processes that talk over their own pipes: not forks, because JAX and other threads run here already,
and not multiprocessing's spawned ones, because those run the user's script again, which fails where it has no main
guard. A worker holds the documents and the renderer, imports no JAX, and ends when its input does: with `close()`, and
with this process however that ends. Ctrl-C and SIGTERM, which a scheduler may send to all processes of a job, are left
to the training process, which still has a step to finish.
"""

import concurrent.futures
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref

from jaxllm.data.pipeline import COUNTS, Rendering

START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from jaxllm.data import workers; workers.work()"
)


class Workers(Rendering):
    """Renders as `source` (a pipeline.Rendering, sent there by pickle) does, in `count` processes.

    submit(numbers) returns a Future of list[Rendered]. An exception of the renderer arrives as it was raised there.
    """

    def __init__(self, source, count):
        super().__init__(source.documents, source.render)
        self.count = count
        payload = pickle.dumps(source, protocol=pickle.HIGHEST_PROTOCOL)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        self._tasks, self._closed, self._counts, processes = queue.SimpleQueue(), threading.Event(), {}, []
        self._close = weakref.finalize(self, _end, processes, self._tasks, self._closed)
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        options["pass_fds"] = getattr(source.documents, "descriptors", [])
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", START], **options)
            processes.append(process)
            arguments = (process, payload, self._tasks, self._closed, self._counts)
            threading.Thread(target=_serve, args=arguments, name="jaxllm-data-worker", daemon=True).start()
        self.processes = processes

    @property
    def counts(self):
        merged = {name: {} for name in COUNTS}
        for counts in list(self._counts.values()):
            for name, values in counts.items():
                for key, value in values.items():
                    merged[name][key] = (
                        merged[name].get(key, value) if name == "examples" else merged[name].get(key, 0) + value
                    )
        return merged

    def submit(self, numbers):
        future = concurrent.futures.Future()
        self._tasks.put((future, list(numbers)))
        if self._closed.is_set():  # nobody may be left to take it
            _fail_all(self._tasks, RuntimeError("the data workers are closed"))
        return future

    def rendered(self, numbers):
        return self.submit(numbers).result()

    def close(self):
        """Ends the processes; what was submitted fails. May be called twice."""
        self._close()


def _end(processes, tasks, closed):
    closed.set()
    for process in processes:
        process.kill()  # nothing of theirs is worth waiting for
    for process in processes:
        process.wait()
    _fail_all(tasks, RuntimeError("the data workers are closed"))
    for _ in processes:
        tasks.put(None)


def _fail_all(tasks, error):
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            return
        if task is not None:
            task[0].set_exception(error)


def _serve(process, payload, tasks, closed, counts):
    """The thread of one worker: hands it tasks, one at a time, and their results to the Futures."""
    future = None
    try:
        with process.stdin as to, process.stdout as back:
            pickle.dump(sys.path, to)
            to.write(payload)
            while not closed.is_set() and (task := tasks.get()) is not None:
                future, numbers = task
                pickle.dump(numbers, to)
                to.flush()
                result, error, counts[process.pid] = pickle.load(back)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
                future = None
    except BaseException:  # whatever ends this thread, nobody may wait for its answer
        process.kill()
        code = process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        reason = "; the machine may be out of memory, then lower data.workers" if code == -signal.SIGKILL else ""
        ended = RuntimeError(
            "the data workers are closed" if closed.is_set() else f"a data worker was ended {how}{reason}"
        )
        if future is not None:
            future.set_exception(ended)
        closed.set()
        _fail_all(tasks, ended)


def work():
    """What a worker does: reads the source, then lists of numbers, and writes (list[Rendered], None, counts) or
    (None, exception, {})."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    back = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the results
    receive = lambda: pickle.load(sys.stdin.buffer)
    source, broken = None, None
    try:
        source = receive()
        source.start_counting()
    except EOFError:
        return
    except Exception as error:
        broken = _portable(error)
    while True:
        try:
            numbers = receive()
        except EOFError:
            return
        try:
            answer = (None, broken, {}) if broken else (source.rendered(numbers), None, source.counts)
        except Exception as error:
            answer = None, _portable(error), {}
        try:
            pickle.dump(answer, back, protocol=pickle.HIGHEST_PROTOCOL)
            back.flush()
        except BrokenPipeError:
            return


def _portable(error):
    """The exception, or one that says the same, in a form that arrives."""
    error.add_note("in a data worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception may fail to pickle in any way that its class invents
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
