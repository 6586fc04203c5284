"""Images appended to segments and read back, against fio in the same folder.

Both move blocks of one size past the page cache, so many at a time, to files that are new and were given their room
ahead, and sync once at the end; and read each block once, in random order. fio uses io_uring. Ours does as well, and
in `disk-denied` it runs where a seccomp filter denies that, as in most containers, with threads in its place. A ratio
is the median over the rounds of one round's two speeds, so that a disk that drifts does so for both.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from daemon import binary

ROOT = Path(__file__).parents[2]
LIMIT = 0.9
BLOCKS = {"64KiB": (64 << 10, 16), "1MiB": (1 << 20, 16), "16MiB": (16 << 20, 4)}  # bytes, how many at a time
WHAT = ("write", "read")
KINDS = {"disk": "auto", "disk-denied": "denied"}


def run(quick: bool) -> list[dict]:
    rounds, total = (3, 128 << 20) if quick else (9, 1 << 30)
    if shutil.which("fio") is None:
        raise SystemExit("storage: there is no fio; ./dev setup installs it")
    with _folder() as name:
        folder = Path(name)
        print(f"storage: {total >> 20} MiB in {folder.parent}, against fio with io_uring; median of {rounds} rounds\n",
              flush=True)  # fmt: skip
        speeds = {}
        for number in range(rounds):
            for block in BLOCKS:
                movers = [*KINDS, "fio"]
                for turn in range(len(movers)):
                    mover = movers[(number + turn) % len(movers)]
                    for what, speed in _move(mover, block, total, folder):
                        speeds.setdefault((mover, what, block), []).append(speed)
    results = [_result(kind, what, block, speeds) for kind in KINDS for what in WHAT for block in BLOCKS]
    for result in results:
        print(f"  {result['name']:<34}{result['value']:8.2f} {result['unit']}{result['ratio']:8.2f} of fio")
    print()
    return results


def _folder() -> tempfile.TemporaryDirectory:
    """Beside other temporary files, or in build/bench where those lie in memory or go through the page cache."""
    folder = tempfile.TemporaryDirectory(prefix="kvferry-disk-")
    kind = _output(["stat", "--file-system", "--format=%T", folder.name]).strip()
    if kind not in ("tmpfs", "ramfs") and _takes_direct(Path(folder.name) / "probe"):
        return folder
    folder.cleanup()
    target = ROOT / "build" / "bench"
    target.mkdir(parents=True, exist_ok=True)
    print(f"storage: {kind} at {folder.name} is not past the page cache; using {target}")
    return tempfile.TemporaryDirectory(prefix="kvferry-disk-", dir=target)


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def _move(mover: str, block: str, total: int, folder: Path) -> list[tuple[str, float]]:
    """Bytes a second of one write and one read of what was written."""
    target = folder / "store"
    target.mkdir()
    try:
        return [(what, _fio(what, block, total, target) if mover == "fio" else _ours(mover, what, block, total, target))
                for what in WHAT]  # fmt: skip
    finally:
        shutil.rmtree(target)


def _fio(what: str, block: str, total: int, target: Path) -> float:
    size, depth = BLOCKS[block]
    command = ["fio", "--name=x", f"--filename={target / 'fio'}", f"--size={total}", f"--bs={size}", "--direct=1",
               f"--rw={'write' if what == 'write' else 'randread'}", "--ioengine=io_uring", f"--iodepth={depth}",
               "--end_fsync=1", "--fallocate=native", "--output-format=json"]  # fmt: skip
    return json.loads(_output(command))["jobs"][0][what]["bw_bytes"]


def _ours(mover: str, what: str, block: str, total: int, target: Path) -> float:
    size, depth = BLOCKS[block]
    out = _output([binary("kvferry-disk-bench"), target, str(size), str(depth), KINDS[mover], what, str(total)])
    speed, io, direct = out.split()
    if (io == "io_uring") != (mover == "disk") or direct != "direct":
        raise SystemExit(f"storage: {mover} went through {io}, {direct}")
    return float(speed)


def _output(command: list) -> str:
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if out.returncode:
        raise SystemExit(f"storage: {command[0]} failed with {out.returncode}:\n{out.stdout}{out.stderr}")
    return out.stdout


def _result(kind: str, what: str, block: str, speeds: dict) -> dict:
    ours, fio = speeds[kind, what, block], speeds["fio", what, block]
    return {
        "name": f"storage/{kind}/{what}/{block}", "value": round(statistics.median(ours) / 1e9, 2), "unit": "GB/s",
        "against": "fio", "limit": LIMIT,
        "ratio": round(statistics.median(a / b for a, b in zip(ours, fio, strict=True)), 3),
    }  # fmt: skip
