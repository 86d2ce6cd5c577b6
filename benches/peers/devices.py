#!/usr/bin/env python3
"""A device that holds part of the weights: Emberflow beside llama.cpp with as many bytes on the card, in turns.

usage: devices.py MODEL.gguf MODEL.ember --llama-bench PROGRAM [--emberflow PROGRAM] [--device opencl]
           [--shares 0.10,0.25,0.50,1] [--prompt 512] [--decode 64] [--rounds 5] [--threads N] [--csv FILE]

MODEL.ember is `emberflow pack MODEL.gguf -o MODEL.ember --quant q4` of a Q4_0 file; llama-bench is of a build for the
same card (OpenCL, CUDA or Vulkan). With a share of 0.25 Emberflow holds hot neurons of a quarter of the file's bytes on
the device (`--device NAME=SIZE`), everything else in the machine's memory; llama.cpp has as many whole layers there
(`-ngl`) as take at most these bytes. With 1 both hold all that they can, with 0 nothing. Prints the machine, the device with its
numerics and what it held, medians and ranges of tokens per second, decoding and prompts, and ours over theirs.
--llama-bench none leaves llama.cpp out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from common import machine, write_csv

HERE = os.path.dirname(os.path.abspath(__file__))
HELDOUT = os.path.join(HERE, "../../models/demo/heldout.txt")


def call(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout)


def emberflow(options, share, prompt):
    """Tokens per second of decoding and of a prompt, and the report."""
    memory = int(share * os.path.getsize(options.ember))
    command = [options.emberflow, "run", options.ember, "-f", prompt, "-n", options.decode + 1, "--json",
               "--ignore-eos", "--temp", "0", "--context", options.prompt * 4 + options.decode + 64]
    command += ["--device", f"{options.device}={memory}"] if share else ["--device", "none"]
    command += ["--threads", options.threads] if options.threads else []
    report = call(command)
    return report["decode_tokens_per_s"], report["prefill_tokens_per_s"], report


def layers_within(options, share):
    """How many layers llama.cpp may put on the card: they are equally large, and the rest of the file is small."""
    layers = call([options.emberflow, "inspect", options.ember, "--json"])["meta"]["config"]["layers"]
    return 999 if share >= 1 else int(share * layers)


def llama(options, layers, prompt):
    command = [options.llama_bench, "-m", options.gguf, "-ngl", layers, "-p", prompt, "-n", options.decode, "-r", 1,
               "-o", "json"]
    command += ["-t", options.threads] if options.threads else []
    rates = {"decode": 0.0, "prompt": 0.0}
    for test in call(command):
        rates["prompt" if test["n_prompt"] else "decode"] = test["avg_ts"]
    return rates["decode"], rates["prompt"]


def spread(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(options, share, prompt):
    """Rounds in turns: rows of (what, ours, theirs)."""
    theirs = options.llama_bench != "none"
    layers = layers_within(options, share) if theirs else 0
    ours, others = [], []
    for _ in range(options.rounds):
        ours.append(emberflow(options, share, prompt))
        others.append(llama(options, layers, ours[-1][2]["prompt_tokens"]) if theirs else (0.0, 0.0))
    held = ours[-1][2].get("device")
    if held is None:
        print(f"\nwithout a device; -ngl {layers if theirs else '-'}")
    else:
        print(f"\n{share:.0%} of the file: {held['name']} {held['driver']}, numerics {held['numerics']}; it holds "
          f"{held['bytes'] / 2**20:.0f} MiB, {held['ffn_share']:.0%} of the FFN, and multiplies "
          f"{held['products_share']:.0%} of projections and head; -ngl {layers if theirs else '-'}")
    for i, what in enumerate(["decoding", f"a prompt of {ours[-1][2]['prompt_tokens']}"]):
        mine, other = [run[i] for run in ours], [run[i] for run in others]
        factor = statistics.median(mine) / statistics.median(other) if theirs else 0.0
        print(f"  {what}: Emberflow {spread(mine)}, llama.cpp {spread(other)}, {factor:.2f} times")
        yield [share, what, statistics.median(mine), statistics.median(other), factor]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("ember")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--emberflow", default=os.path.join(HERE, "../../target/release/emberflow"))
    parser.add_argument("--device", default="opencl")
    parser.add_argument("--shares", default="0.10,0.25,0.50,1")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--csv")
    options = parser.parse_args()
    print(machine())
    rows = []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompt, open(HELDOUT) as text:
        # A token of this text is about four bytes of it; llama.cpp gets as many as they were.
        prompt.write(text.read()[: 4 * options.prompt])
        prompt.flush()
        for share in options.shares.split(","):
            rows += measure(options, float(share), prompt.name)
    if options.csv:
        write_csv(options.csv, ["share", "what", "emberflow", "llama_cpp", "factor"], rows)


main()
