"""The demo's second act: four long conversations in a process that has memory for one; limited.py is that process."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import limited
import stage

from kvferry.sizes import format_size

THREAD_STACKS = "1 MiB"  # what `ulimit -s 1024` below gives a thread; all of it counts as VmData, used or not
# glibc gives a larger tensor's memory back as soon as it is freed; and what one of gRPC's threads frees, all may have.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
SILENCE = 300.0  # seconds without a word after which a child is given up; a forward pass takes 2 on idle cores
TO_END = 30.0  # seconds from its last word to its end; closing a store takes gRPC up to ten
SAMPLE = 0.02  # seconds between two looks at a child's memory


@dataclass
class Outcome:
    """What became of the conversations with one cache; bytes."""

    name: str
    ready: dict = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)  # token ids
    failure: str = ""
    data: int = 0  # the most there was, as limited.memory has it
    anonymous: int = 0
    service: int | None = None


def show(check: bool, *options: str) -> None:
    """Runs and shows it all, with `options` of limited.py; exits with a message if our cache did not do what it
    promises."""
    print(f"\n\nSecond act: {len(limited.ASKED)} conversations in a process that has memory for the KV of one")
    with stage.kvferryd("1GiB") as url:
        stock = _converse("DynamicCache", *options)
        ours = _converse("kvferry", f"--url={url}", *options, url=url)
    rows = [stock, ours]
    if check:
        rows.append(_converse("DynamicCache", "--unlimited", *options))
    _show_table(rows)
    if ours.failure:
        sys.exit(f"\nkvferry did not answer all: {ours.failure}")
    for row in rows:
        if row.answers != ours.answers[: len(row.answers)]:
            sys.exit(f"\nThe texts of {row.name} and kvferry differ. This is a bug: please report it.")
    compared = len(rows[-1 if check else 0].answers)
    print(f"\n  {compared} of {len(limited.ASKED)} answers were compared with DynamicCache's, token by token"
          + (", and are equal." if compared else ".") + ("" if check else " --check compares all."))  # fmt: skip
    if not stock.failure:
        print("\n  RLIMIT_DATA does not seem to be enforced here: DynamicCache was given all it asked for.")


def _converse(cache: str, *options: str, url: str | None = None) -> Outcome:
    limit = "--unlimited" not in options
    outcome = Outcome(cache if limit else f"{cache}, no limit")
    number, live = 0, sys.stdout.isatty()
    start = "\r" if live else ""
    with _child([cache, *options]) as events:
        for event in events:
            match event.pop("event"):
                case "memory":
                    outcome.data = max(outcome.data, event["data"])
                    outcome.anonymous = max(outcome.anonymous, event["anonymous"])
                case "ready":
                    outcome.ready = event
                    if cache == "DynamicCache" and limit:
                        _explain(event)
                    print(f"\n{outcome.name}\n")
                case "conversation":
                    number = event["number"]
                case "read" if outcome.ready and live:
                    print(f"\r  {number + 1}. {event['tokens']:,} tokens", end="", flush=True)
                case "answer":
                    outcome.answers.append(event["ids"])
                    licence, _, question = limited.ASKED[number]
                    text = textwrap.fill(" ".join(event["text"].split()), 110)
                    print(f"{start}  {number + 1}. {licence}: {question} ({event['seconds']:.1f} s)")
                    print(textwrap.indent(text, "     "))
                case "done" if url:
                    outcome.service = stage.service_bytes(url)
                case "failed" | "ended":
                    outcome.failure = event["message"]
                    text = f"  {number + 1}. {limited.ASKED[number][0]}, {event['message']}"
                    print(start + textwrap.fill(text, 115, subsequent_indent="     "))
    if not outcome.ready:
        sys.exit(f"The process with {outcome.name} {outcome.failure}")
    return outcome


@contextlib.contextmanager
def _child(arguments: list[str]) -> Iterator[Iterator[dict]]:
    """What a limited.py says, what memory it has between, and how it ended if that was not as it should."""
    command = ["sh", "-c", 'ulimit -S -s 1024; exec "$@"', "sh", sys.executable, limited.__file__, *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                   env={**os.environ, **MALLOC})  # fmt: skip
        try:
            yield _events(process, log)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def _events(process: subprocess.Popen, log) -> Iterator[dict]:
    heard, pending, ready = time.monotonic(), b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if ready:
                with contextlib.suppress(OSError, KeyError):  # it may be ending
                    data, anonymous = limited.memory(process.pid)
                    yield {"event": "memory", "data": data, "anonymous": anonymous}
            if selector.select(SAMPLE):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                heard = time.monotonic()
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    name = event["event"]
                    ready = ready or name == "ready"
                    yield event
                    if name == "done":
                        process.stdin.close()
            elif time.monotonic() - heard > SILENCE:
                yield {"event": "ended", "message": f"said nothing for {SILENCE:.0f} s and was killed"}
                return
    try:
        code = process.wait(TO_END)
    except subprocess.TimeoutExpired:
        yield {"event": "ended", "message": f"did not end within {TO_END:.0f} s and was killed"}
        return
    if code != 0:
        log.seek(0)
        last = (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        yield {"event": "ended", "message": f"{how}: {last}"}


def _explain(ready: dict) -> None:
    count = len(limited.ASKED)
    text = f"""
        Each conversation has {ready["shortest"]:,} tokens or a few more. The first {ready["shared"]:,} are the same,
        the GPL; then come another licence and a question about it. To save time the first are read once and the
        conversation is copied for the others: DynamicCache copies its tensors, kvferry shares what is in the store. All
        stay open. Their KV takes {format_size(ready["kv"])} each, {format_size(count * ready["kv"])} in all.

        Each cache gets a process of its own, which does the same. With the model loaded and warm it has
        {format_size(ready["data"])} of private memory (VmData); RLIMIT_DATA lets it have
        {format_size(ready["room"])} more: {format_size(ready["kv"])} for the KV of one conversation,
        {format_size(ready["needed"])} for what a pass of {limited.CHUNK_TOKENS} tokens computes with, and
        {format_size(limited.SPARE)} to spare. For both
        {" ".join(f"{name}={value}" for name, value in MALLOC.items())}, and threads have stacks of {THREAD_STACKS}.
        kvferry has device_memory={ready["device_memory"]!r} for each conversation, the rest lies in kvferryd."""
    for paragraph in text.split("\n\n"):
        print("\n" + textwrap.fill(" ".join(paragraph.split()), 118, initial_indent="  ", subsequent_indent="  "))


def _show_table(rows: list[Outcome]) -> None:
    cells = []
    for row in rows:
        ready = row.ready
        limit = "none" if row.name.endswith("no limit") else format_size(ready["room"])
        data, anonymous = row.data - ready["data"], row.anonymous - ready["anonymous"]
        cells.append((row.name, f"{len(row.answers)} of {len(limited.ASKED)}", limit, format_size(data),
                      format_size(anonymous), "none" if row.service is None else format_size(row.service)))  # fmt: skip
    head = ("", "answered", "may grow by", "VmData grew by", "RssAnon grew by", "KV in kvferryd")
    stage.print_table(head, cells, 2)
    print("\n  Growth: the most that was seen since the model was loaded and warm.")


if __name__ == "__main__":
    show("--check" in sys.argv, *(option for option in sys.argv[1:] if option != "--check"))
