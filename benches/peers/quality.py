#!/usr/bin/env python3
"""Perplexity by bytes: this program's formats beside llama.cpp's, of one checkpoint.

    emberflow export -o build/demo.gguf
    python benches/peers/quality.py --emberflow target/release/emberflow \\
        --llama-cpp LLAMA_CPP/build/bin --gguf build/demo.gguf --text models/demo/heldout.txt

llama-quantize makes its files; `pack --quant f32` takes their weights as they are, and one program
scores all of them, so that tokens, windows and arithmetic are the same and only the weights differ.
With --errors it also rounds the checkpoint's weights, in rows of 256, to 4-bit formats of ggml and
prints the error that each leaves. Packages: gguf, numpy.
"""

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from common import write_csv

TYPES = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q8_0")
FORMATS = {"Q4_0": 2, "IQ4_NL": 20, "Q4_K": 12, "MXFP4": 39, "Q5_K": 13}


def out_of(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def scored(args, container):
    limit = ["--limit", args.limit] if args.limit else []
    found = out_of(args.emberflow, "perplexity", container, "-f", args.text, *limit, "--json")
    return json.loads(found[found.index("{"):found.rindex("}") + 1])


def weight_bytes(args, container):
    """Bytes of weights alone: no tokenizer, no padding, no checksums."""
    found = json.loads(out_of(args.emberflow, "inspect", container, "--json"))
    sections = {section["name"]: section["payload"] for section in found["sections"]}
    return sum(sections[name] for name in ("dense tensors", "scales", "bundles"))


def ours(args, folder):
    for name, options in {
        "q4": ["q4"], "q4, calibrated": ["q4", "--calibrate", args.calibrate],
        "q4k": ["q4k"], "q4k, calibrated": ["q4k", "--calibrate", args.calibrate],
        "q4, embedding q4": ["q4", "--embedding-quant", "q4"], "q8": ["q8"],
        **{f"auto:{size}": [f"auto:{size}"] for size in args.auto},
        **{f"auto:{size}, calibrated": [f"auto:{size}", "--calibrate", args.calibrate]
           for size in args.auto},
    }.items():
        if None in options:
            continue
        container = folder / "m.ember"
        out_of(args.emberflow, "pack", args.gguf, "-o", container, "--force", "--quant", *options)
        yield name, weight_bytes(args, container), container


def theirs(args, folder):
    for kind in TYPES:
        quantised, container = folder / f"{kind}.gguf", folder / "m.ember"
        said = out_of(args.llama_cpp / "llama-quantize", args.gguf, quantised, kind, 2)
        size = float(re.search(r"quant size += +([\d.]+) MiB", said).group(1))
        fallbacks = re.search(r"(\d+) of \d+ tensor\(s\) required fallback", said)
        out_of(args.emberflow, "pack", quantised, "-o", container, "--force", "--quant", "f32")
        quantised.unlink()
        name = f"llama.cpp {kind}" + (f", {fallbacks[1]} matrices in other types" if fallbacks else "")
        yield name, round(size * 2**20), container


def errors(args):
    """The share of the weights' squares that 4-bit formats leave as error."""
    from gguf import GGMLQuantizationType, GGUFReader, quants
    library = ctypes.CDLL(args.llama_cpp / "libggml-base.so")
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pieces = [t.data.reshape(-1) for t in GGUFReader(args.gguf).tensors if len(t.shape) == 2]
    weights = np.concatenate([p[: p.size // 256 * 256] for p in pieces]).astype("<f4").reshape(-1, 256)
    rows = len(weights)
    for name, number in FORMATS.items():
        stored = np.zeros(rows * 256, np.uint8)
        pointer = ctypes.POINTER(ctypes.c_float)
        used = library.ggml_quantize_chunk(
            ctypes.c_int(number), weights.ctypes.data_as(pointer),
            stored.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(rows),
            ctypes.c_int64(256), ctypes.cast(None, pointer))
        back = quants.dequantize(stored[:used].reshape(rows, -1), GGMLQuantizationType(number))
        left = float(((back - weights) ** 2).sum() / (weights**2).sum())
        print(f"{name:8} {8 * used / weights.size:.3f} bits a weight, error {left:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emberflow", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, help="training text")
    parser.add_argument("--auto", nargs="*", default=[], help="sizes for --quant auto:SIZE")
    parser.add_argument("--limit", type=int, help="tokens to score; default: all")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--errors", action="store_true")
    args = parser.parse_args()
    args.emberflow = args.emberflow.resolve()
    if args.errors:
        errors(args)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for source in (ours, theirs):
            for name, size, container in source(args, Path(folder)):
                found = scored(args, container)
                rows.append([name, size, found["perplexity"], found["bits_per_byte"]])
                print(*rows[-1], sep=" | ", flush=True)
    if args.csv:
        write_csv(args.csv, ["format", "weight_bytes", "perplexity", "bits_per_byte"], rows)


if __name__ == "__main__":
    main()
