"""Run `linop verify --torch` on parallel programs and hold its reports against their FAULT.

    python score.py [FILE ...] [--seeds 0:52]

The default is every program beside this one, in both versions. The command sees copies without
docstring, FAULT and name (`oracle.stripped`). Printed: for each version the verdict, the kinds and
the places that were right, and the seconds; in the end the counts. `--seeds` adds right programs,
drawn by right.py. The exit status is 1 if a right program is alarmed on, a wrong one is not found,
or other parameters are named than FAULT's."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import oracle
from linop.testing import check_parallel
from linop.testing.parallel.recording.programs import of_file
from linop.testing.parallel.twins.relations import Kind

MAPPING = {
    "factor": {Kind.FACTOR},
    "missing sum": {Kind.UNSUMMED},
    "sum over the wrong": {Kind.WRONG_RANKS},
    "gradient of another shard": {Kind.SHARD},
    "no gradient": {Kind.NONE},
    "statistics per rank": {Kind.STATISTICS},
    "bias counted by every rank": {Kind.FACTOR},
    "mean of unequal means": {Kind.FACTOR},
    "wrong split in a backward all-to-all": {Kind.SHARD},
    "range off by one": {Kind.OTHER},
    "other": set(Kind) - {Kind.EQUAL},
}
"""Kinds of FAULT, by their beginnings, and those of the closed list that they map to. `other` of
FAULT is what the oracle cannot classify from gradients alone: the command may know better."""


def mapped(kind):
    return next(found for name, found in MAPPING.items() if kind.startswith(name))


def places(report, path, fault):
    """Is one of the report's places one of FAULT's?"""
    if "place" not in fault:
        return None
    for one in report.findings:
        texts = [f"{one.place}", one.operator, one.origin]
        for place in fault["place"]:
            if any(place in text for text in texts):
                return True
        lines = [one.place.line, *(each.split(": ")[0] for each in one.place.also)]
        for line in lines:
            number = line.rpartition(":")[2]
            if number.isdigit() and oracle.placed(path, fault, line=int(number)):
                return True
        if oracle.placed(path, fault, module=one.place.module):
            return True
    return False


def operators(report, fault):
    """Does an operator of the report have one of FAULT's words, and an explanation what FAULT
    wants to be said?"""
    if "operator" not in fault:
        return None
    found = [one for one in report.findings
             if any(word in one.operator for word in fault["operator"])]  # fmt: skip
    return any(fault.get("says", "") in one.explanation for one in found)


def checked(path, fault, version, counts, loud):
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "program.py"
        copy.write_text(oracle.stripped(path))
        os.environ["CASE"] = version
        begin = time.monotonic()
        try:
            report = check_parallel(of_file(str(copy)), workers=oracle.constants(str(copy))[0])
        except Exception as error:
            print(f"{Path(path).stem:24} {version:5} FAILED: {error}")
            counts["failed"] += 1
            return
        took = time.monotonic() - begin
    counts["slowest"] = max(counts["slowest"], round(took))
    if version == "right":
        counts["right"] += 1
        counts["alarms"] += not report.passed
        notes = [note for note in report.notes if note.startswith("no places")]
        says = "ok" if report.passed else "ALARM"
        print(f"{Path(path).stem:24} right {took:4.0f} s  {says} {notes or ''}", flush=True)
        if not report.passed:
            print(report)
        return
    wrong = {name for name, one in report.parameters.items() if one.kind is not Kind.EQUAL}
    named = wrong == set(fault["parameter"]) and not report.passed
    if fault["factor"] == 0:  # times zero
        fault = {**fault, "accept": [*fault.get("accept", []), "no gradient"]}
    allowed = {n: set().union(*map(mapped, oracle.kinds(fault, n))) for n in fault["parameter"]}
    kinds = all(report.parameters[n].kind in allowed[n] for n in wrong & allowed.keys())
    place = places(report, path, fault)
    counts.update({"wrong": 1, "found": not report.passed, "parameters": named, "kinds": kinds})
    counts["places"] += place is not False
    operator = operators(report, fault)
    counts["operators"] += operator is not False
    marks = {True: "right", False: "NOT RIGHT", None: "not asked"}
    print(
        f"{Path(path).stem:24} wrong {took:4.0f} s  parameters {marks[named]}, kinds {marks[kinds]}"
        f" ({', '.join(sorted({str(one.kind) for one in report.findings}))} for "
        f"{fault['kind']}), place {marks[place]}"
        f", operator {marks[operator]}",
        flush=True,
    )
    if loud or not (named and kinds and place is not False and operator is not False):
        print(report)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--seeds", default="0:0")
    parser.add_argument("--loud", action="store_true", help="print all reports of wrong programs")
    options = parser.parse_args()
    here = Path(__file__).parent
    known = oracle.NOT_PROGRAMS
    files = options.files or sorted(str(p) for p in here.glob("*.py") if p.name not in known)
    counts = Counter(slowest=0)
    for path in files:
        _, fault = oracle.constants(path)
        for version in ("right", "wrong"):
            checked(path, fault, version, counts, options.loud)
    with tempfile.TemporaryDirectory() as folder:
        start, end = map(int, options.seeds.split(":"))
        for path in oracle.drawn(range(start, end), folder):
            checked(path, None, "right", counts, options.loud)
    for name in ("right", "alarms", "wrong", "found", "parameters", "kinds", "places", "operators"):
        print(f"{name:12} {counts[name]}")
    print(f"failed       {counts['failed']}")
    print(f"slowest      {counts['slowest']} s")
    bad = counts["alarms"] + counts["failed"] + counts["wrong"] - counts["parameters"]
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
