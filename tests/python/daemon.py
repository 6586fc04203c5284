"""A real kvferryd as a child process."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import kvferry


def binary(name: str) -> str:
    """The full path of one of our binaries. They are looked for in PATH, where `./dev` puts build/release/bin."""
    path = shutil.which(name)
    assert path, f"{name} is not in PATH: run the tests by `./dev test`, or put build/release/bin into PATH"
    return path


class Kvferryd:
    """kvferryd on a unix socket in `folder`; a context manager that kills it at the end."""

    def __init__(self, folder: Path, *options: str, memory: str = "256MiB"):
        self.socket = folder / "kvferry.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "kvferryd.log"
        self._command = [binary("kvferryd"), f"--listen={self.url}", f"--memory={memory}", *options]
        self._process: subprocess.Popen | None = None

    def start(self) -> "Kvferryd":
        self._process = subprocess.Popen(self._command, stdout=open(self.log, "ab"), stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        while not self._answers():
            code = self._process.poll()
            assert code is None, f"kvferryd ended with {code}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"kvferryd does not listen:\n{self.log.read_text()}"
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Returns after SIGSTOP when every thread has stopped: until then one may still answer."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            _, status = os.waitpid(self._process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status

    def values(self) -> dict[str, int]:
        """The figures of `kvferryctl stats`."""
        command = [binary("kvferryctl"), f"--server={self.url}", "stats", "--json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)["values"]

    def kill(self) -> None:
        """As the kernel does it when memory is short: no goodbye, and the socket's file stays."""
        self.signal(signal.SIGKILL)
        self._process.wait(10)

    def restart(self) -> None:
        self.kill()
        self.start()

    def __enter__(self) -> "Kvferryd":
        return self.start()

    def __exit__(self, *_) -> None:
        if self._process.poll() is None:
            self.kill()


@contextlib.contextmanager
def store_with(memory: str, plane: str, folder: Path) -> Iterator[kvferry.Store]:
    """A store of `memory`: "embedded", or "grpc" in a daemon of its own with its socket in `folder`."""
    if plane == "embedded":
        with kvferry.connect("embedded://", memory=memory) as store:
            yield store
    else:
        with Kvferryd(folder, memory=memory) as daemon, kvferry.connect(daemon.url) as store:
            yield store
