"""The checks find what they are there to find, and nothing in code that is right."""

import cases
import count
import house_rules
import include_arrows
import pytest


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("storage/base/key.cc", "storage/store.h"),
        ("storage/index.cc", "service/server.h"),
        ("storage/index.cc", "kernels/quantize.h"),
        ("kernels/copy_tokens.h", "storage/store.h"),
        ("proto/codec.cc", "storage/store.h"),
        ("service/server.cc", "client/transport.h"),
        ("client/grpc_transport.cc", "storage/store.h"),
        ("client/local_transport_pool/x.cc", "storage/store.h"),
        ("client/cache/cache.cc", "tests/support/model.h"),
        ("client/cache/cache.cc", "cache_impl.h"),
        ("storage/store.cc", "grpcpp/grpcpp.h"),
        ("kernels/quantize.cc", "torch/types.h"),
        ("client/transport.h", "ATen/core/TensorBody.h"),
        ("kernels/cuda/copy.cu", "absl/status/status.h"),
        ("storage/base/key.cc", "kvferry/v1/cache.pb.h"),
    ],
)
def test_forbidden_include(path: str, included: str) -> None:
    assert len(include_arrows.violations(path, f'// one\n#include "{included}"\n')) == 1


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("storage/index.cc", "storage/base/key.h"),
        ("storage/index.cc", "kernels/copy_tokens.h"),
        ("storage/index.cc", "absl/status/status.h"),
        ("proto/codec.cc", "kvferry/v1/cache.pb.h"),
        ("service/server.cc", "storage/store.h"),
        ("service/server.cc", "proto/codec.h"),
        ("client/local_transport.cc", "storage/store.h"),
        ("client/connect.cc", "storage/store.h"),
        ("client/cli/main.cc", "client/transport.h"),
        ("client/cache/cache.cc", "kernels/copy_tokens.h"),
        ("tests/client/cache_test.cc", "client/cache/cache.h"),
        ("tests/client/cache_test.cc", "service/server.h"),
    ],
)
def test_allowed_include(path: str, included: str) -> None:
    assert include_arrows.violations(path, f'#include "{included}"\n') == []


def test_names_file_and_line() -> None:
    (found,) = include_arrows.violations("proto/codec.h", '#pragma once\n#include "service/server.h"\n')
    assert found.startswith("proto/codec.h:2: proto may not include service/server.h")


def test_house_rules() -> None:
    assert house_rules.violations("storage/a.cc", "x\n" * 600) == []
    assert len(house_rules.violations("storage/a.cc", "x\n" * 601)) == 1
    assert len(house_rules.violations("a.md", "see /ho" + "me/someone/notes\n")) == 1
    assert house_rules.violations("a.md", "see a/home/page, /usr/bin/python3 and /tmp/kvferry.sock\n") == []


def test_cases_name_tests_that_exist() -> None:
    table = "| B01 | crop | `tests/a_test.cc:Crops` `tests/a_test.cc:Crop` |\n| B02 | none | issue 4 |\n"
    (found,) = cases.missing(table, read=lambda path: "TEST(Cache, Crops) {}")
    assert found == "tests/cases.md:1: there is no test Crop in tests/a_test.cc"


CTEST = """<testsuite tests="4">
  <testcase name="good_test" status="run"/>
  <testcase name="crash_test" status="fail"><failure message="SEGFAULT"/></testcase>
  <testcase name="leak_test" status="fail"><failure message=""/></testcase>
  <testcase name="script" status="run"/>
</testsuite>"""
GOOD = """<testsuites><testsuite name="S">
  <testcase name="A" status="run" result="completed" classname="S"/>
  <testcase name="B" status="run" result="completed" classname="S"><failure message="no"/></testcase>
  <testcase name="C" status="run" result="skipped" classname="S"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""
LEAK = '<testsuites><testsuite><testcase name="D" status="run" classname="S"/></testsuite></testsuites>'


def test_count_tells_crashes_and_leaks(tmp_path) -> None:
    (tmp_path / "release" / "gtest").mkdir(parents=True)
    (tmp_path / "release" / "ctest.xml").write_text(CTEST)
    (tmp_path / "release" / "gtest" / "good_test.xml").write_text(GOOD)
    (tmp_path / "release" / "gtest" / "leak_test.xml").write_text(LEAK)
    counts = count.count_suite(tmp_path, "release")
    assert counts.passed == 3  # S.A, S.D and the script
    assert [name.split(" ")[0] for name in counts.failed] == ["S.B", "crash_test", "leak_test"]
    assert counts.skipped == [("S.C", "no GPU")]


def test_count_of_a_run_that_did_not_finish(tmp_path) -> None:
    assert len(count.count_suite(tmp_path, "python").failed) == 1
