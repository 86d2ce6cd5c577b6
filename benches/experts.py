#!/usr/bin/env python3
"""Mixtures of experts: what caches miss, what reading ahead gains, speed by budget, neurons against whole
experts, and how far a token's time is from its bound.

    benches/experts.py EMBERFLOW [MODEL] [--proofs misses,ahead] [--make SHAPE:LAYERS] [--text FILE] [--tokens N]
                       [--quant FORMAT]
                       [--shares 0.25,0.5,0.75] [--memory 24MiB,26MiB] [--new N] [--rounds N] [--io ENGINE]
                       [--sparsity exact|dense] [--modes dense,exact,predicted] [--other MODEL] [--layers N]

MODEL is demo-moe if none is named. With --make it is a file to be written, a random model of that shape with so
many layers (`synth`, then `pack --quant q4`); it and the GGUF file beside it, MODEL.gguf, stay. Runs of a proof
take turns, each round has another seed, and numbers are medians. All runs of a round have to give the same text.

misses    The routing of --tokens tokens of the text is recorded and replayed with caches of each share of the
          experts' bytes, the first tenth to warm up.
ahead     --read-ahead off and on. The gain of a mode is the median of its speed over that of off in the
          same round. Where single neurons are read, nothing is read ahead.
budgets   `plan` and `run` for each budget of --memory, up and down in turns: neither may fall as it grows.
sparsity  --sparsity of --modes within the same bytes, those with which dense (whole experts) holds the share:
          exact reads neurons inside experts where the plan expects that to be faster, predicted those that a
          predictor names (a container of train-predictor).
order     What is read where the neurons inside experts lie in the checkpoint's order and where the hottest come
          first: MODEL is exported, packed as it is (--quant), profiled over --tokens tokens of the text and packed
          again with that, and for the mode `predicted` both get predictors from the text. Both have the same bytes.
split     What a budget (the first of --memory) holds of a model of --layers layers that is not there, and how fast
          it would be: by MODEL and --other, which differ from it in the number of layers only.
bound     The time of a token over the larger of bytes missed ÷ the disk's rate for reads of their mean length,
          and bytes computed ÷ memory's rate, all measured in the round.

Beside llama.cpp, in control groups of the same size: benches/peers/offload.py MODEL.gguf MODEL --sparsity exact.
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
MODES = ["off", "on"]
PROMPT = "# Ownership\n\nOwnership is"


def call(*args):
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: {done.stderr}")
    return json.loads(done.stdout)


def lab(args):
    """The laboratory's program, which lies beside the other."""
    return f"{args.emberflow}-lab"


def run(args, turn, *more):
    """A run's report; `turn` is its seed."""
    return call(lab(args), "run", args.model, "-p", PROMPT, "-n", str(args.new), "--ignore-eos", "--temp",
                "0.8", "--seed", str(turn), "--io", args.io, "--json", *more)


def same_text(runs, what):
    if len({run["logits_hash"] for run in runs}) != 1:
        sys.exit(f"the texts of {what} differ")


def median(runs, get):
    return statistics.median(get(run) for run in runs)


def speed(run):
    return run["decode_tokens_per_s"]


def read_per_token(run):
    return run["io"]["bytes_read"] / run["generated_tokens"]


