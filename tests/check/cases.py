"""Every test that tests/cases.md names exists."""

import re

import sources

TABLE = "tests/cases.md"
NAMED = re.compile(r"`([\w/]+\.\w+):(\w+)`")


def missing(table: str, read=sources.text) -> list[str]:
    found = []
    for number, line in enumerate(table.splitlines(), 1):
        for path, name in NAMED.findall(line):
            try:
                known = re.search(rf"\b{name}\b", read(path)) is not None
            except OSError:
                known = False
            if not known:
                found.append(f"{TABLE}:{number}: there is no test {name} in {path}")
    return found
