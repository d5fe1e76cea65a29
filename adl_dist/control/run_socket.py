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
import socketserver
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
LATE_SECONDS = 0.1  # by which an answer may come after the checkpoint
LAST_ANSWER_SECONDS = 1.0  # that answers which are due may take when the run is over
ENDED = "the run ended before it answered"
LONGEST_ADDRESS = 107 if sys.platform == "linux" else 103  # bytes of a Unix socket's address; macOS has the least


class LiveControl:
    """The socket of a run; held on rank 0. It answers with ``status``, and puts the others into ``requests``."""

    def __init__(self, run_dir: Path, status: Callable[[], Mapping[str, Any]], requests: Requests) -> None:
        self._path = run_dir / SOCKET
        self._status, self._requests = status, requests
        self._over = threading.Event()
        self._folder: int | None = None
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen, if the run folder lets us and no other run listens there; else training continues without it."""
        try:
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            # The socket that is there may be that of a run which was killed, or of one that trains here now.
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)
            with short_address(self._path) as address:
                self._server = _Server(address, self._answer)
        except OSError as error:
            self.close()
            logger.warning("no live control of this run: %s: %s", self._path, error)
            return
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="live control", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and remove the socket file."""
        self._over.set()
        # The watchdog may close it too, when it ends the job.
        (server, self._server), (folder, self._folder) = (self._server, None), (self._folder, None)
        if server is not None:
            try:
                self._path.unlink(missing_ok=True)  # first: a client that sees the file may connect
            finally:
                server.shutdown()
                server.server_close()
        if folder is not None:
            os.close(folder)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            ask = json.loads(line)["ask"]
            wanted = None if ask == "status" else Ask(ask)
        except (ValueError, KeyError, TypeError, RecursionError):
            known = ", ".join(json.dumps({"ask": name}) for name in ("status", *(a.value for a in Ask)))
            return {"error": f"not a request: {line[:80].decode(errors='replace').strip()!r}; expected one of {known}"}
        if wanted is None:
            return dict(self._status())
        done = self._requests.ask(wanted, f"adl-dist {ask}")
        while not done.done():
            if self._over.wait(LATE_SECONDS) and not done.done():  # a run may end right after it has answered
                return {"error": ENDED}
        try:
            return {"done": done.result()}
        except Exception as error:
            return {"error": f"{ask}: {error}"}


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Hands each line to ``answer`` in a thread of its client's."""

    address_family = socket.AF_UNIX
    daemon_threads = True
    block_on_close = False  # a client that is silent, or waits for a checkpoint, must not hold up the end of the run

    def __init__(self, address: str, answer: Callable[[bytes], dict[str, Any]]) -> None:
        self.answer = answer
        self._num_due = 0
        self._answered = threading.Condition()
        super().__init__(address, _Client)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer as due while inside."""
        with self._answered:
            self._num_due += 1
        try:
            yield
        finally:
            with self._answered:
                self._num_due -= 1
                self._answered.notify_all()

    def server_close(self) -> None:
        """Close the socket; wait a little for answers that are due: the clients' threads may end with the process."""
        super().server_close()
        with self._answered:
            self._answered.wait_for(lambda: self._num_due == 0, timeout=LAST_ANSWER_SECONDS)

    def server_bind(self) -> None:
        """Let only the owner in, from the beginning and whatever is put in its place."""
        umask = os.umask(0o177)
        try:
            self.socket.bind(self.server_address)
        finally:
            os.umask(umask)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a client failed; no other client is affected."""
        logger.info("a client of live control failed", exc_info=True)


class _Client(socketserver.StreamRequestHandler):
    timeout = SILENT_SECONDS

    def handle(self) -> None:
        """Answer line by line until the client hangs up."""
        assert isinstance(self.server, _Server)
        with contextlib.suppress(OSError):  # it has hung up, or said nothing for long
            while line := self.rfile.readline(LONGEST_REQUEST):
                with self.server.answering():
                    answer = self.server.answer(line)
                    self.wfile.write(json.dumps(answer).encode() + b"\n")


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
    path, limit = run_dir / SOCKET, CONNECT_SECONDS
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as client, short_address(path) as address:
            client.settimeout(limit)
            client.connect(address)
            client.settimeout(limit if ask == "status" else None)
            client.sendall(json.dumps({"ask": ask}).encode() + b"\n")
            line = client.makefile("rb").readline()
    except PermissionError:
        raise ConfigError(f"run_dir={run_dir}: only the user who started the run may control it") from None
    except TimeoutError:
        raise ConfigError(
            f"run_dir={run_dir}: a run is there, but did not answer in {limit:g} s; logs/rank0.log in it and its "
            "standard error may say why"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir}: no run is training there on this machine ({_reason(path, error)}); check the path, or "
            "ask on the machine of its rank 0"
        ) from None
    if not line:
        raise ConfigError(f"run_dir={run_dir}: {ENDED}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ConfigError(f"run_dir={run_dir}: {answer['error']}")
    return answer


def _reason(path: Path, error: OSError) -> str:
    if not path.parent.is_dir():
        return "there is no such folder"
    return f"there is no {SOCKET}" if isinstance(error, FileNotFoundError) else f"{SOCKET}: {error.strerror or error}"
