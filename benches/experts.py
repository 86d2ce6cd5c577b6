#!/usr/bin/env python3
"""What caches of experts miss and what reading experts ahead gains, on the bundled mixture of experts.

    benches/experts.py EMBERFLOW [MODEL] [--text FILE] [--tokens N] [--shares 0.25,0.5,0.75] [--new N]
                       [--rounds N] [--io ENGINE] [--sparsity exact|dense]

MODEL is demo-moe if none is named. Misses: the routing of --tokens tokens of the text is recorded and
replayed with caches of each share of the experts' bytes, the first tenth to warm up. Reading ahead: `run`
with --read-ahead off, on and auto in turns, each round another seed, --new tokens; medians, and the gain of a
mode is the median of its speed over that of off in the same round. The texts of a round have to be the same.
With --sparsity dense every neuron of a visited expert is needed, as in models without exact zeros; with exact,
experts with resident Gate rows read single neurons and nothing ahead.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HELDOUT = pathlib.Path(__file__).resolve().parent.parent / "models/demo/heldout.txt"
POLICIES = ["shipped", "lru", "lfu", "belady"]
MODES = ["off", "on", "auto"]


def call(*args):
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr}")
    return json.loads(done.stdout)


def misses(program, args):
    """Prints the miss rates of each policy at each share."""
    with tempfile.TemporaryDirectory() as folder:
        trace = f"{folder}/trace"
        call(program, "trace", "record", args.model, "-f", args.text, "-o", trace,
             "--limit", str(args.tokens), "--json")
        found = call(program, "trace", "simulate", trace, "--json",
                     "--cache", ",".join(f"{float(share):.0%}" for share in args.shares))
    rates = {(result["cache"], result["policy"]): result["miss_rate"] for result in found["results"]}
    print(f"misses: {found['model']}, {found['tokens']} tokens after {found['warm_up']} to warm up")
    print(f"\n| cache, of all experts | {' | '.join(POLICIES)} |\n|---{'|---' * len(POLICIES)}|")
    for share in args.shares:
        cells = (f"{rates[(float(share), policy)]:.1%}" for policy in POLICIES)
        print(f"| {float(share):.0%} | {' | '.join(cells)} |")


def read_ahead(program, args):
    print(f"\nreading ahead: {args.rounds} rounds of {args.new} tokens, --io {args.io}, --sparsity {args.sparsity}")
    print("\n| resident | mode | tokens/s (lowest to highest) | times off | guesses right | read ahead and used "
          "| waits | passes with it | gain that run tells |\n|---|---|---|---|---|---|---|---|---|")
    for share in args.shares:
        runs = {mode: [] for mode in MODES}
        for turn in range(args.rounds):
            for mode in MODES[turn % 3:] + MODES[:turn % 3]:
                runs[mode].append(call(
                    program, "run", args.model, "-p", "# Ownership\n\nOwnership is", "-n", str(args.new),
                    "--ignore-eos", "--temp", "0.8", "--seed", str(turn), "--ffn-resident", str(share), "--io", args.io,
                    "--sparsity", args.sparsity, "--read-ahead", mode, "--json"))
            if len({runs[mode][-1]["logits_hash"] for mode in MODES}) != 1:
                sys.exit(f"the texts of round {turn} at {share} differ")
        for mode in MODES:
            def of(get):
                return [get(run) for run in runs[mode]]

            speed = of(lambda run: run["decode_tokens_per_s"])
            gain = statistics.median(a / b["decode_tokens_per_s"] for a, b in zip(speed, runs["off"]))
            ahead = [run["read_ahead"] for run in runs[mode] if run.get("read_ahead") and run["read_ahead"]["guessed"]]
            right, used = ([f"{statistics.median(a[key] for a in ahead):.0%}" if ahead else "–"
                            for key in ("precision", "used_share")])
            told = [a["gain"] for a in ahead if a["gain"] is not None]
            gains = f"{statistics.median(told):+.0%}" if told else "–"
            passes = statistics.median(of(lambda run: (run.get("read_ahead") or {}).get("passes_share", 0.0)))
            waits = statistics.median(of(lambda run: run["io"]["wait_share"]))
            print(f"| {float(share):.0%} | {mode} | {statistics.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f}) "
                  f"| {gain:.2f} | {right} | {used} | {waits:.0%} | {passes:.0%} | {gains} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("emberflow")
    parser.add_argument("model", nargs="?", default="demo-moe")
    parser.add_argument("--text", default=str(HELDOUT))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shares", type=lambda text: text.split(","), default=["0.25", "0.5", "0.75"])
    parser.add_argument("--new", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--sparsity", default="dense", choices=["exact", "dense"])
    args = parser.parse_args()
    misses(args.emberflow, args)
    read_ahead(args.emberflow, args)


if __name__ == "__main__":
    main()
