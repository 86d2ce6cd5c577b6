#!/usr/bin/env python3
"""Time from the start of the process to the first token.

    benches/first_token.py EMBERFLOW MODEL.ember [--share S] [--prompts N,N,..] [--rounds N]
                           [--ways FLAGS;FLAGS;..] [--warm] [--other EMBERFLOW]

Each way is some more arguments of `run`; --other runs another build beside it, without them. Ways take turns. The model's file is dropped from the page cache before each run,
with --warm it is read once instead. Prompts are tokens of a seeded text. Prints medians and all times in
seconds, the rate of sequential reads of the same minutes (fio), whether the peak kept to the budget and all
hashes of a prompt are equal.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm(path):
    with open(path, "rb", buffering=0) as f:
        while f.read(16 << 20):
            pass


def sequential(path):
    """Bytes a second of direct reads of 1 MiB, four at a time."""
    command = ["fio", "--name=x", f"--filename={path}", "--readonly", "--direct=1", "--rw=read", "--bs=1m",
               "--iodepth=4", "--ioengine=io_uring", "--runtime=2", "--time_based", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]


def text_of(tokens):
    words = random.Random(tokens)
    return "".join(words.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(tokens - 2))


def run(program, args, way, prompt):
    (drop if not args.warm else warm)(args.model)
    command = [program, "run", args.model, "-p", prompt, "-n", "1", "--ignore-eos", "--json",
               "--ffn-resident", str(args.share), *way.split()]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return took, json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("emberflow")
    parser.add_argument("model")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--prompts", default="5,128,512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--other")
    args = parser.parse_args()
    ways = [(args.emberflow, way) for way in args.ways.split(";")]
    if args.other:
        ways.append((args.other, ""))
    for tokens in map(int, args.prompts.split(",")):
        prompt = text_of(tokens)
        times, hashes, kept, count = {way: [] for way in ways}, set(), True, 0
        rates = []
        for _ in range(args.rounds):
            rates.append(sequential(args.model))
            for way in ways:
                took, report = run(*way[:1], args, way[1], prompt)
                times[way].append((took, report))
                hashes.add(report["logits_hash"])
                count = report["prompt_tokens"]
                memory = report["memory"]
                kept &= memory["peak_rss_bytes"] <= memory["budget_bytes"]
        rate = statistics.median(rates)
        print(f"{args.model}, {args.share} of the FFN, prompt of {count}: one hash: {len(hashes) == 1}, peak within budget: {kept}, "
              f"sequential {rate / 1e6:.0f} MB/s")
        for way, all_of in times.items():
            took = [t for t, _ in all_of]
            memory = all_of[0][1]["memory"]
            print(f"  {way[0]} {way[1]}: {statistics.median(took):.2f} s "
                  f"({', '.join(f'{t:.2f}' for t in took)}), prompt {all_of[0][1]['prefill_tokens_per_s']:.1f} "
                  f"tokens/s, budget {memory['budget_bytes'] >> 20} MiB")


if __name__ == "__main__":
    main()
