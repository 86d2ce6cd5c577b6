#!/usr/bin/env python3
"""What one scale per token costs: perplexity with weights in 8 bits per row and activations in 8 bits.

usage: token_scales.py MODEL.gguf TEXT [--tokens 2048]

Activations are rounded with one scale per group of 32, per token, per token with the K largest of them
left out (their rest beyond 127 steps is added, as in llm.npu's shadow outlier execution), or with a scale of
k times the root mean square. Needs transformers, gguf and accelerate.
"""

import argparse
import math
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def perplexity(model, ids, window=256):
    loss, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids), window):
            x = torch.tensor([ids[start : start + window]])
            logits = model(x).logits[0]
            loss += torch.nn.functional.cross_entropy(logits[:-1], x[0, 1:], reduction="sum").item()
            count += x.shape[1] - 1
    return math.exp(loss / count)


def steps(x, rule, size):
    """The step of each activation's scale."""
    magnitudes = x.abs()
    largest = magnitudes.amax(-1, keepdim=True)
    if rule == "group":
        groups = x.view(*x.shape[:-1], -1, 32).abs().amax(-1, keepdim=True)
        largest = groups.expand(*groups.shape[:-1], 32).reshape(x.shape)
    elif rule == "without":
        largest = magnitudes.topk(size + 1, -1).values[..., -1:]
    elif rule == "rms":
        largest = (x.pow(2).mean(-1, keepdim=True).sqrt() * size).minimum(largest)
    return (largest / 127).clamp_min(1e-12)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    folder, name = os.path.split(os.path.abspath(options.gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    with open(options.text) as file:
        ids = tokenizer(file.read(20 * options.tokens)).input_ids[: options.tokens]
    print(f"f32: {perplexity(model, ids):.4f}", flush=True)
    rule, beyond = [None, 0], [0, 0]

    def rounded(_, inputs):
        x = inputs[0]
        if rule[0] is None:
            return None
        step = steps(x, *rule)
        quants = (x / step).round()
        beyond[0] += (quants.abs() > 127).sum().item()
        beyond[1] += quants.numel()
        return (quants * step,)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            step = (module.weight.data.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            module.weight.data = (module.weight.data / step).round() * step
            module.register_forward_pre_hook(rounded)
    print(f"weights by row: {perplexity(model, ids):.4f}", flush=True)
    rules = [("group", 0), ("token", 0)]
    rules += [("without", k) for k in (1, 2, 4, 8, 16)] + [("rms", k) for k in (4, 6, 8)]
    for kind, size in rules:
        rule[:], beyond[:] = [kind, size], [0, 0]
        result = perplexity(model, ids)
        share = beyond[0] / max(beyond[1], 1)
        print(f"activations by {kind} {size or ''}: {result:.4f}, {100 * share:.3f} % beyond", flush=True)


if __name__ == "__main__":
    main()
