#!/usr/bin/env python3
"""Expected against achieved decode speed over budgets, from the smallest to the whole FFN in memory.

    benches/plan/sweep.py EMBERFLOW [MODEL.ember] [--tokens N] [--budgets N] [--from MIB --step FACTOR]
                          [--runs N] [--io ENGINE] [--sparsity MODE] [--profiles as-they-are]
                          [--csv FILE] [--name NAME]

Achieved is what `run` does in the second half of its tokens, when the cache holds what the text needs:
the median of the runs at a budget, each of another text. Models without statistics are guessed at;
pack them with --stats of text that they generate. The machine's rates are measured again before each
budget and saved, and with --io auto the reads that a plan needs before each run (bench io), as
shared machines and disks change their speed from minute to minute; --profiles as-they-are leaves them.
A run beside which other programs take more than a tenth of the machine is repeated, up to --retries
times. With --step each budget is a factor larger than the one before, from --from MiB (or the smallest)
on. Prints one row per budget, how many are within 20 %, the largest step between neighbours up and down,
whether peaks kept to budgets, and whether the runs of a seed had one hash.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys

PROMPT = "# Ownership\n\nOwnership is"
DISTURBED = 0.10


def call(*args):
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr}")
    return done.stdout


def machine():
    """Jiffies of processor time that were used, and all."""
    with open("/proc/stat") as f:
        times = [int(n) for n in f.readline().split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)


def undisturbed(retries, *args):
    """What a command prints and the share of the machine that others used meanwhile: of the
    attempts the least disturbed one."""
    best = None
    for _ in range(1 + retries):
        used, total = machine()
        mine = os.times()
        out = call(*args)
        after, end = machine(), os.times()
        own = end.children_user + end.children_system - mine.children_user - mine.children_system
        others = (after[0] - used) / max(1, after[1] - total)
        others -= own * os.sysconf("SC_CLK_TCK") / max(1, after[1] - total)
        if best is None or others < best[0]:
            best = (others, out)
        if others < DISTURBED:
            break
    return best


def append(path, row):
    new = not os.path.exists(path)
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, row.keys(), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("emberflow")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--from", type=float, dest="first")
    parser.add_argument("--step", type=float)
    parser.add_argument("--sparsity", default="auto")
    parser.add_argument("--profiles", choices=["measured", "as-they-are"], default="measured")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--retries", type=int, default=2)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--csv")
    parser.add_argument("--name")
    args = parser.parse_args()
    program, model = args.emberflow, [args.model] if args.model else []
    disk = args.model or args.emberflow
    context = str(args.tokens + 16)

    plan = json.loads(call(program, "plan", *model, "--io", args.io, "--context", context,
                           "--sparsity", args.sparsity, "--json"))
    low, high = plan["smallest_bytes"], plan["full_bytes"]
    within, kept, speeds, hashes = 0, True, [], {}
    mode = ["--sparsity", args.sparsity]
    print("  budget MiB   FFN  expected  achieved  ratio   others   "
          "compute, wait ms: expected, wait achieved   MiB/token   hits: expected, achieved")
    for i in range(args.budgets):
        # The process of `run` is a little larger than that of `plan`.
        budget = low + (high - low) * i // (args.budgets - 1) + (2 << 20)
        if args.step:
            budget = int((args.first * 2**20 if args.first else low + (2 << 20)) * args.step**i)
        runs, disturbed = [], []
        if args.profiles == "measured":
            call(program, "measure-machine")
        for run in range(args.runs):
            if args.io == "auto" and args.profiles == "measured":
                call(program, "bench", "io", disk, "--io", "uring", "--sizes", "4KiB,8KiB,24KiB,512KiB,seq",
                     "--depths", "1,2,4,64", "--ranges", "0", "--millis", "60", "--save")
            others, out = undisturbed(
                args.retries, f"{program}-lab", "run", *model, "-p", PROMPT, "-n", str(args.tokens), "--ignore-eos",
                "--temp", "1", "--top-k", "40", "--seed", str(3 + run), "--memory", str(budget), "--io", args.io, "--json",
                *mode)
            report = json.loads(out)
            kept &= report["memory"]["peak_rss_bytes"] <= report["memory"]["budget_bytes"]
            hashes.setdefault(run, set()).add(report["logits_hash"])
            runs.append(report)
            disturbed.append(others)

        def median(get):
            return statistics.median(get(r) for r in runs)

        unsure = [r["plan"]["doubt"] or r["plan"]["disk_far"] or r["plan"]["machine_far"] for r in runs]

        row = {
            "model": args.name or runs[0]["model"],
            "io": args.io,
            "budget_mib": round(budget / 2**20, 1),
            "ffn_resident": round(runs[0]["memory"]["ffn_resident_share"], 3),
            "expected": round(median(lambda r: r["plan"]["expected_tokens_per_s"]), 2),
            "achieved": round(median(lambda r: r["settled"]["tokens_per_s"]), 2),
            # The median of the ratios: expected and achieved of one run belong together.
            "ratio": round(median(lambda r: r["plan"]["expected_tokens_per_s"]
                                  / r["settled"]["tokens_per_s"]), 2),
            "others": round(statistics.median(disturbed), 2),
            "compute_ms_expected": round(median(lambda r: r["plan"]["expected_compute_ms"]), 2),
            "wait_ms_expected": round(median(lambda r: r["plan"]["expected_wait_ms"]), 2),
            "wait_ms": round(median(lambda r: r["settled"]["wait_ms"]), 2),
            "mib_expected": round(median(lambda r: r["plan"]["expected_bytes_per_token"]) / 2**20, 3),
            "mib": round(median(lambda r: r["settled"]["bytes_per_token"]) / 2**20, 3),
            "hits_expected": round(median(lambda r: r["plan"]["expected_cold_hit_rate"]), 3),
            "hits": round(median(lambda r: r["settled"]["cold_hit_rate"]), 3),
            "limit": runs[0]["plan"]["limit"],
            "unsure": 2 * sum(map(bool, unsure)) > len(runs),
        }
        if args.csv:
            append(args.csv, row)
        within += 1 / 1.2 <= row["ratio"] <= 1.2
        print(f"{row['budget_mib']:12.1f} {row['ffn_resident']:5.2f} {row['expected']:9.2f} {row['achieved']:9.2f}"
              f" {row['ratio']:6.2f} {row['others']:8.2f} {row['compute_ms_expected']:12.2f}"
              f" {row['wait_ms_expected']:9.2f} {row['wait_ms']:9.2f} {row['mib_expected']:12.3f} {row['mib']:9.3f}"
              f" {row['hits_expected']:12.3f} {row['hits']:7.3f}  {row['limit']}"
              f"{' (unsure)' if row['unsure'] else ''}", flush=True)
        speeds.append(row["achieved"])
    steps = [after / before for before, after in zip(speeds, speeds[1:])]
    one = all(len(of_seed) == 1 for of_seed in hashes.values())
    print(f"{within} of {args.budgets} within 20 %, from one budget to the next times {min(steps):.2f} to {max(steps):.2f}, "
          f"peaks {'within' if kept else 'ABOVE'} budgets, {'one hash' if one else 'SEVERAL HASHES'} for each seed")


if __name__ == "__main__":
    main()
