"""Rules that every file of the checkout keeps, whatever its language."""

import pathlib
import re

MAX_LINES = 600  # 350 is the habit; above this a file has more than one reason to change
CODE = {".h", ".cc", ".cu", ".cuh", ".py", ".proto", ".cmake", ".sh", ".txt"}

# A path that exists on one machine alone; /tmp, /usr and /etc are everyone's.
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|work|Users|mnt)/[\w.-]+")


def violations(path: str, text: str) -> list[str]:
    found = []
    pure = pathlib.PurePath(path)
    lines = text.splitlines()
    if (pure.suffix in CODE or pure.name == "dev") and len(lines) > MAX_LINES:
        found.append(f"{path}: {len(lines)} lines; a file has at most {MAX_LINES}")
    for number, line in enumerate(lines, 1):
        match = MACHINE_PATH.search(line)
        if match:
            found.append(f"{path}:{number}: {match.group()} is a path of one machine")
    return found
