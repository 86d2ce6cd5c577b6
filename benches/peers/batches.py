#!/usr/bin/env python3
"""Several texts at once: Emberflow beside llama.cpp, in turns; tokens per second of all texts together.

usage: batches.py MODEL.gguf MODEL.ember --llama FOLDER [--parts passes,servers] [--sizes 1,2,4,8,16]
           [--share 1.0] [--sparsity auto] [--rounds 3] [--tokens 16] [--threads 2] [--csv FILE] [--svg FILE]

FOLDER holds llama-batched-bench and llama-server.

passes    `emberflow-lab batch` beside `llama-batched-bench`: decoding alone, prompts of five tokens.
servers   `emberflow serve` beside `llama-server --parallel`: as many clients of /v1/completions as texts, each
          with one request of the same length; from the first request to the last answer.

With --share below 1 a part of the FFN is on disk: `run --ffn-resident SHARE` names the bytes of the whole process,
and llama.cpp gets as many in a memory cgroup (version 1, root needed), its disk at a read-ahead of 8 MiB and its
weights mapped. Each file is read once beforehand where everything is in memory; caches are dropped before each run
elsewhere. Prints the machine, medians and ranges, and the ratio of the medians.
"""

import argparse
import concurrent.futures
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from common import bars, machine, write_csv
from offload import CGROUP, ReadAhead

OURS, THEIRS = "Emberflow", "llama.cpp"


def drop_caches():
    subprocess.run(["sync"], check=True)
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


class Held:
    """A control group of `limit` bytes, or none: what to put before a command."""

    def __init__(self, limit):
        self.before = []
        self.limit = limit

    def __enter__(self):
        if self.limit:
            drop_caches()
            os.makedirs(CGROUP, exist_ok=True)
            with open(f"{CGROUP}/memory.limit_in_bytes", "w") as file:
                file.write(str(self.limit))
            self.before = ["bash", "-c", f'echo $$ > {CGROUP}/cgroup.procs; exec "$@"', "bash"]
        return self

    def __exit__(self, *_):
        if self.limit:
            os.rmdir(CGROUP)


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def our_passes(options, sizes, limit):
    """Tokens per second by number of texts."""
    command = [f"{options.emberflow}-lab", "batch", options.ember, "--sizes", ",".join(map(str, sizes))]
    command += ["--shares", f"{100 * options.share:g}", "--rounds", "1", "-n", str(options.tokens), "--json"]
    command += ["--threads", str(options.threads), "--sparsity", options.sparsity]
    rows = json.loads(output(command))["rows"]
    return {row["texts"]: row["tokens_per_s"]["median"] for row in rows}


def their_passes(options, sizes, limit):
    """The same of llama-batched-bench."""
    command = [f"{options.llama}/llama-batched-bench", "-m", options.gguf, "-t", str(options.threads)]
    command += ["-npp", "5", "-ntg", str(options.tokens), "-npl", ",".join(map(str, sizes))]
    command += ["-c", str((options.tokens + 8) * max(sizes)), "--output-format", "jsonl"]
    if limit:
        command += ["--no-repack"]
    with Held(limit) as held:
        lines = [json.loads(line) for line in output(held.before + command).splitlines() if line.startswith("{")]
    return {line["pl"]: line["speed_tg"] for line in lines}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return json.load(answer)


