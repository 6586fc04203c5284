"""The store's policies on a recorded trace: a table, and a plot of it.

policies.py [FILE]      prints the table of FILE (default: tests/traces/conversation.jsonl.gz)
policies.py --write     puts it into storage/README.md, and the plot into docs/policies.svg
"""

import argparse
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "traces" / "conversation.jsonl.gz"
README = ROOT / "storage" / "README.md"
PLOT = ROOT / "docs" / "policies.svg"
BEGIN, END = "<!-- policies: written by tests/bench/policies.py -->\n", "<!-- /policies -->\n"

POLICIES, WRITES = ("lru", "s3fifo", "lfu"), ("write_back", "write_through", "on_second_hit")


def play(trace: Path) -> list[dict]:
    out = subprocess.run(["kvferry-bench", "trace", trace], stdout=subprocess.PIPE, check=True, text=True, timeout=600)
    return json.loads(out.stdout)


def table(results: list[dict]) -> str:
    """Each cell: the hit ratio, and bytes written to disk per byte served."""
    sizes = sorted({result["chunks"] for result in results})
    lines = [
        "| policy | write policy | " + " | ".join(f"{size:,} chunks" for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for write in WRITES:
        for policy in POLICIES:
            cells = []
            for size in sizes:
                (found,) = [r for r in results if (r["policy"], r["write"], r["chunks"]) == (policy, write, size)]
                cells.append(f"{found['hit_ratio']:.1%}, {found['written_per_served']:.2f}")
            lines.append(f"| {policy} | {write} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


STYLE = """
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933 }
  .title { font-size: 15px; font-weight: 600 } .note { fill: #52606d }
  .axis { stroke: #9aa5b1; stroke-width: 1 } .grid { stroke: #e4e7eb; stroke-width: 1 }
  .line { fill: none; stroke-width: 2 } .dash { stroke-dasharray: 6 4 } .dots { stroke-dasharray: 2 3 }
  .lru { stroke: #2f6fdb } .s3fifo { stroke: #e08a1e } .lfu { stroke: #1b998b }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .note { fill: #9aa5b1 } .grid { stroke: #323f4b }
    .lru { stroke: #5b93f0 } .s3fifo { stroke: #f0a644 } .lfu { stroke: #3fbfae }
  }
"""
DASHES = {"write_back": "", "write_through": " dash", "on_second_hit": " dots"}


def panel(results: list[dict], key: str, title: str, left: int, top: float, marks: list[float], label) -> list[str]:
    """One plot, 330 x 220: `key` over the size; the values at `marks` are as far from one another."""
    width, height = 330, 220
    sizes = sorted({result["chunks"] for result in results})
    xs = {size: left + 60 + i * (width - 60) / (len(sizes) - 1) for i, size in enumerate(sizes)}

    def y(value: float) -> float:
        cell = max(i for i, mark in enumerate(marks[:-1]) if value >= mark)
        within = (value - marks[cell]) / (marks[cell + 1] - marks[cell])
        return top + height * (1 - (cell + within) / (len(marks) - 1))

    out = [f'<text x="{left}" y="{top - 14}" class="title">{title}</text>']
    for mark in marks:
        out.append(f'<line x1="{left + 60}" y1="{y(mark)}" x2="{left + width}" y2="{y(mark)}" class="grid"/>')
        out.append(f'<text x="{left + 52}" y="{y(mark) + 4}" text-anchor="end" class="note">{label(mark)}</text>')
    for size, x in xs.items():
        out.append(f'<text x="{x}" y="{top + height + 20}" text-anchor="middle" class="note">{size:,}</text>')
    for policy in POLICIES:
        for write in WRITES:
            points = [(xs[r["chunks"]], y(r[key])) for r in results if (r["policy"], r["write"]) == (policy, write)]
            path = " ".join(f"{x:.1f},{at:.1f}" for x, at in sorted(points))
            out.append(f'<polyline points="{path}" class="line {policy}{DASHES[write]}"/>')
    return out


def plot(results: list[dict]) -> str:
    body = panel(results, "hit_ratio", "Hit ratio", 20, 50, [0, 0.1, 0.2, 0.3, 0.4], lambda mark: f"{mark:.0%}")
    body += panel(results, "written_per_served", "Bytes written to disk per byte served", 420, 50,
                  [0, 0.25, 0.5, 1, 2, 4, 8, 16, 32], lambda mark: f"{mark:g}")  # fmt: skip
    for i, policy in enumerate(POLICIES):
        body.append(f'<line x1="{80 + 110 * i}" y1="322" x2="{110 + 110 * i}" y2="322" class="line {policy}"/>')
        body.append(f'<text x="{116 + 110 * i}" y="326">{policy}</text>')
    for i, write in enumerate(WRITES):
        body.append(
            f'<line x1="{420 + 120 * i}" y1="322" x2="{450 + 120 * i}" y2="322" class="line axis{DASHES[write]}"/>'
        )
        body.append(f'<text x="{456 + 120 * i}" y="326">{write}</text>')
    body.append('<text x="400" y="300" text-anchor="middle" class="note">chunks the store holds</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 340" role="img" aria-label="Policies on a trace">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = play(options.file)
    print(table(results), end="")
    if options.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + table(results) + END + rest.split(END)[1])
        PLOT.write_text(plot(results))


if __name__ == "__main__":
    main()
