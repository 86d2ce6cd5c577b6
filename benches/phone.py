#!/usr/bin/env python3
"""A phone that is simulated: decoding and prompts with and without its NPU or GPU, beside PowerInfer-2's figures.

    benches/phone.py EMBERFLOW MODEL [--make [--layers N]] [--shares 1.0,0.5] [--devices none,npu,gpu]
                     [--prompts 128,512] [--new N] [--rounds N]

With --make, MODEL and MODEL.gguf are written unless they are there: a random model of Bamboo-7B's shape whose
activations are as published, but that 90 % of the firing neurons fire for the next token too, so that half of the
FFN gives the hits of the paper's cache (95 %); it is packed with the statistics of a text. Fewer layers than 32 make
it smaller; factors stay comparable, speeds do not, and the head has a larger share.

The phone's storage is `sim:ufs4`. Its compute threads are those of this machine, on a clock by which they read
memory as fast as the phone's do: `bench device` measures that before each round. Its NPU and GPU take the times that
HeteroInfer published (Table 3), beside a busy CPU no more memory than PowerInfer-2 says is left. Variants take
turns; a factor is the median over the rounds of the speed over that without a device in the same round. Texts have to
be the same.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HELDOUT = pathlib.Path(__file__).resolve().parent.parent / "models/demo/heldout.txt"
DEVICES = {"none": "sim:8gen3-none", "npu": "sim:8gen3", "gpu": "sim:8gen3-gpu"}
PROMPT = "A vector is a growable list: it"

# PowerInfer-2 with Bamboo-7B on a OnePlus 12. Decoding, half of the FFN on flash: Fig. 14, without and with XPU.
# In memory the factor is that of the bandwidths of §7.3, 59.6 over 43.9 GB/s. Prompts: §7.3 and Fig. 12.
PAPER = {
    ("decode", 0.5): "1.15 (9.60 to 11.07 tok/s)",
    ("decode", 1.0): "1.36 (by bandwidth)",
    ("prompt", 0.5): "404.6 tok/s with the NPU",
    ("prompt", 1.0): "over 700 tok/s with the NPU",
}


def call(*args):
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr}")
    return json.loads(done.stdout)


def make(args):
    """Writes the model, unless it is there."""
    if not args.make or pathlib.Path(args.model).exists():
        return
    gguf = f"{args.model}.gguf"
    if not pathlib.Path(gguf).exists():
        fewer = ["--layers", args.layers] if args.layers else []
        call(args.emberflow, "synth", "--shape", "bamboo-7b", "--active", "0.10", "--persistence", "0.90",
             *fewer, "-o", gguf, "--json")
    with tempfile.TemporaryDirectory(dir=pathlib.Path(args.model).parent) as folder:
        plain, stats = f"{folder}/plain.ember", f"{folder}/stats"
        call(args.emberflow, "pack", gguf, "-o", plain, "--quant", "q4", "--json")
        call(args.emberflow, "profile", plain, "-f", str(HELDOUT), "-o", stats, "--limit", "600",
             "--window", "128", "--json")
        call(args.emberflow, "pack", gguf, "-o", args.model, "--quant", "q4", "--stats", stats, "--json")


def decode(args, share, device, turn):
    return call(args.emberflow, "run", args.model, "-p", PROMPT, "-n", str(args.new), "--ignore-eos", "--temp", "1",
                "--seed", str(turn), "--ffn-resident", str(share), "--device", DEVICES[device], "--json", "--details")


def prompt(args, length, share, device):
    # One token of this text is about four bytes of it; what counts is how many the report says it were.
    text = HELDOUT.read_text()[: 4 * length]
    return call(args.emberflow, "run", args.model, "-p", text, "-n", "1", "--ignore-eos", "--ffn-resident", str(share),
                "--context", str(4 * length + 64), "--device", DEVICES[device], "--json", "--details")


def mean(values):
    return sum(values) / max(len(values), 1)


def in_turns(args, name, one):
    """Rounds of `one(device, turn)` for each device: {device: runs}."""
    found = {device: [] for device in args.devices}
    for turn in range(args.rounds):
        call(args.emberflow, "bench", "device", "--json")
        runs = {device: one(device, turn) for device in args.devices}
        if len({run["logits_hash"] for run in runs.values()}) != 1:
            sys.exit(f"the texts of {name} differ")
        for device, run in runs.items():
            found[device].append(run)
    return found


def factor(found, device, speed):
    pairs = zip(found[device], found["none"])
    return statistics.median(speed(run) / speed(base) for run, base in pairs)


def show(found, kind, share, speed, length=""):
    for device, runs in found.items():
        speeds = [speed(run) for run in runs]
        of = runs[0].get("device") or {}
        parts = [of.get(key, 0.0) for key in ("ffn_share", "products_share", "gates_share")]
        hits = mean([run["cache"]["hit_rate"] for run in runs])
        wait = mean([run["io"]["wait_share"] for run in runs])
        paper = "" if device != "npu" else PAPER.get((kind, share), "")
        cells = [f"{kind} {length}".strip(), f"{share:.0%}", device,
                 f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
                 f"{factor(found, device, speed):.2f}", f"{hits:.1%}", f"{wait:.1%}",
                 " / ".join(f"{part:.0%}" for part in parts),
                 f"{statistics.median(run['simulated_clock'] for run in runs):.2f}", paper]
        print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("emberflow")
    parser.add_argument("model")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--layers")
    parser.add_argument("--shares", default="1.0,0.5")
    parser.add_argument("--devices", default="none,npu,gpu")
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.devices = args.devices.split(",")
    if "none" not in args.devices or not set(args.devices) <= set(DEVICES):
        sys.exit(f"--devices: none and others of {', '.join(DEVICES)}")
    make(args)
    columns = ["what", "FFN in memory", "device", "tokens/s", "factor", "hits", "waiting for reads",
               "device's share of FFN / projections / gates", "clock", "paper"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for share in [float(share) for share in args.shares.split(",")]:
        found = in_turns(args, f"decoding at {share:.0%}", lambda device, turn: decode(args, share, device, turn))
        show(found, "decode", share, lambda run: run["decode_tokens_per_s"])
        for length in [int(length) for length in args.prompts.split(",") if length]:
            found = in_turns(args, f"prompts at {share:.0%}", lambda device, _: prompt(args, length, share, device))
            tokens = found["none"][0]["prompt_tokens"]
            show(found, "prompt", share, lambda run: run["prefill_tokens_per_s"], f"of {tokens}")


main()
