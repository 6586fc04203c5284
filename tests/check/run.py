"""What ./dev check runs besides the clang build: prints every violation, exits with 1 if there is one.

usage: run.py [BASE]      BASE: the commit since which changed files are given to clang-tidy
"""

import subprocess
import sys
from collections.abc import Iterator

import cases
import clang_tools
import house_rules
import include_arrows
import sources


def ruff() -> list[str]:
    result = subprocess.run([sys.executable, "-m", "ruff", "check", "--output-format=concise", "."], cwd=sources.ROOT,
                            capture_output=True, text=True)
    return [] if result.returncode == 0 else [(result.stdout + result.stderr).strip()]


def checks(base: str | None) -> Iterator[tuple[str, list[str]]]:
    paths = sources.files()
    cpp = [path for path in paths if sources.is_cpp(path)]
    yield "clang-format", clang_tools.badly_formatted(cpp)
    yield "include arrows", [found for path in cpp for found in include_arrows.violations(path, sources.text(path))]
    yield "house rules", [found for path in paths for found in house_rules.violations(path, sources.text(path))]
    yield "cases have their tests", cases.missing(sources.text(cases.TABLE))
    yield "ruff", ruff()
    base = base or clang_tools.default_base()
    compiled = clang_tools.compiled_in()
    changed = clang_tools.to_tidy(clang_tools.changed_since(base), compiled)
    since = base[:10] if base else "the beginning"
    yield f"clang-tidy, {len(changed)} files changed since {since}", clang_tools.tidy(changed, compiled)


def main() -> int:
    failed = False
    for name, found in checks(sys.argv[1] if len(sys.argv) > 1 else None):
        print(f"{'FAILED' if found else 'ok':6}  {name}", *found, sep="\n    ", flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
