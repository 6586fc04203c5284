"""What both acts of the demo need: a kvferryd of their own, and a table."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def kvferryd(memory: str) -> Iterator[str]:
    """The URL of a kvferryd of our own, on a unix socket in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
        socket, log = Path(folder, "kvferry.sock"), Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["kvferryd", f"--listen=unix://{socket}", f"--memory={memory}"], stdout=out, stderr=subprocess.STDOUT
            )
        try:
            deadline = time.monotonic() + 20
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"kvferryd did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def service_bytes(url: str) -> int:
    """Memory that the service says its chunks take."""
    command = ["kvferryctl", f"--server={url}", "stats", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if out.returncode:
        sys.exit(f"kvferryctl failed: {out.stderr}")
    return json.loads(out.stdout)["values"]["memory_used_bytes"]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
    """A table whose first `left` columns are text, the others numbers."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    print()
    for number, line in enumerate(lines):
        cells = [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(zip(line, widths))
        ]
        print("  " + "   ".join(cells).rstrip())
        if number == 0:
            print("  " + "   ".join("-" * width for width in widths))
