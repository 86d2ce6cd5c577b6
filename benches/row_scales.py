#!/usr/bin/env python3
"""What one scale per row costs at four bits: perplexity with the weights of a model rounded to q4c in several ways.

usage: row_scales.py MODEL.gguf TEXT CALIBRATION... [--only NAME,...] [--every N]

Activations stay floats. "nearest" is `pack --quant q4c` (engine/kernels/src/channel.rs), "calibrated" chooses outliers by
their weights and inputs, "weighted" the scales too. GPTQ rounds column by column and makes up for each column's error
in the columns that follow, the outliers last; of five scales each row keeps the best. Covariances are of the inputs of
the float model over the calibration texts. Down has a row for each neuron; embedding and head are q8c. "2x" has twice
the outliers, "128" a scale for each 128 weights of a row. With --every only some layers are rounded, and errors are
printed, not perplexities. Needs transformers, gguf and accelerate, and a Llama-like model.
"""

import argparse
import math
import os
from statistics import mean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHARED = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}
LOW, HIGH, PER_OUTLIER = -8, 7, 64
PACKED = [-8.0, -8.8, -9.6, -10.4, 7.0, 7.7, 8.4, 9.1]
FINE = [sign * steps / 2 for steps in range(14, 36) for sign in (-1, 1)]
FACTORS = [0.8, 0.9, 1.0, 1.12, 1.25]


def perplexity(model, ids, window):
    loss, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids), window):
            x = torch.tensor([ids[start : start + window]])
            hidden = model.model(x).last_hidden_state[0]
            for i in range(0, len(hidden) - 1, 512):
                logits = model.lm_head(hidden[i : i + 512])[: len(hidden) - 1 - i]
                wanted = x[0, i + 1 : i + 1 + len(logits)]
                loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
                count += len(logits)
    return math.exp(loss / count)


def projections(model):
    """(layer, role) and module of the matrices."""
    for number, layer in enumerate(model.model.layers):
        for part in (layer.self_attn, layer.mlp):
            for name, module in part.named_children():
                if name.endswith("_proj"):
                    yield (number, name.removesuffix("_proj")), module


def covariances(model, ids, window, every):
    """The sum of x xT of every input x of the matrices, by layer and first role that shares the input."""
    sums, hooks = {}, []
    for (layer, role), module in projections(model):
        if SHARED[role] == role and layer % every == 0:

            def add(_, inputs, key=(layer, role)):
                x = inputs[0].flatten(0, 1)
                sums[key] = sums.get(key, 0) + x.T @ x

            hooks.append(module.register_forward_pre_hook(add))
    with torch.no_grad():
        for start in range(0, len(ids), window):
            model.model(torch.tensor([ids[start : start + window]]))
    for hook in hooks:
        hook.remove()
    return sums


def integers(w, scale, low, high):
    return (w / scale).round().clamp(low, high).nan_to_num()


def in_bytes(w):
    """Rounded with one scale per row of eight bits."""
    scale = w.abs().amax(1, keepdim=True) / 127
    return integers(w, scale, -127, 127) * scale


def best_scale(w, weights, candidates):
    """The scale of each row with the least weighted squared error: its largest element has that many steps."""
    steps = torch.tensor(candidates)[:, None]
    most = w.gather(1, w.abs().argmax(1, keepdim=True))
    scales = []
    for rows, scale, importance in zip(w.split(8), (most / steps.T).split(8), weights.split(8)):
        scale, rows = scale[..., None], rows[:, None]
        error = (integers(rows, scale, LOW, HIGH) * scale - rows).square_() @ importance[..., None]
        scales.append(scale.gather(1, error.argmin(1, keepdim=True))[:, 0])
    return torch.cat(scales)


def scales_of(w, weights, candidates, group):
    """A scale for each element: that of its row, or of its group of the row."""
    rows, n = w.shape
    group = min(group, n)
    parts = [torch.nn.functional.pad(x.expand(rows, n), (0, -n % group)).view(-1, group) for x in (w, weights)]
    scale = best_scale(*parts, candidates).expand(-1, group)
    return scale.reshape(rows, -1)[:, :n]


