"""Who may include whom: the arrows of the layout, kept by reading every #include of our C++."""

import re

FOLDERS = ("storage/base", "storage/disk", "storage", "kernels", "proto", "service", "client", "tests")

# A folder may include itself and these. Longest prefix wins; nobody includes service, client or tests.
MAY_INCLUDE = {
    "storage/base": (),
    "kernels": ("storage/base",),
    "storage/disk": ("storage/base",),
    "storage": ("storage/base", "storage/disk", "kernels/copy"),
    "proto": ("storage/base",),
    "service": ("proto", "storage", "storage/base"),
    "client": ("proto", "kernels", "storage/base"),
    # What embeds a store: the transport, and the one place that makes it from a URL.
    "client/local_transport": ("client", "storage", "storage/base"),
    "client/connect.cc": ("client", "storage", "storage/base"),
    "tests": FOLDERS,
}

# Libraries that stay where they belong: the rest of the code builds and is tested without them.
LIBRARIES = {
    "torch": (re.compile(r"(torch|ATen|c10)/"), ("client/cache", "client/python", "tests")),
    "gRPC": (re.compile(r"(grpc|grpcpp)/"), ("proto", "service", "client", "tests")),
    "protobuf": (re.compile(r"google/protobuf/|.*\.pb\.h$"), ("proto", "service", "client", "tests")),
}
NOT_IN_CUDA = re.compile(r"(torch|ATen|c10|grpc|grpcpp|google/protobuf|absl)/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def under(path: str, folder: str) -> bool:
    """Whether path lies in the folder, or is a file whose name starts like it (kernels/copy: copy.h)."""
    return path.startswith(folder + "/") or re.match(re.escape(folder) + r"([._][^/]*)?$", path) is not None


def rule_of(path: str) -> str | None:
    return max((prefix for prefix in MAY_INCLUDE if under(path, prefix)), key=len, default=None)


def folder_of(path: str) -> str | None:
    return max((folder for folder in FOLDERS if path.startswith(folder + "/")), key=len, default=None)


def may_include(rule: str, target: str) -> bool:
    return any(folder_of(target) == allowed or (allowed not in FOLDERS and under(target, allowed))
               for allowed in MAY_INCLUDE[rule])


def violations(path: str, text: str) -> list[str]:
    rule = rule_of(path)
    if rule is None:
        return []
    found = []
    for match in INCLUDE.finditer(text):
        quote, target = match.groups()
        at = f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}"
        if path.endswith((".cu", ".cuh")) and NOT_IN_CUDA.match(target):
            found.append(f"{at}: CUDA files take raw pointers and a stream, and include no {target}")
        for library, (pattern, homes) in LIBRARIES.items():
            if pattern.match(target) and not any(under(path, home) for home in homes):
                found.append(f"{at}: includes {target}; {library} stays in {', '.join(homes)}")
        if quote == '"' and "/" not in target:
            found.append(f'{at}: "{target}" is to be named from the root of the checkout')
        included = folder_of(target)
        if included is None or included == folder_of(path):
            continue
        if not may_include(rule, target):
            found.append(f"{at}: {rule} may not include {target}; it may include "
                         f"{', '.join(MAY_INCLUDE[rule]) or 'itself alone'}")
    return found
