"""Adds up the test reports of ./dev test. The last line is "N passed, N failed, N skipped"; exits with 1 if any failed.

usage: count.py FOLDER SUITE...      SUITE: FOLDER/SUITE.xml of pytest, or FOLDER/SUITE/{ctest.xml,gtest/*.xml}
"""

import dataclasses
import pathlib
import sys
import xml.etree.ElementTree as xml


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add_cases(self, report: pathlib.Path) -> None:
        """The cases of a googletest or pytest report."""
        for case in xml.parse(report).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(name)
            elif skipped is not None:
                self.skipped.append((name, skipped.get("message") or (skipped.text or "").strip() or "no reason given"))
            elif case.get("status") == "notrun":
                self.skipped.append((name, "DISABLED_"))
            else:
                self.passed += 1

    def add_ctest(self, folder: pathlib.Path) -> None:
        """CTest's tests: the cases inside where it is a googletest, and what no case can tell: crash, leak, timeout."""
        for test in xml.parse(folder / "ctest.xml").iter("testcase"):
            name, status = test.get("name") or "", test.get("status")
            cases = Counts()
            report = folder / "gtest" / f"{name}.xml"
            if report.is_file():
                cases.add_cases(report)
            if status == "run" and not report.is_file():
                cases.passed += 1
            elif status in ("disabled", "notrun"):
                cases.skipped.append((name, f"ctest: {status}"))
            elif status == "fail" and not cases.failed:
                message = test.find("failure")
                cases.failed.append(f"{name} ({message.get('message') if message is not None else 'failed'}, "
                                    "though no single case did)")
            self.passed += cases.passed
            self.failed += cases.failed
            self.skipped += cases.skipped


def count_suite(folder: pathlib.Path, suite: str) -> Counts:
    counts = Counts()
    try:
        if (folder / suite).is_dir():
            counts.add_ctest(folder / suite)
        else:
            counts.add_cases(folder / f"{suite}.xml")
    except (OSError, xml.ParseError) as error:
        counts.failed.append(f"{suite}: its report cannot be read ({error}); it did not run to its end")
    return counts


def main() -> int:
    folder, suites = pathlib.Path(sys.argv[1]), sys.argv[2:]
    total = Counts()
    print(f"\n{'suite':10} {'passed':>7} {'failed':>7} {'skipped':>7}")
    for suite in suites:
        counts = count_suite(folder, suite)
        print(f"{suite:10} {counts.passed:7} {len(counts.failed):7} {len(counts.skipped):7}")
        total.passed += counts.passed
        total.failed += [f"{suite}: {name}" for name in counts.failed]
        total.skipped += [(f"{suite}: {name}", why) for name, why in counts.skipped]
    for name, why in total.skipped:
        print(f"skipped  {name}: {why}")
    for name in total.failed:
        print(f"FAILED   {name}")
    print(f"\n{total.passed} passed, {len(total.failed)} failed, {len(total.skipped)} skipped")
    return int(bool(total.failed) or total.passed == 0)


if __name__ == "__main__":
    sys.exit(main())
