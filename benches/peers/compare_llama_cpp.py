#!/usr/bin/env python3
"""Emberflow against llama.cpp on the same weights, in memory, in turns.

usage: compare_llama_cpp.py MODEL.gguf MODEL.ember [--emberflow PROGRAM] [--rounds 5]
           [--threads 2] [--decode 32] [--prefill 512] [--oracle] [--csv FILE]

MODEL.ember is `emberflow pack MODEL.gguf -o MODEL.ember --quant q4
--embedding-quant q4` of a Q4_0 file. llama.cpp comes from the package
llama-cpp-python of the Python that runs this script (on processors with AMX that
a virtual machine does not let through, build it with
CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"). Prints medians and ranges.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def llama(options):
    command = [sys.executable, os.path.join(HERE, "llama_cpp_rates.py"), options.gguf]
    command += [str(options.threads), str(options.decode), str(options.prefill)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    decode, prefill, version = output.split()[-3:]
    return float(decode), float(prefill), version


def emberflow(options, sparsity, prompt):
    command = [options.emberflow, "run", options.ember, "-f", prompt, "--json"]
    command += ["--threads", str(options.threads), "-n", str(options.decode + 1)]
    command += ["--sparsity", sparsity, "--ignore-eos", "--chunk", str(options.chunk)]
    command += ["--context", str(options.prefill + options.decode + 64)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(output)
    return report["decode_tokens_per_s"], report["prefill_tokens_per_s"], report


def oracle(options):
    """Decode rate with the active neurons known in advance."""
    command = [options.emberflow, "bench", "decode", options.ember, "--oracle", "--json"]
    command += ["--threads", str(options.threads), "-n", str(options.decode)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output)["contexts"][0]["tokens_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("ember")
    parser.add_argument("--emberflow", default="target/release/emberflow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--oracle", action="store_true", help="also with the active set known")
    parser.add_argument("--csv")
    options = parser.parse_args()

    rates = {}
    version = "?"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as long, tempfile.NamedTemporaryFile(
        "w", suffix=".txt"
    ) as short:
        # one character is one token for the random checkpoints of `emberflow synth`
        long.write("a" * max(options.prefill - 1, 1))
        long.flush()
        short.write("abc")
        short.flush()
        for _ in range(options.rounds):
            decode, prefill, version = llama(options)
            rates.setdefault("llama.cpp", []).append((decode, prefill))
            for sparsity in ["dense", "exact"]:
                try:
                    decode, _, report = emberflow(options, sparsity, short.name)
                    prefill = 0.0
                    if options.prefill:
                        _, prefill, report = emberflow(options, sparsity, long.name)
                except subprocess.CalledProcessError as error:
                    print(f"{sparsity}: {error.stderr.strip()}", file=sys.stderr)
                    continue
                name = f"emberflow {sparsity}"
                rates.setdefault(name, []).append((decode, prefill))
                share = report["sparsity"]["active_share"]
                print(f"{name}: {decode:.2f} {prefill:.1f} tok/s, {share:.1%} active, "
                      f"{report['prompt_tokens']} tokens of prompt", file=sys.stderr)
            if options.oracle:
                rates.setdefault("emberflow oracle", []).append((oracle(options), 0.0))
    print(f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
          f"llama-cpp-python {version}; {options.threads} threads; {options.rounds} rounds in turns")
    base = [statistics.median(column) for column in zip(*rates["llama.cpp"])]
    rows = ["name,decode,decode_low,decode_high,prefill,prefill_low,prefill_high"]
    for name, values in rates.items():
        cells = []
        for column, reference in zip(zip(*values), base):
            middle = statistics.median(column)
            if reference == 0.0:
                continue
            cells += [middle, min(column), max(column)]
            print(f"{name:18} {middle:8.2f} tok/s ({min(column):.2f} to {max(column):.2f}), "
                  f"{middle / reference:.2f} of llama.cpp")
        rows.append(",".join([name] + [f"{cell:.3f}" for cell in cells]))
    if options.csv:
        with open(options.csv, "w") as file:
            file.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
