"""The demo's second act says how its processes ended, whatever they did, and leaves none behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "client" / "examples"))
import limited  # noqa: E402
import second_act  # noqa: E402

READY = """
import json, os, sys, time
print(json.dumps({"event": "ready", "pid": os.getpid()}), flush=True)
"""


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("os.abort()", "was ended by SIGABRT: "),
        ("sys.exit('no memory')", "ended with 1: no memory"),
        ("time.sleep(600)", "said nothing for 1 s and was killed"),
        ("os.close(1); time.sleep(600)", "did not end within 1 s and was killed"),
        ('print(\'{"event": "done"}\', flush=True); sys.stdin.read()', None),
    ],
)
def test_how_a_process_ended(tmp_path, monkeypatch, body, ended):
    script = tmp_path / "child.py"
    script.write_text(READY + body)
    monkeypatch.setattr(limited, "__file__", str(script))
    monkeypatch.setattr(second_act, "SILENCE", 1.0)
    monkeypatch.setattr(second_act, "TO_END", 1.0)
    with second_act._child([]) as events:
        seen = [event for event in events if event["event"] != "memory"]
    assert seen[0]["event"] == "ready"
    assert [event["message"] for event in seen if event["event"] == "ended"] == ([ended] if ended else [])
    assert not os.path.exists(f"/proc/{seen[0]['pid']}")


def test_memory_is_seen(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(READY + "kept = b'x' * 2**26\ntime.sleep(0.5)\ndel kept")
    monkeypatch.setattr(limited, "__file__", str(script))
    with second_act._child([]) as events:
        seen = [(event["data"], event["anonymous"]) for event in events if event["event"] == "memory"]
    assert min(max(sizes) for sizes in zip(*seen)) > 2**26


@pytest.mark.timeout(900)
def test_conversations_that_do_not_fit():
    """The act itself, with half of its tokens: DynamicCache cannot allocate, ours answers all, with the same texts."""
    command = [sys.executable, second_act.__file__, "--check", "--tokens", "1800", "400", "--device-memory", "18MiB"]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    answered = dict(re.findall(r"^  (\S.*?)  +(\d) of 4 ", out.stdout, re.MULTILINE))
    assert answered == {"DynamicCache": "1", "kvferry": "4", "DynamicCache, no limit": "4"}
    assert "4 of 4 answers were compared" in out.stdout
