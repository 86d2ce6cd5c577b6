#!/usr/bin/env python3
"""Measures a demo model on the held-out split and writes activation statistics.

  evaluate.py --model DIR --data DIR --out results.json [--stats activation_stats.json]

Perplexity is over windows of 1,024 tokens of the held-out stream (every document starts
with the end-of-text token); all tokens but each window's first are predicted, by the
model and by the trigram baseline alike.
"""

import argparse
import copy
import json
import math
import pathlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 1024
GROUP = 32
SAMPLES = [
    "## What Is Ownership?\n\n",
    "# Struct HashMap\n\n```\npub struct HashMap<K, V, S = RandomState>",
    "chat:Error code E0382",
]


# Quantisation: groups of 32 along the input dimension, f16 scales, as in the container.

def round_trip_q8(w):
    groups = w.reshape(-1, GROUP)
    scale = (groups.abs().amax(1, keepdim=True) / 127).half().float()
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return ((groups * inverse).round().clamp(-127, 127) * scale).reshape(w.shape)


def round_trip_q4(w):
    groups = w.reshape(-1, GROUP)
    at = groups.abs().argmax(1, keepdim=True)
    scale = (groups.gather(1, at) / -8).half().float()
    inverse = torch.where(scale != 0, 1 / scale, torch.zeros_like(scale))
    quantised = ((groups * inverse).round() + 8).clamp(0, 15)
    return ((quantised - 8) * scale).reshape(w.shape)


