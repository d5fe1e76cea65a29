"""Live control of a run from outside of it: a Unix socket in the run folder, for its owner alone. No torch.

One line of JSON is one request, ``{"ask": "status" | "checkpoint" | "stop"}``; one line is its answer, which holds
``error`` if there is none. Each client has a thread of its own and may keep silent; none can hold up training.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adl_dist.control.requests import Ask, Requests
from adl_dist.errors import ConfigError

logger = logging.getLogger("adl_dist")

SOCKET = "control.sock"
LONGEST_REQUEST = 10_000  # bytes
SILENT_SECONDS = 60.0  # after which a client that says nothing is hung up on
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.1  # between two looks whether the run is over; by which an answer may come after the checkpoint
LAST_ANSWER_SECONDS = 1.0  # that answers which are due may take when the run is over
ENDED = "the run ended before it answered"
ASKED = {ask.value: ask for ask in (Ask.CHECKPOINT, Ask.STOP)}  # the other is a callback's
LONGEST_ADDRESS = 107 if sys.platform == "linux" else 103  # bytes of a Unix socket's address; macOS has the least


class LiveControl:
    """The socket of a run; held on rank 0. It answers with ``status``, and puts the others into ``requests``."""

    def __init__(self, run_dir: Path, status: Callable[[], Mapping[str, Any]], requests: Requests) -> None:
        self._path = run_dir / SOCKET
        self._status, self._requests = status, requests
        self._over = threading.Event()
        self._folder: int | None = None
        self._accepting: threading.Thread | None = None
        self._num_due, self._answered = 0, threading.Condition()

    def start(self) -> None:
        """Listen, if the run folder lets us and no other run listens there; else training continues without it."""
        try:
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            # The socket that is there may be that of a run which was killed, or of one that trains here now.
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)
            with short_address(self._path) as address:
                listener = _listen(address)
        except OSError as error:
            self.close()
            logger.warning("no live control of this run: %s: %s", self._path, error)
            return
        self._accepting = threading.Thread(target=self._accept, args=(listener,), name="live control", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening, and remove the socket file."""
        self._over.set()
        # The watchdog may close it too, when it ends the job.
        (accepting, self._accepting), (folder, self._folder) = (self._accepting, None), (self._folder, None)
        if accepting is not None:
            with contextlib.suppress(OSError):  # a disk that fails now must not make the run a failed one
                self._path.unlink()  # first: a client that sees the file may connect
            accepting.join()
            with self._answered:  # the clients' threads may end with this process
                self._answered.wait_for(lambda: self._num_due == 0, timeout=LAST_ANSWER_SECONDS)
        if folder is not None:
            os.close(folder)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._over.is_set():
                with contextlib.suppress(OSError, RuntimeError):  # none has come for a while; no room for a thread
                    client, _ = listener.accept()
                    threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        """Answer line by line until the client hangs up, or says nothing for long."""
        client.settimeout(SILENT_SECONDS)
        try:
            with client, client.makefile("rb") as lines:
                while line := lines.readline(LONGEST_REQUEST):
                    self._count_due(1)
                    try:
                        client.sendall(json.dumps(self._answer(line)).encode() + b"\n")
                    finally:
                        self._count_due(-1)
        except OSError:
            return
        except Exception:  # affects no other client
            logger.info("a client of live control failed", exc_info=True)

    def _count_due(self, change: int) -> None:
        with self._answered:
            self._num_due += change
            self._answered.notify_all()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            ask = json.loads(line)["ask"]
            wanted = None if ask == "status" else ASKED[ask]
        except (ValueError, KeyError, TypeError, RecursionError):
            known = ", ".join(json.dumps({"ask": name}) for name in ("status", *ASKED))
            return {"error": f"not a request: {line[:80].decode(errors='replace').strip()!r}; expected one of {known}"}
        if wanted is None:
            return dict(self._status())
        done = self._requests.ask(wanted, f"adl-dist {ask}")
        while not done.done():
            if self._over.wait(POLL_SECONDS) and not done.done():  # a run may end right after it has answered
                return {"error": ENDED}
        try:
            return {"done": done.result()}
        except Exception as error:
            return {"error": f"{ask}: {error}"}


def _listen(address: str) -> socket.socket:
    """Return a socket that lets only the owner in, from the beginning and whatever is put in its place."""
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(umask)
    listener.settimeout(POLL_SECONDS)
    return listener


def remove_stale(run_dir: Path) -> None:
    """Remove the socket of a run that was killed and could not; one that is in use stays."""
    with contextlib.suppress(OSError):
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (run_dir / SOCKET).unlink(missing_ok=True)
        finally:
            os.close(folder)


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """An address of the socket ``path`` that is short enough for the kernel, while inside.

    Raises:
        OSError: there is no such folder, or the path is long and this system has no /proc.
    """
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask_run(run_dir: Path, ask: str) -> dict[str, Any]:
    """Ask the run in ``run_dir`` on this machine for ``status`` or the value of an :class:`Ask`; return its answer.

    Raises:
        ConfigError: no run listens there, or it refuses.
    """
    path = run_dir / SOCKET
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as client, short_address(path) as address:
            client.settimeout(CONNECT_SECONDS)
            client.connect(address)
            client.settimeout(CONNECT_SECONDS if ask == "status" else None)
            client.sendall(json.dumps({"ask": ask}).encode() + b"\n")
            line = client.makefile("rb").readline()
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {_reason(path, error)}") from None
    answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"error": ENDED}
    if "error" in answer:
        raise ConfigError(f"run_dir={run_dir}: {answer['error']}")
    return answer


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "only the user who started the run may control it"
    if isinstance(error, TimeoutError):
        waited = f"a run is there, but did not answer in {CONNECT_SECONDS:g} s"
        return f"{waited}; logs/rank0.log in it and its standard error may say why"
    why = f"there is no {SOCKET}" if isinstance(error, FileNotFoundError) else f"{SOCKET}: {error.strerror or error}"
    if not path.parent.is_dir():
        why = "there is no such folder"
    return f"no run is training there on this machine ({why}); check the path, or ask on the machine of its rank 0"
