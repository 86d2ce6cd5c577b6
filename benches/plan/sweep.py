#!/usr/bin/env python3
"""Expected against achieved decode speed over budgets, from the smallest to the whole model.

    benches/plan/sweep.py EMBERFLOW [MODEL.ember] [--tokens N] [--budgets N] [--io ENGINE]

Before each run the reads that its plan needs are measured again (bench io), as shared disks change
their speed from minute to minute; the machine's own rates are those that `bench device` saved.
Prints one row per budget and how many are within 20 %.
"""

import argparse
import json
import subprocess
import sys

PROMPT = "The borrow checker"


def call(*args):
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("emberflow")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    program, model = args.emberflow, [args.model] if args.model else []
    disk = args.model or args.emberflow
    context = str(args.tokens + 16)

    plan = json.loads(call(program, "plan", *model, "--io", args.io, "--context", context, "--json"))
    low, high = plan["smallest_bytes"], plan["full_bytes"]
    print("  budget MiB   FFN  expected  achieved  ratio   wait ms: expected, achieved   hits: expected, achieved")
    within = 0
    for i in range(args.budgets):
        # The process of `run` is a little larger than that of `plan`.
        budget = low + (high - low) * i // (args.budgets - 1) + (1 << 20)
        if args.io == "auto":
            call(program, "bench", "io", disk, "--io", "uring", "--sizes", "4KiB,8KiB,24KiB,512KiB,seq",
                 "--depths", "1,2,4,64", "--ranges", "0", "--millis", "60", "--save")
        run = json.loads(call(program, "run", *model, "-p", PROMPT, "-n", str(args.tokens), "--ignore-eos",
                              "--memory", str(budget), "--io", args.io, "--json"))
        expected, achieved = run["plan"]["expected_tokens_per_s"], run["decode_tokens_per_s"]
        ratio = expected / achieved
        within += 1 / 1.2 <= ratio <= 1.2
        passes = run["generated_tokens"] + run["prompt_tokens"] / run["plan"]["chunk"]
        print(f"{budget / 2**20:12.1f} {run['memory']['ffn_resident_share']:5.2f} {expected:9.2f} {achieved:9.2f}"
              f" {ratio:6.2f} {run['plan']['expected_wait_ms']:14.2f} {run['io']['wait_ms'] / passes:13.2f}"
              f" {run['plan']['expected_cold_hit_rate']:15.3f} {run['cache']['cold_hit_rate']:9.3f}", flush=True)
    print(f"{within} of {args.budgets} within 20 %")


if __name__ == "__main__":
    main()
