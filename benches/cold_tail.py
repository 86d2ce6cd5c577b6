#!/usr/bin/env python3
"""What a cold tail in 3 bits costs: perplexity by the share of the neurons that are rounded to it.

    emberflow export -o build/demo-hf
    python benches/cold_tail.py --emberflow target/release/emberflow --checkpoint build/demo-hf \\
        --stats models/demo/activation_stats.json --text models/demo/heldout.txt --limit 16384

Neurons are rounded in blocks of 32 weights with a scale in f16: q4 as `pack` does it, the least frequent
ones to 3 bits with the scale of the least squared error, or with one minimum more in each block. The result
is packed in f32 with the other weights as they are, so that nothing else differs. A token's bytes are those
of its firing neurons (Up and Down), by the statistics. Packages: numpy.
"""

import argparse
import json
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

BLOCK = 32


def as_f16(x):
    return x.astype(np.float16).astype(np.float32)


def q4(x):
    blocks = x.reshape(-1, BLOCK)
    at = np.abs(blocks).argmax(axis=1)
    scale = as_f16(blocks[np.arange(len(blocks)), at] / -8)[:, None]
    safe = np.where(scale == 0, 1, scale)
    return (np.clip(np.round(blocks / safe), -8, 7) * scale).reshape(x.shape)


def nearest(candidates, blocks):
    """Of each block the candidate with the least squared error."""
    errors = [((rounded - blocks) ** 2).sum(axis=1) for rounded in candidates]
    return np.stack(candidates)[np.argmin(errors, axis=0), np.arange(len(blocks))]


def q3(x):
    blocks = x.reshape(-1, BLOCK)
    at = np.abs(blocks).argmax(axis=1)
    most = blocks[np.arange(len(blocks)), at]
    candidates = []
    for divisor in np.arange(-4.8, -2.6, 0.1):
        scale = as_f16(most / divisor)[:, None]
        safe = np.where(scale == 0, 1, scale)
        rounded = np.clip(np.round(blocks / safe), -4, 3) * scale
        candidates.append(rounded)
    return nearest(candidates, blocks).reshape(x.shape)


def q3_with_minimum(x):
    blocks = x.reshape(-1, BLOCK)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    candidates = []
    for inner in np.arange(0.7, 1.01, 0.05):
        middle, half = (low + high) / 2, (high - low) / 2 * inner
        scale, base = as_f16(2 * half / 7), as_f16(middle - half)
        safe = np.where(scale == 0, 1, scale)
        rounded = np.clip(np.round((blocks - base) / safe), 0, 7) * scale + base
        candidates.append(rounded)
    return nearest(candidates, blocks).reshape(x.shape)


class Tensors:
    """A .safetensors file in memory."""

    def __init__(self, path):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        self.header = json.loads(data[8:8 + size])
        self.body = bytearray(data[8 + size:])

    def _place(self, name):
        entry = self.header[name]
        kind = {"F32": np.float32, "F16": np.float16}[entry["dtype"]]
        first, end = entry["data_offsets"]
        return np.frombuffer(memoryview(self.body)[first:end], dtype=kind).reshape(entry["shape"])

    def get(self, name):
        return self._place(name).astype(np.float32)

    def put(self, name, value):
        place = self._place(name)
        place[...] = value.astype(place.dtype)

    def write(self, path):
        header = json.dumps(self.header).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + self.body)


def perplexity(args, folder):
    container = folder / "m.ember"
    pack = [args.emberflow, "pack", folder, "-o", container, "--force", "--quant", "f32"]
    subprocess.run(pack, check=True, capture_output=True)
    score = [args.emberflow, "perplexity", container, "-f", args.text, "--limit", str(args.limit), "--json"]
    out = subprocess.run(score, check=True, capture_output=True, text=True).stdout
    return json.loads(out)["perplexity"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emberflow", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--limit", type=int, default=16384)
    parser.add_argument("--shares", default="0,0.25,0.5,0.75,1")
    args = parser.parse_args()
    stats = json.loads(args.stats.read_text())
    folder = args.checkpoint.parent / (args.checkpoint.name + "-cold")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(args.checkpoint, folder)
    file = next(folder.glob("*.safetensors"))
    print("kind,bits,cold_share,of_firing,bits_of_firing,bits_of_all,perplexity")
    kinds = {"q3": (q3, 3.5), "q3 with minimum": (q3_with_minimum, 4.0)}
    for kind, (cold_rounding, bits) in kinds.items():
        for share in map(float, args.shares.split(",")):
            tensors, firing, all_of = Tensors(args.checkpoint / file.name), [0.0, 0.0], [0, 0]
            for layer in stats["layers"]:
                counts = np.array(layer["experts"][0]["counts"], dtype=np.float64)
                order = counts.argsort()
                cold = np.zeros(len(counts), dtype=bool)
                cold[order[:round(share * len(counts))]] = True
                firing[0] += counts[cold].sum()
                firing[1] += counts.sum()
                all_of[0] += cold.sum()
                all_of[1] += len(cold)
                for part in ("gate_proj", "up_proj", "down_proj"):
                    name = f"model.layers.{layer['layer']}.mlp.{part}.weight"
                    rows = tensors.get(name)
                    rows = np.ascontiguousarray(rows.T) if part == "down_proj" else rows
                    new = q4(rows)
                    if cold.any():
                        new[cold] = cold_rounding(rows[cold])
                    tensors.put(name, new.T if part == "down_proj" else new)
            tensors.write(file)
            found = perplexity(args, folder)
            of_firing, of_all = firing[0] / firing[1], all_of[0] / all_of[1]
            print(f"{kind},{bits},{share},{of_firing:.3f},{4.5 + (bits - 4.5) * of_firing:.3f},"
                  f"{4.5 + (bits - 4.5) * of_all:.3f},{found:.4f}", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