def shared_outliers(w, energy, share):
    """The columns with the largest squares times the energy of their inputs."""
    return ((w**2).sum(0) * energy).topk(share * -(-w.shape[1] // PER_OUTLIER)).indices


def nearest(w, weights, candidates, mask, group):
    """Rows in q4c whose outliers are where the mask is true."""
    dense = w.masked_fill(mask, 0)
    scale = scales_of(dense, weights, candidates, group)
    return torch.where(mask, in_bytes(w * mask), integers(dense, scale, LOW, HIGH) * scale)


def own_outliers(w, share):
    """A mask of the largest elements of each row."""
    return torch.zeros_like(w, dtype=torch.bool).scatter(
        1, w.abs().topk(share * -(-w.shape[1] // PER_OUTLIER), 1).indices, True
    )


def sweep(columns, covariance, order, rounded, block=64):
    """GPTQ: `columns` has a column of the matrix in each of its rows, `rounded` the rule for one of them."""
    h = covariance[order][:, order].double()
    h += 0.01 * h.diagonal().mean() * torch.eye(len(h))
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    w, out = columns[order].clone(), torch.empty_like(columns)
    for first in range(0, len(w), block):
        last = min(first + block, len(w))
        errors = torch.empty_like(w[first:last])
        for i in range(first, last):
            q = rounded(i, w)
            errors[i - first] = (w[i] - q) / factor[i, i]
            w[i + 1 : last].addr_(factor[i, i + 1 : last], errors[i - first], alpha=-1)
            out[order[i]] = q
        w[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return out


def gptq_rows(w, covariance, share, group):
    """One scale per row (or group of it), the same outlier columns in all rows; of several scales the best one."""
    energy = covariance.diagonal()
    picked = shared_outliers(w, energy, share)
    dense = w.clone()
    dense[:, picked] = 0
    scale = scales_of(dense, energy, FINE, group).T
    rows, outliers = len(w), len(picked)
    order = energy.clone()
    order[picked] = -1
    order = order.argsort(descending=True, stable=True)
    scale = torch.cat([scale * factor for factor in FACTORS], 1)[order]
    of_outliers = []

    def rounded(i, columns):
        if i < len(columns) - outliers:
            return integers(columns[i], scale[i], LOW, HIGH) * scale[i]
        if not of_outliers:
            of_outliers.append(columns[i:].abs().amax(0) / 127)
        return integers(columns[i], of_outliers[0], -127, 127) * of_outliers[0]

    # outliers come last and in one block, so that they have met all errors when their scale is chosen
    found = sweep(w.T.repeat(1, len(FACTORS)), covariance, order, rounded)
    found = found.T.reshape(len(FACTORS), rows, -1)
    error = found - w
    error = ((error @ covariance) * error).sum(2)
    return found[error.argmin(0), torch.arange(rows)]


def gptq_neurons(w, covariance, share, group):
    """Down: a scale and outliers of its own for each column."""

    def rounded(i, columns):
        row = columns[i : i + 1]
        return nearest(row, torch.ones_like(row), FINE, own_outliers(row, share), group)[0]

    order = covariance.diagonal().argsort(descending=True, stable=True)
    return sweep(w.T, covariance, order, rounded).T


def round_matrix(how, role, w, covariance):
    """A matrix in the format and by the rule of a variant."""
    share, group = how.get("share", 1), how.get("group", max(w.shape))
    if how["rule"] == "gptq":
        return (gptq_neurons if role == "down" else gptq_rows)(w, covariance, share, group)
    weighted = how["rule"] == "weighted"
    candidates = FINE if weighted else PACKED
    if role == "down":
        w = w.T
        return nearest(w, torch.ones_like(w), candidates, own_outliers(w, share), group).T
    energy = covariance.diagonal() if weighted or how.get("calibrated") else torch.ones(w.shape[1])
    mask = torch.zeros_like(w, dtype=torch.bool)
    mask[:, shared_outliers(w, energy, share)] = True
    return nearest(w, energy if weighted else torch.ones_like(energy), candidates, mask, group)


VARIANTS = {
    "nearest": {"rule": "nearest"},
    "nearest-128": {"rule": "nearest", "group": 128},
    "nearest-calibrated": {"rule": "nearest", "calibrated": True},
    "weighted": {"rule": "weighted"},
    "weighted-2x": {"rule": "weighted", "share": 2},
    "weighted-128": {"rule": "weighted", "group": 128},
    "gptq": {"rule": "gptq"},
    "gptq-2x": {"rule": "gptq", "share": 2},
    "gptq-4x": {"rule": "gptq", "share": 4},
    "gptq-128": {"rule": "gptq", "group": 128},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf")
    parser.add_argument("text")
    parser.add_argument("calibration", nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibrate-tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--every", type=int, default=0, help="round every Nth layer and print errors only")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants: " + ", ".join(VARIANTS))
    options = parser.parse_args()
    folder, name = os.path.split(os.path.abspath(options.gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    with open(options.text) as file:
        ids = tokenizer(file.read(20 * options.tokens)).input_ids[: options.tokens]
    texts = []
    share = -(-options.calibrate_tokens // len(options.calibration))
    for path in options.calibration:
        with open(path) as file:
            texts += tokenizer(file.read(20 * share)).input_ids[:share]
    print(f"{len(ids)} tokens, calibrated on {len(texts)}", flush=True)
    roles = list(SHARED)
    print("| | squared error | of products | " + " | ".join(roles) + " | perplexity | loss |")
    print("|---" * (5 + len(roles)) + "|", flush=True)
    exact = 0.0
    if not options.every:
        exact = perplexity(model, ids, options.window)
        print("| f32" + " |" * (3 + len(roles)) + f" {exact:.3f} | |", flush=True)
    sums = covariances(model, texts, options.window, max(options.every, 1))
    for table in (model.model.embed_tokens, model.lm_head):
        table.weight.data = in_bytes(table.weight.data)
    sources = {key: module.weight.data for key, module in projections(model)}
    for variant in options.only.split(","):
        how = VARIANTS[variant]
        squares, products = {role: [] for role in roles}, {role: [] for role in roles}
        for (layer, role), module in projections(model):
            if (layer, SHARED[role]) not in sums:
                continue
            w, covariance = sources[layer, role], sums[layer, SHARED[role]]
            module.weight.data = round_matrix(how, role, w, covariance)
            error = module.weight.data - w
            squares[role].append((error.square().sum() / w.square().sum()).item())
            products[role].append((((error @ covariance) * error).sum() / ((w @ covariance) * w).sum()).item())
        found = "| |"
        if not options.every:
            loss = perplexity(model, ids, options.window)
            found = f"| {loss:.3f} | {100 * (loss / exact - 1):.1f} % |"
        means = [mean(sum(squares.values(), [])), mean(sum(products.values(), []))]
        means += [mean(products[role]) for role in roles]
        print(f"| {variant} | " + " | ".join(f"{m:.2e}" for m in means), found, flush=True)


if __name__ == "__main__":
    main()