def ready(server, url):
    for _ in range(1200):
        if server.poll() is not None:
            sys.exit(f"the server ended: {server.args}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    sys.exit(f"the server does not become ready: {server.args}")


def asked(command, port, sizes, tokens):
    """Tokens per second by number of clients that ask a server at once."""
    url, rates = f"http://127.0.0.1:{port}", {}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready(server, url)
        ask = lambda i: post(f"{url}/v1/completions", {
            "prompt": f"{i}: a", "max_tokens": tokens, "ignore_eos": True, "seed": i, "temperature": 0.8})
        ask(0)
        for texts in sizes:
            with concurrent.futures.ThreadPoolExecutor(texts) as clients:
                begun = time.monotonic()
                answers = list(clients.map(ask, range(texts)))
                took = time.monotonic() - begun
            made = [answer["usage"]["completion_tokens"] for answer in answers]
            if made != [tokens] * texts:
                sys.exit(f"{command[0]}: answers of {made} tokens")
            rates[texts] = sum(made) / took
    finally:
        server.terminate()
        server.wait()
    return rates


def our_servers(options, sizes, limit):
    port = free_port()
    command = [options.emberflow, "serve", options.ember, "--port", str(port), "--parallel", str(max(sizes))]
    command += ["--context", str(options.tokens + 24), "--threads", str(options.threads)]
    command += ["--sparsity", options.sparsity, "--queue", str(2 * max(sizes))]
    command += ["--memory", str(limit)] if limit else []
    return asked(command, port, sizes, options.tokens)


def their_servers(options, sizes, limit):
    port = free_port()
    command = [f"{options.llama}/llama-server", "-m", options.gguf, "--port", str(port), "--parallel", str(max(sizes))]
    command += ["-c", str((options.tokens + 24) * max(sizes)), "-t", str(options.threads)]
    if limit:
        command += ["--no-repack"]
    with Held(limit) as held:
        return asked(held.before + command, port, sizes, options.tokens)


PARTS = {"passes": (our_passes, their_passes), "servers": (our_servers, their_servers)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("ember")
    parser.add_argument("--llama", required=True)
    parser.add_argument("--emberflow", default="target/release/emberflow")
    parser.add_argument("--parts", default="passes,servers")
    parser.add_argument("--sizes", default="1,2,4,8,16")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--sparsity", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv")
    parser.add_argument("--svg")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]

    limit = 0
    if options.share < 1.0:
        probe = [options.emberflow, "run", options.ember, "-p", "a", "-n", "2", "--json", "--ffn-resident",
                 str(options.share)]
        limit = json.loads(output(probe))["memory"]["budget_bytes"]
    rates = {}
    for turn in range(options.rounds):
        for part in options.parts.split(","):
            both = list(zip((OURS, THEIRS), PARTS[part]))
            for name, measured in both[::-1 if turn % 2 else 1]:
                if limit:
                    with ReadAhead(options.gguf, 8192):
                        found = measured(options, sizes, limit)
                else:
                    found = measured(options, sizes, limit)
                for texts, rate in found.items():
                    rates.setdefault((part, texts, name), []).append(rate)
                print(f"{part} {name}:", *(f"{n}: {rate:.2f}" for n, rate in found.items()), file=sys.stderr)

    print(f"machine: {machine()}")
    print(f"{os.path.basename(options.ember)}, {options.share:.0%} of the FFN in memory, answers of {options.tokens} "
          f"tokens, {options.threads} threads, {options.rounds} rounds in turns")
    ranged = lambda values: f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    for part in options.parts.split(","):
        print(f"\n| {part}, texts | {OURS}, tokens/s | {THEIRS} | ratio | of our one text |\n|---|---|---|---|---|")
        one = statistics.median(rates[part, sizes[0], OURS])
        for texts in sizes:
            ours, theirs = rates[part, texts, OURS], rates[part, texts, THEIRS]
            mid = statistics.median(ours)
            print(f"| {texts} | {ranged(ours)} | {ranged(theirs)} | {mid / statistics.median(theirs):.2f} "
                  f"| {mid / one:.2f} |")
    rows = [(part, texts, name, statistics.median(values), min(values), max(values))
            for (part, texts, name), values in rates.items()]
    if options.csv:
        write_csv(options.csv, ["part", "texts", "name", "median", "low", "high"], rows)
    if options.svg:
        panels = [(f"{part}, {texts} texts", [row[2:] for row in rows if row[:2] == (part, texts)])
                  for part in options.parts.split(",") for texts in sizes]
        bars(options.svg, "tokens/s of all texts together", panels)


if __name__ == "__main__":
    main()
