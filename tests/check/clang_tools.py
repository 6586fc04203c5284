"""clang-format on all of our C++, clang-tidy on what changed."""

import concurrent.futures
import json
import os
import pathlib
import subprocess

import sources

DATABASES = ("build/check", "build/release")  # the second for what includes torch


def badly_formatted(paths: list[str]) -> list[str]:
    result = subprocess.run(["clang-format-14", "--dry-run", "-Werror", *paths], cwd=sources.ROOT, capture_output=True,
                            text=True)
    first_lines = [line for line in result.stderr.splitlines() if "clang-format-violations" in line]
    bad = sorted({line.split(":")[0].removeprefix(f"{sources.ROOT}/") for line in first_lines})
    if result.returncode != 0 and not bad:
        return [f"clang-format-14: {result.stderr.strip() or result.returncode}"]
    return [f"{path}: format it with `clang-format-14 -i {path}`" for path in bad]


def default_base() -> str | None:
    """Where this branch left origin/main, or the commit before this one; None where there is neither."""
    head = sources.git("rev-parse", "HEAD").strip()
    for candidate in (["merge-base", "HEAD", "origin/main"], ["rev-parse", "--verify", "HEAD~1"]):
        try:
            base = sources.git(*candidate).strip()
        except subprocess.CalledProcessError:
            continue
        if base != head:
            return base
    return None


def changed_since(base: str | None) -> list[str]:
    if base is None:
        return sources.files()
    new = sources.git("ls-files", "--others", "--exclude-standard").splitlines()
    return sorted(set(sources.git("diff", "--name-only", "--diff-filter=d", base).splitlines()) | set(new))


def compiled_in() -> dict[str, str]:
    """Every file that a build compiles -> the folder of that build's compile commands."""
    found: dict[str, str] = {}
    for folder in DATABASES:
        database = sources.ROOT / folder / "compile_commands.json"
        if database.is_file():
            for entry in json.loads(database.read_text()):
                found.setdefault(os.path.relpath(entry["file"], sources.ROOT), folder)
    return found


def to_tidy(changed: list[str], compiled: dict[str, str]) -> list[str]:
    """The changed files that are compiled; for a changed header the file of the same name, which includes it."""
    headers = [pathlib.PurePath(path) for path in changed if path.endswith(".h")]
    candidates = set(changed) | {str(header.with_suffix(".cc")) for header in headers}
    return sorted(path for path in candidates if path.endswith(".cc") and path in compiled)


def tidy(paths: list[str], compiled: dict[str, str]) -> list[str]:
    def run(path: str) -> list[str]:
        # The release build is g++'s: its OpenMP header is not clang's.
        command = ["clang-tidy-14", "--quiet", "-p", compiled[path], "--extra-arg=-fno-openmp",
                   "--extra-arg=-Wno-unknown-warning-option", path]
        result = subprocess.run(command, cwd=sources.ROOT, capture_output=True, text=True)
        print(f"clang-tidy {path}", flush=True)
        return [] if result.returncode == 0 else [result.stdout.strip() or result.stderr.strip()]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [finding for findings in pool.map(run, paths) for finding in findings]
