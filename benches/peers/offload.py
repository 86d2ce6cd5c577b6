#!/usr/bin/env python3
"""Decoding with a part of the FFN on disk: Emberflow's policies and llama.cpp, in turns,
each in a memory cgroup of the same size.

usage: offload.py MODEL.gguf MODEL.ember [--shares 0.5,0.25] [--policies full,llmflash] [--sparsity auto]
           [--read-ahead 8192,128,4] [--rounds 5] [--tokens 32] [--prompt N] [--csv FILE] [--svg FILE]
           [--no-llama] [--no-default] [--quick]

For every share of the FFN in memory, `emberflow run --ffn-resident SHARE` names the bytes of
the whole process; the cgroup (version 1, root needed) gives those bytes to both programs, the
page cache included. llama.cpp runs with its defaults (`default`), and without repacking the
weights (`mmap`; --no-default leaves the other out, which takes minutes where memory is short), with the disk set to every read-ahead (KiB) that is asked for. Caches are
dropped before each run. With --prompt the rates are those of a prompt of N tokens instead (checkpoints of
`emberflow-lab synth`, of which a character is a token), and a share of 1 is what the disk takes from it. A program that the kernel kills for memory counts as 0 tokens/s.
Prints the machine, medians and ranges, and what each is of llama.cpp's best. --quick is
a small mode that needs no rights: one round of a few tokens without cgroups, caches as
they are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from html import escape

from common import COLOURS, letters, machine, write_csv

HERE = os.path.dirname(os.path.abspath(__file__))
CGROUP = "/sys/fs/cgroup/memory/emberflow-offload"


def plain(command, timeout):
    """Standard output of a command as it is; None if it failed or took too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[:3])}: no result in {timeout} s", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"{command[0]}: {done.returncode} {done.stderr[-200:]}", file=sys.stderr)
        return None
    return done.stdout


def capped(command, limit, options):
    """As `plain`, in a memory cgroup and with nothing in the page cache, unless it is a small run."""
    if options.quick:
        return plain(command, options.timeout)
    subprocess.run(["sync"], check=True)
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")
    os.makedirs(CGROUP, exist_ok=True)
    try:
        if limit:
            with open(f"{CGROUP}/memory.limit_in_bytes", "w") as file:
                file.write(str(limit))
        enter = f'echo $$ > {CGROUP}/cgroup.procs; exec "$@"'
        shell = ["bash", "-c", enter, "bash"] if limit else []
        return plain(shell + command, options.timeout)
    finally:
        os.rmdir(CGROUP)


def emberflow(options, share, policy, limit):
    command = [options.emberflow, "run", options.ember, "-p", letters(options.prompt - 1) or "abc"]
    command += ["--ignore-eos", "--json", "--context", str(max(options.prompt, options.tokens) + 64)]
    command += ["-n", str(1 if options.prompt else options.tokens + 1), "--threads", str(options.threads)]
    command += ["--ffn-resident", str(share), "--policy", policy, "--sparsity", options.sparsity]
    output = capped(command, limit, options)
    return json.loads(output) if output else None


def llama(options, path, repack, limit):
    command = [sys.executable, os.path.join(HERE, "llama_cpp_rates.py"), path]
    decode = 0 if options.prompt else options.llama_tokens
    command += [str(options.threads), str(decode), str(options.prompt), "repack" if repack else "mmap"]
    output = capped(command, limit, options)
    return float(output.split()[-2 if options.prompt else -3]) if output else 0.0


class ReadAhead:
    """The read-ahead of the disk under a file, for a while."""

    def __init__(self, path, kib):
        device = os.stat(path).st_dev
        here = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        disk = here if os.path.exists(f"{here}/queue") else os.path.dirname(here)
        self.setting = f"{disk}/queue/read_ahead_kb"
        with open(self.setting) as file:
            self.before = file.read().strip()
        self.set(kib)

    def set(self, kib):
        with open(self.setting, "w") as file:
            file.write(str(kib))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.set(self.before)


