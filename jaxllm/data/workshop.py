"""Folders to build in: what is made in one is moved out of it by a rename, and what is not is gone afterwards, also after a kill.

A workshop is locked by its builder. The lock ends with the process, however that ends, so the next builder of this machine
knows what is left over and removes it. Of another machine's workshop (or of one from before this machine started again)
nobody here can know; such a one is told and left alone. The machine is told by the id of its boot, from Linux or macOS:
processes that share it share the lock, in whichever containers they are. Where there is none, all are left alone.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import tempfile

PREFIX, LOCK = ".building-", "builder"


@contextlib.contextmanager
def workshop(folder, tell=lambda text: None):
    """A new, empty place inside `folder` (pathlib.Path, created if need be) for the time of the `with`, as a path. tell:
    gets a line about each workshop that may be left over. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = _machine()
    _sweep(folder, machine, tell)
    path, lock = _begin(folder, machine)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.close()


BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")  # Linux's


def _machine():
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii")[:8]
    with contextlib.suppress(OSError):  # macOS
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True)
        return asked.stdout.strip()[:8] or None
    return None


def _begin(folder, machine):
    """(path, lock) of a new workshop. A sweeper may come between its making and its locking and take it for left over;
    then the lock is not that of the path any more, and another is made."""
    while True:
        path = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}{machine or ''}-", dir=folder))
        try:
            lock = open(path / LOCK, "a")  # noqa: SIM115
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        except OSError:  # a file system without locks: then no sweeper gets one either
            return path, lock
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path / LOCK)):
                return path, lock
        lock.close()


def _sweep(folder, machine, tell):
    """Removes the workshops whose builders are gone."""
    for path in folder.glob(f"{PREFIX}*"):
        if machine is None or not path.name.startswith(f"{PREFIX}{machine}-"):
            tell(
                f"data.cache: {path} is being built by another machine, or was left there by one that was stopped; "
                "if none is at work, it can be removed"
            )
            continue
        # OSError: its builder is at work or has just finished, or the file system has no locks
        with contextlib.suppress(OSError), open(path / LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