def quantised(model, layer_round_trip):
    """A copy with quantised layers and q8 embeddings; norms and routers stay f32."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2 or name.endswith("mlp.gate.weight"):
                continue
            if "embed_tokens" in name or "lm_head" in name:
                p.copy_(round_trip_q8(p))
            elif "down_proj" in name:
                # Stored per neuron in a bundle, so the groups run along hidden_size.
                p.copy_(layer_round_trip(p.mT.contiguous()).mT)
            else:
                p.copy_(layer_round_trip(p))
    return model


def windows(tokens):
    for start in range(0, len(tokens) - 1, WINDOW):
        ids = torch.from_numpy(tokens[start:start + WINDOW].astype(np.int64))
        if len(ids) > 1:
            yield ids[None]


def negative_log_likelihood(model, tokens):
    """Total nats over all predicted tokens, and their number."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in windows(tokens):
            logits = model(ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    return total, count


class Trigram:
    """Interpolated modified Kneser-Ney (Chen and Goodman 1998), order 3."""

    def __init__(self, tokens, vocab):
        t = tokens.astype(np.int64)
        self.vocab = vocab
        self.k3, c3 = np.unique((t[:-2] * vocab + t[1:-1]) * vocab + t[2:], return_counts=True)
        # Lower orders count distinct left contexts, not occurrences.
        self.k2, c2 = np.unique(self.k3 % (vocab * vocab), return_counts=True)
        k1, c1 = np.unique(self.k2 % vocab, return_counts=True)
        self.h3 = self.table(self.k3, c3)
        self.h2 = self.table(self.k2, c2)
        d = self.discounts(c1)
        unigram = np.zeros(vocab)
        unigram[k1] = c1 - d[np.minimum(c1, 3)]
        total = c1.sum()
        self.p1 = unigram / total + (d[np.minimum(c1, 3)].sum() / total) / vocab

    @staticmethod
    def discounts(counts):
        n = [np.count_nonzero(counts == i) for i in (1, 2, 3, 4)]
        if min(n) == 0:
            return np.array([0.0, 0.5, 0.5, 0.5])
        y = n[0] / (n[0] + 2 * n[1])
        return np.array([0.0] + [i - (i + 1) * y * n[i] / n[i - 1] for i in (1, 2, 3)])

    def table(self, keys, counts):
        d = self.discounts(counts)[np.minimum(counts, 3)]
        contexts, at = np.unique(keys // self.vocab, return_inverse=True)
        total = np.bincount(at, counts)
        return counts - d, contexts, total, np.bincount(at, d)

    @staticmethod
    def find(keys, wanted):
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return at, keys[at] == wanted

    def interpolate(self, keys, table, wanted, lower):
        discounted, contexts, total, mass = table
        at, hit = self.find(keys, wanted)
        context, known = self.find(contexts, wanted // self.vocab)
        direct = np.where(hit, discounted[at], 0.0)
        return np.where(known, (direct + mass[context] * lower) / total[context], lower)

    def probability(self, a, b, c):
        p2 = self.interpolate(self.k2, self.h2, b * self.vocab + c, self.p1[c])
        return self.interpolate(self.k3, self.h3, (a * self.vocab + b) * self.vocab + c, p2)

    def negative_log_likelihood(self, tokens):
        t = tokens.astype(np.int64)
        at = np.arange(len(t))
        at = at[(at % WINDOW != 0)]
        a = np.where(at >= 2, t[at - 2], 0)
        return -np.log(self.probability(a, t[at - 1], t[at])).sum(), len(at)


def activity(model, tokens):
    """Per layer: activation counts per neuron, and how many stay active for the next token."""
    layers = model.config.num_hidden_layers
    counts = np.zeros((layers, model.config.intermediate_size), dtype=np.int64)
    stayed, could = np.zeros(layers), np.zeros(layers)
    seen = 0
    hooks = []

    def hook(layer):
        def record(_module, _inputs, output):
            active = output[0] > 0
            counts[layer] += active.sum(0).numpy()
            stayed[layer] += (active[1:] & active[:-1]).sum().item()
            could[layer] += active[:-1].sum().item()
        return record

    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.mlp.act_fn.register_forward_hook(hook(i)))
    with torch.no_grad():
        for ids in windows(tokens):
            model.model(ids)
            seen += ids.shape[1]
    for h in hooks:
        h.remove()
    return counts, stayed / could, seen


def activity_in_experts(model, tokens):
    """Per layer: the share of the visited experts' neurons that are active."""
    active, looked_at, hooks = {}, {}, []

    def hook(layer):
        def record(_module, _inputs, output):
            active[layer] = active.get(layer, 0) + (output > 0).sum().item()
            looked_at[layer] = looked_at.get(layer, 0) + output.numel()
        return record

    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.mlp.experts.act_fn.register_forward_hook(hook(i)))
    with torch.no_grad():
        for ids in windows(tokens):
            model.model(ids)
    for h in hooks:
        h.remove()
    return [{"layer": i, "mean_activity": round(active[i] / looked_at[i], 4)} for i in sorted(active)]


def activity_report(counts, persistence, seen):
    rows = []
    for layer, c in enumerate(counts):
        ranked = np.sort(c)[::-1]
        cumulative = np.cumsum(ranked) / max(ranked.sum(), 1)
        rows.append({
            "layer": layer,
            "mean_activity": round(float(c.mean() / seen), 4),
            "neurons_for_80_percent": round(float((np.searchsorted(cumulative, 0.8) + 1) / len(c)), 4),
            "hottest_20_percent_carry": round(float(cumulative[len(c) // 5 - 1]), 4),
            "never_active": int((c == 0).sum()),
            "stays_active_next_token": round(float(persistence[layer]), 4),
        })
    return rows


def sample(model, tokenizer, prompt, seed, length=160):
    if prompt.startswith("chat:"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt[5:]}], tokenize=False, add_generation_prompt=True)
    else:
        prompt = tokenizer.bos_token + prompt
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length,
                         do_sample=True, temperature=0.7, top_p=0.9, top_k=0, pad_token_id=0)
    return tokenizer.decode(out[0], skip_special_tokens=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--stats", type=pathlib.Path, help="of the dense model; `emberflow profile` counts experts")
    parser.add_argument("--stats-tokens", type=int, default=200 * WINDOW)
    parser.add_argument("--limit", type=int, default=0, help="use only this many held-out tokens")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, experts_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    held = np.load(args.data / "heldout.npy")
    if args.limit:
        held = held[:args.limit]
    train = np.load(args.data / "train.npy")

    # In the byte-level alphabet one character of a token's string is one byte of text.
    lengths = np.array([0 if i < 4 else len(tokenizer.convert_ids_to_tokens(i)) for i in range(len(tokenizer))])
    predicted = np.arange(len(held)) % WINDOW != 0
    size = int(lengths[held[predicted]].sum())
    results = {"heldout_tokens": int(predicted.sum()), "heldout_bytes": size, "window": WINDOW,
               "parameters": sum(p.numel() for p in model.parameters())}

    def report(name, nats, count):
        nats = float(nats)
        results[name] = {"perplexity": round(math.exp(nats / count), 3),
                         "loss": round(nats / count, 4),
                         "bits_per_byte": round(nats / math.log(2) / size, 4)}
        print(name, results[name], flush=True)

    report("trigram", *Trigram(train, len(tokenizer)).negative_log_likelihood(held))
    report("f32", *negative_log_likelihood(model, held))
    report("q8", *negative_log_likelihood(quantised(model, round_trip_q8), held))
    report("q4", *negative_log_likelihood(quantised(model, round_trip_q4), held))

    experts = hasattr(model.config, "num_local_experts")
    results["activity_heldout"] = activity_in_experts(model, held) if experts else activity_report(*activity(model, held))
    results["mean_activity_heldout"] = round(
        float(np.mean([row["mean_activity"] for row in results["activity_heldout"]])), 4)
    for row in results["activity_heldout"]:
        print(row, flush=True)
    results["samples"] = [sample(model, tokenizer, prompt, seed) for seed, prompt in enumerate(SAMPLES)]
    print("\n-----\n".join(results["samples"]), flush=True)
    args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    if args.stats:
        # Evenly spread windows of the training stream.
        starts = np.linspace(0, len(train) - WINDOW - 1, args.stats_tokens // WINDOW).astype(int)
        counts, _, seen = activity(model, np.concatenate([train[s:s + WINDOW] for s in starts]))
        stats = {"format": "emberflow-stats-v1", "tokens": seen, "layers": [
            {"layer": i, "experts": [{"expert": 0, "counts": c.tolist()}]} for i, c in enumerate(counts)]}
        args.stats.write_text(json.dumps(stats, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
