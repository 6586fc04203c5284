"""The table of policies in storage/README.md is what the policies do."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import policies
import pytest


@pytest.fixture(scope="module")
def results():
    return policies.play(policies.TRACE)


def test_the_published_table_is_true(results):
    published = policies.README.read_text().split(policies.BEGIN)[1].split(policies.END)[0]
    assert policies.table(results) == published, "run tests/bench/policies.py --write"
    assert policies.PLOT.read_text() == policies.plot(results)


def test_the_default_is_the_one_the_table_recommends(results):
    """The most found, over all sizes and write policies."""
    found = dict.fromkeys(policies.POLICIES, 0.0)
    for result in results:
        found[result["policy"]] += result["hit_ratio"]
    header = (policies.ROOT / "storage" / "store.h").read_text()
    assert re.search(r"policy = PolicyKind::k(\w+);", header)[1].lower() == max(found, key=found.get)
