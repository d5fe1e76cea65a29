"""Live control of a run: a Unix socket in its folder. No torch.

A client sends one line of JSON, ``{"ask": "status" | "checkpoint" | "stop"}``. The answer is one line, an object that
holds ``error`` if the request failed. Each client has a thread of its own; no client can hold up training.
"""

import contextlib
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

from adl_dist.checkpoint import layout
from adl_dist.control.requests import RequestKind, RequestQueue
from adl_dist.errors import ConfigError

logger = logging.getLogger("adl_dist")

SOCKET = "control.sock"
LONGEST_REQUEST = 10_000  # bytes
SILENT_SECONDS = 1.0  # after which a silent client is disconnected
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.1  # between two checks whether the run is over
ENDED = "the run ended before it answered"
ASKED = {kind.value: kind for kind in (RequestKind.CHECKPOINT, RequestKind.STOP)}  # END is for callbacks
LONGEST_ADDRESS = 107 if sys.platform == "linux" else 103  # bytes of a Unix socket's address; macOS has the least


class LiveControl:
    """The socket of a run, held on rank 0."""

    def __init__(self, run_dir: Path, status: Callable[[], Mapping[str, Any]], requests: RequestQueue) -> None:
        """Prepare a socket in ``run_dir``."""
        self._path = run_dir / SOCKET
        self._status, self._requests = status, requests
        self._over = threading.Event()
        self._server: _Server | None = None

    def start(self) -> None:
        """Start to listen; training continues if that is impossible."""
        try:
            self._path.unlink(missing_ok=True)  # of a killed run
            with short_address(self._path) as address:
                self._server = _Server(address, self._answer)
        except OSError as error:
            logger.warning("no live control of this run: %s: %s", self._path, error)
            return
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(POLL_SECONDS,), name="live control", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and remove the socket file."""
        self._over.set()
        server, self._server = self._server, None  # the watchdog may close it too, when it ends the job
        if server is not None:
            with contextlib.suppress(OSError):  # a disk that fails now must not make the run a failed one
                self._path.unlink()  # first: a client that sees the file may connect
            server.shutdown()
            server.server_close()  # last answers have left then

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
            if self._over.wait(POLL_SECONDS) and not done.done():  # a run may end right after its answer
                return {"error": ENDED}
        error = done.exception()
        return {"done": done.result()} if error is None else {"error": f"{ask}: {error}"}


class _Server(socketserver.ThreadingUnixStreamServer):
    """A server that only the run's owner can reach; a thread per client."""

    def __init__(self, address: str, answer: Callable[[bytes], dict[str, Any]]) -> None:
        self.answer = answer
        umask = os.umask(0o177)
        try:
            super().__init__(address, _Client)
        finally:
            os.umask(umask)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error of one client, which affects no other."""
        logger.info("a client of live control failed", exc_info=True)


class _Client(socketserver.StreamRequestHandler):
    """The connection to one client, closed if the client stays silent."""

    timeout = SILENT_SECONDS
    server: _Server

    def handle(self) -> None:
        """Read one request, and write its answer."""
        with contextlib.suppress(OSError):
            if line := self.rfile.readline(LONGEST_REQUEST):
                self.wfile.write(json.dumps(self.server.answer(line)).encode() + b"\n")


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yield an address of ``path`` that is short enough for the kernel."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask_run(run_dir: Path, ask: str) -> dict[str, Any]:
    """Send a request to a run on this machine and return its answer.

    ``ask`` is ``status`` or the value of a :class:`RequestKind`. Raise ConfigError if no run listens, or it refuses.
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
    way_out = "check the path, or ask on the machine of its rank 0"
    if (saved := layout.complete(path.parent / "checkpoints")) and not (path.parent / "summary.json").exists():
        way_out += f"; a run that was killed is resumed from {saved[-1].name} by the same command"
    return f"no run is training there on this machine ({why}); {way_out}"