def table(*columns):
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def line(*cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def ranged(runs):
    speeds = [speed(run) for run in runs]
    digits = 0 if min(speeds) >= 20 else 2
    return f"{statistics.median(speeds):.{digits}f} ({min(speeds):.{digits}f} to {max(speeds):.{digits}f})"


def make(args):
    """Writes the model that --make asks for, unless it is there."""
    if not args.make or pathlib.Path(args.model).exists():
        return
    shape, layers = args.make.split(":")
    gguf = f"{args.model}.gguf"
    call(lab(args), "synth", "--shape", shape, "--layers", layers, "-o", gguf, "--json")
    call(args.emberflow, "pack", gguf, "-o", args.model, "--quant", "q4", "--json")


def misses(args):
    """Prints the miss rates of each policy at each share."""
    with tempfile.TemporaryDirectory() as folder:
        trace = f"{folder}/trace"
        call(lab(args), "trace", "record", args.model, "-f", args.text, "-o", trace,
             "--limit", str(args.tokens), "--json")
        found = call(lab(args), "trace", "simulate", trace, "--json",
                     "--cache", ",".join(f"{float(share):.0%}" for share in args.shares))
    rates = {(result["cache"], result["policy"]): result["miss_rate"] for result in found["results"]}
    print(f"misses: {found['model']}, {found['tokens']} tokens after {found['warm_up']} to warm up")
    table("cache, of all experts", *POLICIES)
    for share in args.shares:
        line(f"{float(share):.0%}", *(f"{rates[(float(share), policy)]:.1%}" for policy in POLICIES))


def ahead(args):
    print(f"\nreading ahead: {args.rounds} rounds of {args.new} tokens, --io {args.io}, --sparsity {args.sparsity}")
    table("resident", "mode", "tokens/s (lowest to highest)", "times off", "guesses right", "read ahead and used",
          "waits", "passes with it")
    for share in args.shares:
        runs = {mode: [] for mode in MODES}
        for turn in range(args.rounds):
            for mode in MODES[::-1 if turn % 2 else 1]:
                runs[mode].append(run(args, turn, "--ffn-resident", share, "--sparsity", args.sparsity,
                                      "--read-ahead", mode))
            same_text([runs[mode][-1] for mode in MODES], f"round {turn} at {share}")
        for mode in MODES:
            gain = statistics.median(speed(a) / speed(b) for a, b in zip(runs[mode], runs["off"]))
            guessed = [run["read_ahead"] for run in runs[mode]
                       if run.get("read_ahead") and run["read_ahead"]["guessed"]]
            right, used = ([f"{statistics.median(a[key] for a in guessed):.0%}" if guessed else "–"
                            for key in ("precision", "used_share")])
            passes = median(runs[mode], lambda run: (run.get("read_ahead") or {}).get("passes_share", 0.0))
            waits = median(runs[mode], lambda run: run["io"]["wait_share"])
            line(f"{float(share):.0%}", mode, ranged(runs[mode]), f"{gain:.2f}", right, used, f"{waits:.0%}",
                 f"{passes:.0%}")


def budgets(args):
    plans = call(args.emberflow, "plan", args.model, "--io", args.io, "--context", str(args.new + 64), "--memory",
                 ",".join(args.memory), "--json")["plans"]
    runs = {memory: [] for memory in args.memory}
    for turn in range(args.rounds):
        for memory in args.memory[::-1 if turn % 2 else 1]:
            runs[memory].append(run(args, 0, "--memory", memory))
    same_text([run for each in runs.values() for run in each], "budgets")
    print(f"\nbudgets: {args.rounds} rounds of {args.new} tokens, --io {args.io}")
    table("budget", "experts in memory", "Gate rows", "planned tokens/s", "tokens/s (lowest to highest)",
          "read per token, planned", "read", "waits")
    for memory, plan in zip(args.memory, plans):
        each = runs[memory]
        line(memory, f"{plan['ffn_resident_share']:.0%}", "held" if plan["gates_resident"] else "read",
             f"{plan['decode']['tokens_per_s']:.0f}", ranged(each), f"{plan['decode']['bytes_read'] / 1e3:.0f} kB",
             f"{median(each, read_per_token) / 1e3:.0f} kB", f"{median(each, lambda r: r['io']['wait_share']):.0%}")


def sparsity(args):
    print(f"\nsparsity: {args.model}, {args.rounds} rounds of {args.new} tokens, --io {args.io}")
    table("resident", "sparsity", "budget", "tokens/s (lowest to highest)", "times dense", "read per token",
          "dense reads", "neurons that fired", "gates", "waits")
    for share in args.shares:
        budgets = {}
        runs = {mode: [] for mode in args.modes}
        for turn in range(args.rounds):
            for mode in args.modes[turn % len(args.modes):] + args.modes[:turn % len(args.modes)]:
                # all within the bytes that whole experts need to hold the share
                if share not in budgets:
                    first = run(args, 0, "--ffn-resident", share, "--sparsity", "dense")
                    budgets[share] = str(first["memory"]["budget_bytes"])
                runs[mode].append(run(args, turn, "--memory", budgets[share], "--sparsity", mode))
            # what a predictor misses is missing from the text
            same_text([runs[mode][-1] for mode in args.modes if mode != "predicted"], f"round {turn} at {share}")
        for mode, each in runs.items():
            gain = statistics.median(speed(a) / speed(b) for a, b in zip(each, runs["dense"]))
            more = median(runs["dense"], read_per_token) / max(median(each, read_per_token), 1)
            line(f"{float(share):.0%}", mode, f"{each[0]['memory']['budget_bytes'] / 2**20:.0f} MiB", ranged(each),
                 f"{gain:.2f}", f"{median(each, read_per_token) / 1e6:.2f} MB", f"{more:.2f} times as much",
                 f"{median(each, lambda run: run['sparsity']['active_share'] or 0):.0%}",
                 "held" if each[0]["memory"]["gates"] else "read",
                 f"{median(each, lambda r: r['io']['wait_share']):.0%}")


def order(args):
    with tempfile.TemporaryDirectory() as folder:
        source, stats = f"{folder}/hf", f"{folder}/stats"
        models = {name: f"{folder}/{name}.ember" for name in ["as it is", "hottest first"]}
        plain, ordered = models.values()
        pack = [args.emberflow, "pack", source, "--quant", args.quant, "--json", "-o"]
        call(args.emberflow, "export", args.model, "-o", source, "--json")
        call(*pack, plain)
        call(args.emberflow, "profile", plain, "-f", args.text, "-o", stats, "--limit", str(args.tokens), "--json")
        call(*pack, ordered, "--stats", stats)
        if "predicted" in args.modes:
            for name, model in models.items():
                call(args.emberflow, "train-predictor", model, "-f", args.text, "--tokens", str(args.tokens), "--bytes",
                     "20", "--kind", "coarse", "-o", f"{model}.named", "--json")
                models[name] = f"{model}.named"
        print(f"\norder: {args.model}, {args.quant}, {args.rounds} rounds of {args.new} tokens, --io {args.io}")
        table("resident", "sparsity", "order", "read per token", "reads per token", "Gate rows")
        for share in args.shares:
            for mode in args.modes:
                budget = None
                for name, model in models.items():
                    of = argparse.Namespace(**{**vars(args), "model": model})
                    if budget is None:
                        first = run(of, 0, "--ffn-resident", share, "--sparsity", mode)
                        budget = str(first["memory"]["budget_bytes"])
                    each = [run(of, turn, "--memory", budget, "--sparsity", mode) for turn in range(args.rounds)]
                    reads = median(each, lambda one: one["io"]["reads"] / one["generated_tokens"])
                    line(f"{float(share):.0%}", mode, name, f"{median(each, read_per_token) / 1e3:.0f} kB",
                         f"{reads:.1f}", "held" if each[0]["memory"]["gates"] else "read")


def bound(args):
    print(f"\nbound: {args.model}, {args.rounds} rounds of {args.new} tokens, --sparsity {args.sparsity}")
    table("resident", "ms per token", "read per token", "reads", "disk", "computed", "memory", "bound, ms",
          "times the bound")
    for share in args.shares:
        found = []
        for turn in range(args.rounds):
            one = run(args, turn, "--ffn-resident", share, "--sparsity", args.sparsity)
            decode = call(lab(args), "decode", args.model, "--ffn-resident", share, "--sparsity",
                          args.sparsity, "--io", args.io, "--quick", "--json")
            reads = one["io"]["reads"] / one["generated_tokens"]
            missed = read_per_token(one)
            length = min(max(round(missed / max(reads, 1) / 4096), 1), 256) * 4
            disk = call(args.emberflow, "bench", "io", args.model, "--sizes", f"{length}KiB", "--depths", "16",
                        "--ranges", "0", "--json")
            rate = max(point["mb_per_s"] for point in disk["points"]) * 1e6
            computed, memory = decode["contexts"][0]["bytes_per_token"], decode["memory_gb_per_s"] * 1e9
            least = max(missed / rate, computed / memory) * 1e3
            found.append((1e3 / speed(one), missed, reads, rate, computed, memory, least, 1e3 / speed(one) / least))
        ms, missed, reads, rate, computed, memory, least, times = map(statistics.median, zip(*found))
        line(f"{float(share):.0%}", f"{ms:.1f}", f"{missed / 1e6:.1f} MB", f"{reads:.0f}", f"{rate / 1e6:.0f} MB/s",
             f"{computed / 1e6:.0f} MB", f"{memory / 1e9:.1f} GB/s", f"{least:.1f}", f"{times:.2f}")


def split(args):
    """Every line of the ledger, and a token's time, is a line through two models that differ in layers only."""
    models = [args.other, args.model]
    layers = [call(args.emberflow, "inspect", model, "--json")["meta"]["config"]["layers"] for model in models]
    full = lambda few, many: few + (many - few) / (layers[1] - layers[0]) * (args.layers - layers[0])
    budget = parse(args.memory[0])
    plans = [call(args.emberflow, "plan", model, "--io", args.io, "--context", "2048", "--memory", args.memory[0],
                  "--json") for model in models]
    ledgers = [plan["plans"][0]["memory"] for plan in plans]
    held = {key: full(*(ledger[key] for ledger in ledgers))
            for key in ["process", "fixed", "scales", "kv", "predictor", "scratch", "margin"]}
    held["kernel"] = budget / 128
    rest = budget - sum(held.values())
    # Both fit.
    experts = full(*(ledger["gates"] + ledger["hot"] + ledger["cold"] for ledger in ledgers))
    share = rest / experts
    print(f"\nsplit: {args.layers} layers from {layers[0]} and {layers[1]}, within {args.memory[0]}")
    table("part", "MiB")
    for key, size in [*held.items(), ("experts' cache", rest)]:
        line(key, f"{size / 2**20:.0f}")
    print(f"the cache holds {share:.1%} of the experts' {experts / 2**30:.1f} GiB", flush=True)
    smallest = full(*(plan["smallest_bytes"] for plan in plans))
    print(f"the smallest budget is {smallest / 2**20:.0f} MiB")
    table("sparsity", *(f"ms per token, {n} layers" for n in layers), f"tokens/s, {args.layers} layers",
          "read per token")
    for mode in args.modes:
        times, reads = [[], []], [[], []]
        for turn in range(args.rounds):
            for i, model in enumerate(models):
                one = run(argparse.Namespace(**{**vars(args), "model": model}), turn, "--ffn-resident",
                          f"{share:.4f}", "--sparsity", mode)
                times[i].append(1e3 / speed(one))
                reads[i].append(read_per_token(one))
        times, reads = ([statistics.median(each) for each in both] for both in (times, reads))
        line(mode, *(f"{ms:.1f}" for ms in times), f"{1e3 / full(*times):.2f}", f"{full(*reads) / 1e6:.0f} MB")


def parse(size):
    for unit, factor in [("GiB", 2**30), ("MiB", 2**20)]:
        if size.endswith(unit):
            return float(size[:-3]) * factor
    return float(size)


PROOFS = {"misses": misses, "ahead": ahead, "budgets": budgets, "sparsity": sparsity, "order": order, "bound": bound,
          "split": split}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")
    parser.add_argument("emberflow")
    parser.add_argument("model", nargs="?", default="demo-moe")
    parser.add_argument("--proofs", type=words, default=["misses", "ahead"])
    parser.add_argument("--make", metavar="SHAPE:LAYERS")
    parser.add_argument("--text", default=str(HELDOUT))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shares", type=words, default=["0.25", "0.5", "0.75"])
    parser.add_argument("--memory", type=words, default=[f"{mib}MiB" for mib in range(24, 37, 2)])
    parser.add_argument("--new", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--sparsity", default="dense", choices=["exact", "dense"])
    parser.add_argument("--quant", default="q8")
    parser.add_argument("--other", metavar="MODEL")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--modes", type=words, default=["dense", "exact"])
    args = parser.parse_args()
    unknown = [proof for proof in args.proofs if proof not in PROOFS]
    if unknown:
        parser.error(f"no proofs {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    make(args)
    for proof in args.proofs:
        PROOFS[proof](args)


if __name__ == "__main__":
    main()
