#!/usr/bin/env python3
"""What the program chooses by itself against everything that can be chosen.

    benches/plan/choices.py EMBERFLOW MODEL.ember.. [--shares 0.25,0.5,0.75,1] [--tokens N] [--prompt N]
                            [--chunks N,N,..] [--rounds N] [--csv FILE]

For every model and share of its FFN in memory, decoding is tried with all combinations of threads, ways to
read and kinds of sparsity, and a prompt with all chunks, all in the bytes of the automatic choice. Then the fastest of them and the automatic choice
take turns for --rounds rounds, whose medians are compared: a single fast moment is no choice. Prints one row
for each, and in how many the automatic choice is within 10 %.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys


def run(program, model, *args):
    """The report of a run, or nothing if it was refused."""
    command = [f"{program}-lab", "run", model, "--ignore-eos", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout) if done.returncode == 0 else None


def compare(options, rate, ways):
    """The fastest of some ways beside none, their medians in turns."""
    first = {way: rate(way) for way in ways}
    best = max(first, key=first.get)
    rates = {(): [], best: []}
    for _ in range(options.rounds):
        for way, of_way in rates.items():
            of_way.append(rate(way))
    return best, statistics.median(rates[()]), statistics.median(rates[best])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--shares", default="0.25,0.5,0.75,1")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--chunks", default="16,32,64,128,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv")
    options = parser.parse_args()

    threads = [str(n) for n in range(1, os.cpu_count() + 1)]
    ways = [("--threads", n, "--io", io, "--sparsity", sparsity)
            for n, io, sparsity in itertools.product(threads, ["uring", "pread"], ["dense", "exact"])]
    chunks = [("--chunk", chunk) for chunk in options.chunks.split(",")]
    # A letter is a token of the checkpoints that `emberflow-lab synth` makes, and of the bundled model about one.
    text = "a" * (options.prompt - 1)
    rows = []
    for model, share in itertools.product(options.models, options.shares.split(",")):
        texts = {"decode": ["-p", "abc", "-n", str(options.tokens)],
                 "prefill": ["-p", text, "-n", "1", "--context", str(options.prompt + 32)]}
        for what, choices in [("decode", ways), ("prefill", chunks)]:
            automatic = run(options.program, model, "--ffn-resident", share, *texts[what])
            if not automatic:
                sys.exit(f"{options.program} does not run {model} with {share} of the FFN in memory")
            memory = str(automatic["memory"]["budget_bytes"])

            def rate(way, what=what, model=model, memory=memory):
                report = run(options.program, model, "--memory", memory, *texts[what], *way)
                return report[f"{what}_tokens_per_s"] if report else 0.0

            best, automatic, fastest = compare(options, rate, choices)
            rows.append([os.path.basename(model), share, what, automatic, fastest, automatic / max(fastest, 1e-9),
                         " ".join(best)])
            name, _, _, _, _, ratio, _ = rows[-1]
            print(f"{name} {float(share):.0%} {what}: {automatic:.2f} tok/s, {ratio:.2f} of {fastest:.2f} with "
                  f"{rows[-1][-1]}", flush=True)
    within = sum(row[5] >= 0.9 for row in rows)
    print(f"{within} of {len(rows)} automatic choices within 10 % of the best")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "share", "what", "automatic", "best", "ratio", "choice"])
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
