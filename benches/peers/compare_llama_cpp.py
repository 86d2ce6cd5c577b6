#!/usr/bin/env python3
"""Emberflow against llama.cpp on the same weights, in memory, in turns.

usage: compare_llama_cpp.py MODEL.gguf MODEL.ember [--emberflow PROGRAM] [--rounds 5]
           [--threads 2] [--decode 32] [--prefill 512] [--oracle] [--csv FILE] [--svg FILE]
           [--no-llama] [--quick]

MODEL.ember is `emberflow pack MODEL.gguf -o MODEL.ember --quant q4
--embedding-quant q4` of a Q4_0 file. llama.cpp comes from the package
llama-cpp-python of the Python that runs this script (on processors with AMX that
a virtual machine does not let through, build it with
CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"). Prints the machine, medians and
ranges, what each is of llama.cpp, and what our decoding is of its bound: the bytes of
a token at the speed of memory, measured in each run. --quick is a small mode of one
round that only says whether everything works; --no-llama leaves llama.cpp out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from common import bars, letters, machine, write_csv

HERE = os.path.dirname(os.path.abspath(__file__))


def llama(options):
    command = [sys.executable, os.path.join(HERE, "llama_cpp_rates.py"), options.gguf]
    command += [str(options.threads), str(options.decode), str(options.prefill)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    decode, prefill, version = output.split()[-3:]
    return float(decode), float(prefill), version


def emberflow(options, sparsity, prompt):
    command = [f"{options.emberflow}-lab", "run", options.ember, "-f", prompt, "--json", "--details"]
    command += ["--threads", str(options.threads), "-n", str(options.decode + 1)]
    command += ["--sparsity", sparsity, "--ignore-eos", "--chunk", str(options.chunk)]
    command += ["--context", str(options.prefill + options.decode + 64)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(output)
    return report["decode_tokens_per_s"], report["prefill_tokens_per_s"], report


def of_bound(report):
    """Time of a token as a multiple of what its bytes take at the speed of memory; 0 where unknown."""
    details = report["details"]
    tokens = max(len(details["ms"]), 1)
    positions = report["prompt_tokens"] + tokens / 2
    read = details["dense_bytes"] + positions * details["kv_bytes_per_position"]
    read += sum(details["ffn_bytes"]) / tokens
    bound = read / 1e6 / max(details["memory_gb_per_s"], 1e-9)
    return sum(details["ms"]) / tokens / bound if details["memory_gb_per_s"] else 0.0


def oracle(options):
    """Decode rate with the active neurons known in advance."""
    command = [f"{options.emberflow}-lab", "decode", options.ember, "--oracle", "--json"]
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
    parser.add_argument("--svg")
    parser.add_argument("--no-llama", action="store_true", help="Emberflow alone")
    parser.add_argument("--quick", action="store_true", help="one round of a few tokens")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.decode, options.prefill = 1, 4, 16

    rates, bounds = {}, {}
    version = "left out"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as long, tempfile.NamedTemporaryFile(
        "w", suffix=".txt"
    ) as short:
        # one character is one token for the random checkpoints of `emberflow synth`
        # and a text of one character would visit the same experts again and again
        long.write(letters(max(options.prefill - 1, 1)))
        long.flush()
        short.write("abc")
        short.flush()
        for _ in range(options.rounds):
            if not options.no_llama:
                decode, prefill, version = llama(options)
                rates.setdefault("llama.cpp", []).append((decode, prefill))
            for sparsity in ["dense", "exact"]:
                try:
                    decode, _, report = emberflow(options, sparsity, short.name)
                    bounds.setdefault(f"emberflow {sparsity}", []).append(of_bound(report))
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
    if not rates:
        sys.exit("nothing could be measured")
    print(f"machine: {machine()}; llama-cpp-python {version}; {options.threads} threads; "
          f"{options.rounds} rounds in turns")
    base = [statistics.median(column) for column in zip(*rates.get("llama.cpp", []))]
    measured = {}
    for name, values in rates.items():
        ranges = [(statistics.median(column), min(column), max(column)) for column in zip(*values)]
        measured[name] = [r for r in ranges if r[2] > 0.0]
        for i, (middle, low, high) in enumerate(measured[name]):
            ratio = f", {middle / base[i]:.2f} of llama.cpp" if base else ""
            bound = statistics.median(bounds.get(name, [0.0])) if i == 0 else 0.0
            ratio += f", {bound:.2f} of the bound" if bound else ""
            print(f"{name:18} {middle:8.2f} tok/s ({low:.2f} to {high:.2f}){ratio}")
    if options.csv:
        columns = "name,decode,decode_low,decode_high,prefill,prefill_low,prefill_high,of_bound".split(",")
        rows = []
        for name, ranges in measured.items():
            cells = [cell for r in ranges for cell in r]
            cells += [""] * (6 - len(cells))
            bound = statistics.median(bounds[name]) if name in bounds else ""
            rows.append([name, *cells, bound])
        write_csv(options.csv, columns, rows)
    if options.svg:
        panels = [(title, [(name, *r[i]) for name, r in measured.items() if i < len(r)])
                  for i, title in enumerate(["decoding, tokens/s", "prompts, tokens/s"])]
        bars(options.svg, f"{os.path.basename(options.ember)} in memory", panels)


if __name__ == "__main__":
    main()
