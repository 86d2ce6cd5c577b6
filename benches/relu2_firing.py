#!/usr/bin/env python3
"""How many neurons fire in experts without a gate: trains a small mixture and counts.

Nemotron 3's experts compute down(relu(up(x))^2), so that a neuron whose product is not positive
adds nothing and its column of Down need not be read. This script trains a mixture of the same
form (sigmoid router with a correction bias, weights that sum to 2.5, one shared expert of twice
the width, F/D = 0.69) on the demo models' corpus and prints, at intervals, the loss on held-out
text and the share of the visited experts' neurons that fire. Attention is rotated and stands in
every layer, where Nemotron has Mamba-2 in most.

  models/demo/corpus.py --out build/corpus
  models/demo/train.py tokenizer --corpus build/corpus --out build/data
  relu2_firing.py --data build/data --minutes 6 [--json FILE]
"""

import argparse
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

V, D, HEADS, KV, HD = 4096, 512, 8, 2, 64
E, TOP, FF, SHARED, SCALE = 64, 6, 352, 704, 2.5
T = 512


class Experts(torch.nn.Module):
    """Routed and shared experts; `fired` and `shared_fired` are sums over the rows since `reset`."""

    def __init__(self, layers):
        super().__init__()
        self.router = torch.nn.Parameter(torch.randn(E, D) * 0.02)
        self.up = torch.nn.Parameter(torch.randn(E, FF, D) * 0.02)
        self.down = torch.nn.Parameter(torch.randn(E, FF, D) * 0.02 / math.sqrt(2 * layers))
        self.shared_up = torch.nn.Linear(D, SHARED, bias=False)
        self.shared_down = torch.nn.Linear(SHARED, D, bias=False)
        torch.nn.init.normal_(self.shared_up.weight, std=0.02)
        torch.nn.init.normal_(self.shared_down.weight, std=0.02 / math.sqrt(2 * layers))
        self.register_buffer("bias", torch.zeros(E))
        self.reset()

    def reset(self):
        self.rows = 0
        self.fired = torch.zeros(E, FF)
        self.shared_fired = torch.zeros(SHARED)

    def forward(self, x):
        scores = torch.sigmoid(F.linear(x.float(), self.router))
        chosen = (scores + self.bias).topk(TOP, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * SCALE
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=E)
        if self.training:  # balancing without a loss: the bias of busy experts falls
            self.bias -= 1e-3 * torch.sign(counts.float() - counts.float().mean())
        rows = x[order // TOP].split(counts.tolist())
        up, down = self.up.to(x.dtype).unbind(), self.down.to(x.dtype).unbind()
        hidden = [torch.relu(F.linear(r, u)) for r, u in zip(rows, up)]
        shared = torch.relu(self.shared_up(x))
        if not self.training:
            self.rows += len(x)
            self.fired += torch.stack([(h > 0).sum(0) for h in hidden]).cpu()
            self.shared_fired += (shared > 0).sum(0).cpu()
        out = torch.cat([h.square() @ d for h, d in zip(hidden, down)])
        out = out * weights.flatten()[order, None].to(out.dtype)
        summed = torch.zeros_like(x, dtype=torch.float32).index_add(0, order // TOP, out.float())
        return summed + self.shared_down(shared.square())


class Layer(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(D), torch.nn.RMSNorm(D)
        self.qkv = torch.nn.Linear(D, (HEADS + 2 * KV) * HD, bias=False)
        self.out = torch.nn.Linear(HEADS * HD, D, bias=False)
        torch.nn.init.normal_(self.qkv.weight, std=0.02)
        torch.nn.init.normal_(self.out.weight, std=0.02 / math.sqrt(2 * layers))
        self.experts = Experts(layers)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, HEADS + 2 * KV, HD).transpose(1, 2)
        qk, v = qkv.split([HEADS + KV, KV], 1)
        first, second = qk.chunk(2, -1)
        qk = (qk * cos + torch.cat([-second, first], -1) * sin).to(v.dtype)
        q, k = qk.split([HEADS, KV], 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, -1))
        n = self.norm2(x).view(b * t, D)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return x + self.experts(n.to(dtype)).view(b, t, D)


class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = torch.nn.Embedding(V, D)
        torch.nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = torch.nn.ModuleList(Layer(layers) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(D)

    def forward(self, tokens, targets):
        t = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(t, 10000.0 ** (-torch.arange(0, HD, 2, device=tokens.device) / HD))
        angles = torch.cat([angles, angles], -1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def most(counts, share):
    """Share of the neurons that make `share` of all firings, most frequent first."""
    counts = counts.flatten().sort(descending=True).values
    total = counts.cumsum(0)
    return (total < share * total[-1]).float().mean().item()


def measure(model, held, device, windows):
    model.eval()
    for layer in model.layers:
        layer.experts.reset()
    losses = []
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for i in range(0, windows, 8):
            rows = torch.stack([held[j * T:j * T + T + 1] for j in range(i, i + 8)]).to(device)
            losses.append(model(rows[:, :-1], rows[:, 1:]).item())
    model.train()
    experts = [layer.experts for layer in model.layers]
    routed = [(e.fired.sum() / (e.rows * TOP * FF)).item() for e in experts]
    shared = [(e.shared_fired.sum() / (e.rows * SHARED)).item() for e in experts]
    return {
        "loss": sum(losses) / len(losses),
        "routed": sum(routed) / len(routed),
        "shared": sum(shared) / len(shared),
        "routed_by_layer": routed,
        "shared_by_layer": shared,
        "neurons_of_80_percent": most(torch.stack([e.fired for e in experts]), 0.8),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 tokens per step")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    train, held = (torch.from_numpy(np.load(args.data / f"{name}.npy").astype(np.int64))
                   for name in ("train", "heldout"))
    model = Model(args.layers).to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    windows = min(96, (len(held) - 1) // T // 8 * 8)
    generator = torch.Generator().manual_seed(2)
    start, done, results = time.monotonic(), 0.0, []
    for step in range(args.steps + 1):
        done = max(step / args.steps, (time.monotonic() - start) / (60 * args.minutes))
        if step % max(args.steps // 15, 1) == 0 or done >= 1:
            found = {"step": step, "tokens": step * args.batch * T, **measure(model, held, device, windows)}
            results.append(found)
            print(f"step {step}, {found['tokens'] / 1e6:.1f} M tokens: held-out loss {found['loss']:.3f}, "
                  f"fire: routed {found['routed']:.1%}, shared {found['shared']:.1%}; "
                  f"{found['neurons_of_80_percent']:.1%} of neurons make 80 % of firings", flush=True)
        if done >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(step / 50, 1.0) * (1 - done if done > 0.3 else 0.7) / 0.7
        at = torch.randint(0, len(train) - T - 1, (args.batch,), generator=generator)
        rows = torch.stack([train[i:i + T + 1] for i in at]).to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    if args.json:
        args.json.write_text(json.dumps({"tokens_of_corpus": len(train), "device": torch.cuda.get_device_name()
                                         if device == "cuda" else "cpu", "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
