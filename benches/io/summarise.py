"""Medians of what compare_fio.sh measured, as a CSV of all points and a table of the best ones."""

import csv
import json
import os
import re
import statistics
import sys
from pathlib import Path

SIZES = ["4KiB", "8KiB", "24KiB", "64KiB", "512KiB", "seq"]
# CPU time is compared at the same depth, where the device is nearly full.
CPU_DEPTH = 32


def machine():
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:model name|Hardware)\s*:\s*(.*)$", text, re.M)
    name = found.group(1) if found else os.uname().machine
    name = re.sub(r"\((R|TM|r|tm)\)|CPU|Processor|@", " ", name)
    return re.sub(r"[^a-z0-9.]+", "-", f"{name} {os.cpu_count()}c".lower()).strip("-")


def from_fio(path):
    job = json.loads(path.read_text())["jobs"][0]
    read = job["read"]
    # Percent of the run time; the time before counting starts is in neither.
    cpu_us = (job["usr_cpu"] + job["sys_cpu"]) / 100 * read["runtime"] * 1000
    return read["bw_bytes"] / 1e6, cpu_us / max(read["total_ios"], 1)


def collect(raw):
    """(size, engine, depth) -> [(mb_per_s, cpu of reading, cpu of the whole process)]"""
    points = {}
    for path in sorted(raw.glob("fio.*.json")):
        _, _, size, depth, _ = path.name.split(".")
        speed, cpu = from_fio(path)
        points.setdefault((size, "fio", int(depth)), []).append((speed, cpu, cpu))
    for path in sorted(raw.glob("ours.*.json")):
        size = path.name.split(".")[2]
        for p in json.loads(path.read_text())["points"]:
            at = (size, p["engine"], p["depth"])
            cpu = (p["io_cpu_us_per_read"], p["cpu_us_per_read"])
            points.setdefault(at, []).append((p["mb_per_s"], *cpu))
    return points


def median(rows):
    return [statistics.median(column) for column in zip(*rows)]


def table(raw, out):
    points = collect(raw)
    medians = {at: median(rows) for at, rows in points.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            ["size", "engine", "depth", "mb_per_s", "min", "max", "io_cpu_us_per_read",
             "cpu_us_per_read", "rounds"]
        )
        for at, (speed, io_cpu, cpu) in medians.items():
            speeds = [row[0] for row in points[at]]
            numbers = (speed, min(speeds), max(speeds), io_cpu, cpu)
            rows.writerow([*at, *(f"{n:.2f}" for n in numbers), len(speeds)])

    def best(size, engine):
        return max(m[0] for (s, e, _), m in medians.items() if (s, e) == (size, engine))

    print(f"medians of {max(map(len, points.values()))} rounds; MB/s at each one's best depth;")
    print(f"CPU µs per read at depth {CPU_DEPTH}: fio's process, our I/O thread, our process\n")
    print("| read | fio | uring | ratio | pread | ratio | CPU fio | CPU uring | ratio | process | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        fio, uring, pread = (best(size, engine) for engine in ("fio", "uring", "pread"))
        theirs = medians[size, "fio", CPU_DEPTH][1]
        _, ours, whole = medians[size, "uring", CPU_DEPTH]
        print(
            f"| {size} | {fio:.0f} | {uring:.0f} | {uring / fio:.2f} | {pread:.0f} | "
            f"{pread / fio:.2f} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | "
            f"{whole:.2f} | {whole / theirs:.2f} |"
        )
    print(f"\nall points: {out}")


if sys.argv[1] == "machine":
    print(machine())
else:
    table(Path(sys.argv[2]), Path(sys.argv[3]))