def chart(rows, path):
    """Tokens per second by share in memory, one line per name."""
    names = sorted({row["name"] for row in rows})
    shares = [row["share"] for row in rows]
    top = max(row["median"] for row in rows) * 1.1 or 1.0
    left, right = min(shares), max(max(shares), min(shares) + 1e-9)
    x = lambda share: 60 + 480 * (share - left) / (right - left)
    y = lambda rate: 330 - 300 * rate / top
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 380" font-family="sans-serif" '
             'font-size="12"><rect width="760" height="380" fill="white"/>'
             '<text x="60" y="14">tokens/s by share of the FFN in memory</text>'
             f'<text x="60" y="27" font-size="9" fill="#555">{escape(machine())}</text>']
    for i in range(6):
        rate = top * i / 5
        parts.append(f'<line x1="60" x2="540" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#dee2e6"/>'
                     f'<text x="52" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.1f}</text>')
    for share in sorted(set(shares)):
        parts.append(f'<text x="{x(share):.1f}" y="350" text-anchor="middle">{share:.0%}</text>')
    for i, name in enumerate(names):
        colour = COLOURS[i % len(COLOURS)]
        points = sorted((r["share"], r["median"]) for r in rows if r["name"] == name)
        line = " ".join(f"{x(s):.1f},{y(m):.1f}" for s, m in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(m):.1f}" r="3" fill="{colour}"/>' for s, m in points]
        parts.append(f'<text x="560" y="{40 + 18 * i}" fill="{colour}">{name}</text>')
    with open(path, "w") as file:
        file.write("\n".join(parts) + "</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("ember")
    parser.add_argument("--emberflow", default="target/release/emberflow")
    parser.add_argument("--shares", default="0.5,0.25")
    parser.add_argument("--policies", default="full,llmflash")
    parser.add_argument("--sparsity", default="auto")
    parser.add_argument("--read-ahead", default="8192,128,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--llama-tokens", type=int, default=4)
    parser.add_argument("--no-llama", action="store_true")
    parser.add_argument("--no-default", action="store_true")
    parser.add_argument("--timeout", type=int, default=180)
    parser.add_argument("--csv")
    parser.add_argument("--svg")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.tokens, options.shares, options.read_ahead = 1, 4, "0.5,1", ""

    phase = "prefill" if options.prompt else "decode"
    rates = {}
    for share in map(float, options.shares.split(",")):
        # A first run says how many bytes the whole process is given.
        probe = emberflow(options, share, "full", 0)
        if not probe:
            sys.exit(f"{options.emberflow} does not run {options.ember} with {share:.0%} of the FFN in memory")
        limit = probe["memory"]["budget_bytes"]
        for _ in range(options.rounds):
            for policy in options.policies.split(","):
                report = emberflow(options, share, policy, limit)
                rate = report[f"{phase}_tokens_per_s"] if report else 0.0
                rates.setdefault((share, f"emberflow {policy}"), []).append(rate)
                if report:
                    io, ms = report["io"], report["latency_ms"]
                    print(f"{share:.0%} {policy}: {rate:.2f} tok/s, waited {io['wait_share']:.1%}, "
                          f"hits {report['cache']['cold_hit_rate']:.1%}, p99/mean "
                          f"{ms['p99'] / max(ms['mean'], 1e-9):.2f}, peak {report['memory']['peak_rss_bytes'] >> 20} "
                          f"of {limit >> 20} MiB, {report['logits_hash']}", file=sys.stderr)
            if options.no_llama:
                continue
            runs = [] if options.no_default else [("llama.cpp default", True, None)]
            for read_ahead in filter(None, options.read_ahead.split(",")):
                name = f"llama.cpp mmap, read-ahead {read_ahead} KiB"
                runs.append((name, False, int(read_ahead)))
            for name, repack, read_ahead in runs:
                if read_ahead is None:
                    rate = llama(options, options.gguf, repack, limit)
                else:
                    with ReadAhead(options.gguf, read_ahead):
                        rate = llama(options, options.gguf, repack, limit)
                rates.setdefault((share, name), []).append(rate)
                print(f"{share:.0%} {name}: {rate:.3f} tok/s", file=sys.stderr)

    print(f"machine: {machine()}")
    rows = []
    for (share, name), values in rates.items():
        rows.append({"share": share, "name": name, "median": statistics.median(values),
                     "low": min(values), "high": max(values)})
    for share in sorted({row["share"] for row in rows}):
        here = [row for row in rows if row["share"] == share]
        best = max((r["median"] for r in here if r["name"].startswith("llama.cpp")), default=0.0)
        print(f"\n{share:.0%} of the FFN in memory, {options.threads} threads, {options.rounds} rounds in turns")
        for row in here:
            ratio = f", {row['median'] / best:.1f} of llama.cpp's best" if best else ""
            print(f"{row['name']:36} {row['median']:8.3f} tok/s ({row['low']:.3f} to {row['high']:.3f}){ratio}")
    if options.csv:
        columns = ["share", "name", "median", "low", "high"]
        write_csv(options.csv, columns, ([row[column] for column in columns] for row in rows))
    if options.svg:
        chart(rows, options.svg)


if __name__ == "__main__":
    main()
