"""Benchmarks: `./dev bench [GROUP] [--quick]` prints tables and writes build/bench/results.json.

Each result is {"name", "value", "unit", "against", "limit", "ratio"}: what was measured, against what in the same run,
the ratio of the two (above 1: better) and the least that the ratio should be, or null. Nothing fails by a figure: a
benchmark is no test.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "client" / "examples")]

from daemon import Kvferryd, binary  # noqa: E402


def decode(url: str, quick: bool) -> list[dict]:
    import decode as group

    return group.run(url, quick)


def plane(url: str, quick: bool) -> list[dict]:
    """What the data planes move, by the C++ program kvferry-bench."""
    print("plane: put and get of whole chunks, one client, against memcpy\n", flush=True)
    command = [binary("kvferry-bench"), *(["--quick"] if quick else []), "embedded://", url]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if out.returncode:
        sys.exit(f"kvferry-bench failed with {out.returncode}")
    results = json.loads(out.stdout)
    for result in results:
        print(f"  {result['name']:<32}{result['value']:8.2f} {result['unit']}{result['ratio']:8.2f} of memcpy")
    print()
    return results


def storage(url: str, quick: bool) -> list[dict]:
    """What the disk tier's log of segments moves, against fio."""
    import disk

    return disk.run(quick)


GROUPS = {"plane": plane, "decode": decode, "storage": storage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", nargs="?", choices=GROUPS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: within 50 seconds")
    options = parser.parse_args()
    results = []
    temporary = tempfile.TemporaryDirectory(prefix="kvferry-bench-")
    with temporary as folder, Kvferryd(Path(folder), memory="1GiB") as daemon:
        for name in [options.group] if options.group else GROUPS:
            results += GROUPS[name](daemon.url, options.quick)
    target = ROOT / "build" / "bench" / "results.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[" + ",\n ".join(map(json.dumps, results)) + "]\n")
    print(f"{target.relative_to(ROOT)}: {len(results)} results")


if __name__ == "__main__":
    main()
