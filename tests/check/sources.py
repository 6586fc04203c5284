"""The files of the checkout that the checks read: tracked ones and new ones, never ignored ones."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP = {".h", ".cc", ".cu", ".cuh"}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def files() -> list[str]:
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return sorted(path for path in set(listed) if (ROOT / path).is_file())


def is_cpp(path: str) -> bool:
    return pathlib.PurePath(path).suffix in CPP


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")
