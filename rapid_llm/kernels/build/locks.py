"""One builder per key: a lock that the kernel releases when its owner dies, however it dies.

The lock is `flock` on a file; the file's content only says who holds it. A file left behind, by whomever, locks
nothing. A file system without locks is said so once, and building goes on with the atomic rename alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from .errors import LockTimeout
from .progress import tell

NOTICE_S: Final = 5.0
"""A wait of this long is explained to whoever waits."""

_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_held: Final[set[int]] = set()
_said: Final[set[str]] = set()


def _close_in_child() -> None:
    """A forked child shares its parent's locks until it closes them: it would keep them when the parent is killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class KeyLock:
    """`with KeyLock(file, what, limit):` holds the lock; raises `LockTimeout` after `timeout_s` of waiting.

    `locked` is False where the file system has no locks.
    """

    def __init__(self, path: Path, what: str, timeout_s: float) -> None:
        self.path = path
        self.what = what
        self.timeout_s = timeout_s
        self.locked = False
        self._fd = -1

    def __enter__(self) -> KeyLock:
        started = time.monotonic()
        while not self._attempt(started):
            continue
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def try_now(self) -> bool:
        """Take the lock if it is free and the file system has locks; who got it leaves by `release()`."""
        self._open()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another, or there are no locks here: either way not ours
            self._close()
            return False
        return self._taken()

    def release(self) -> None:
        """Give the lock back; the file stays, empty."""
        if self._fd < 0:
            return
        try:
            if self.locked:
                os.ftruncate(self._fd, 0)
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._close()

    def _attempt(self, started: float) -> bool:
        """Wait for the file that is there now; False if it was replaced meanwhile."""
        self._open()
        pause, told = 0.002, False
        try:
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return self._taken()
                except BlockingIOError:
                    pass
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    self._say_unlocked(error)
                    return True
                elapsed = time.monotonic() - started
                if elapsed >= NOTICE_S and not told:
                    told = True
                    tell(self._text(f"waiting, up to {self.timeout_s:g} s"))
                if elapsed >= self.timeout_s:
                    raise LockTimeout(self._text(f"waited {elapsed:.1f} s; the limit is {self.timeout_s:g} s"))
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
        except BaseException:
            self._close()
            raise

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _held.add(self._fd)

    def _close(self) -> None:
        if self._fd >= 0:
            _held.discard(self._fd)
            os.close(self._fd)
        self._fd, self.locked = -1, False

    def _taken(self) -> bool:
        """After flock: whether the locked file is still the one of this name, which gc may have removed."""
        try:
            here = os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            here = False
        if not here:
            self._close()
            return False
        self.locked = True
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({**owner, "what": self.what}).encode(), 0)
        return True

    def _text(self, how: str) -> str:
        return (
            f"{self.what}: {how}; {self._holder()} holds {self.path}. "
            "If that process hangs, end it: the lock goes with it"
        )

    def _holder(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {owner['pid']} on {owner['host']} (building since {owner['since']})"
        except (ValueError, KeyError, TypeError):  # the holder has not written its name yet, or is foreign
            return "a process that left no name"

    def _say_unlocked(self, error: OSError) -> None:
        folder = str(self.path.parent)
        if folder not in _said:
            _said.add(folder)
            tell(f"{folder}: no file locks here ({error}); two processes may build {self.what} at once, harmlessly")
