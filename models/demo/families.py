#!/usr/bin/env python3
"""Trains small models of sparse families other than the bundled one's, by the recipe of train.py.

  families.py opt|nemotron|gemma3n --data DIR --out DIR --minutes M

The modules are transformers' own; the data, the tokenizer, the optimiser, the schedule and the
controller of the activity are those of `train.py`, whose `tokenizer` command makes DIR. Minutes are
of processor time on one thread. Writes a Hugging Face folder.
"""

import argparse
import json
import math
import pathlib
import shutil
import time

import numpy as np
import torch
from transformers import (Gemma3nForCausalLM, Gemma3nTextConfig, NemotronConfig, NemotronForCausalLM,
                          OPTConfig, OPTForCausalLM)

import train

SIZES = dict(vocab_size=train.demo.V, hidden_size=256, num_hidden_layers=5, num_attention_heads=8,
             max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=None,
             tie_word_embeddings=True, attn_implementation="sdpa")
ROPE = dict(rope_type="default", rope_theta=10000.0)
FAMILIES = {
    # ReLU, no gate, biases, learned positions
    "opt": (OPTForCausalLM, lambda: OPTConfig(
        ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0, **SIZES)),
    # ReLU², no gate, half of each head rotated
    "nemotron": (NemotronForCausalLM, lambda: NemotronConfig(
        intermediate_size=1024, num_key_value_heads=2, head_dim=32, hidden_act="relu2",
        rope_parameters=ROPE | dict(partial_rotary_factor=0.5), **SIZES)),
    # 95 % of the gates of the first three layers are zero by design
    "gemma3n": (Gemma3nForCausalLM, lambda: Gemma3nTextConfig(
        intermediate_size=1024, num_key_value_heads=2, head_dim=32, sliding_window=256,
        layer_types=["sliding_attention"] * 4 + ["full_attention"], num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.95] * 3 + [0.0] * 2, laurel_rank=16, altup_num_inputs=2,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=train.demo.V,
        rope_parameters=dict(full_attention=ROPE, sliding_attention=ROPE), **SIZES)),
}
STAGES = [(0.0, 256), (0.7, 512)]
EVALUATED = 16  # held-out windows of 256 tokens


def is_matrix(name, parameter):
    """Whether Muon takes it: the matrices of attention and FFN."""
    return ".layers." in name and parameter.dim() == 2 and min(parameter.shape) >= 32


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for the others, as in train.py."""

    def __init__(self, model):
        named = dict(model.named_parameters())
        self.matrices = [p for name, p in named.items() if is_matrix(name, p)]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        others = [p for name, p in named.items() if not is_matrix(name, p)]
        self.adam = torch.optim.AdamW(others, lr=train.ADAM_LR, betas=(0.9, 0.98), eps=1e-10,
                                      weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale):
        for group in self.adam.param_groups:
            group["lr"] = train.ADAM_LR * scale
        self.adam.step()
        lr = train.MUON_LR * scale
        for p, m in zip(self.matrices, self.momenta):
            m.mul_(0.95).add_(p.grad, alpha=0.05)
            update = p.grad.mul(0.05).add_(m, alpha=0.95)
            rows, cols = update.shape
            wide = update if rows <= cols else update.t().contiguous()
            wide = train.orthogonal(wide[None], train.ROUNDS)[0]
            update = wide if rows <= cols else wide.t()
            p.mul_(1 - lr * train.WEIGHT_DECAY).add_(update, alpha=-lr * max(1.0, rows / cols) ** 0.5)


class Gates:
    """What the activations of a pass read, and how many of them are above zero."""

    def __init__(self, model, family):
        self.family, self.seen = family, []
        for name, module in model.named_modules():
            if family == "gemma3n" and name.endswith("mlp"):
                module.act_fn.register_forward_hook(lambda m, x, y: self.seen.append(x[0]))
                assert module.act_fn is not None
            elif name.endswith("fc1" if family == "opt" else "mlp.up_proj"):
                module.register_forward_hook(lambda m, x, y: self.seen.append(y))

    def take(self):
        seen, self.seen = self.seen, []
        return seen

    @staticmethod
    def activity(seen):
        return sum((gate > 0).float().mean().item() for gate in seen) / len(seen)


def loss_of(model, x, y):
    logits = model(input_ids=x, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def heldout(model, gates, held):
    at = np.linspace(0, len(held) - 258, EVALUATED).astype(int)
    rows = torch.from_numpy(np.stack([held[a:a + 257] for a in at]).astype(np.int64))
    loss = loss_of(model, rows[:, :-1], rows[:, 1:]).item()
    return loss, gates.activity(gates.take())


def fit(args, model, gates):
    """The training run, as in train.py: all by the share of the budget that is used up."""
    tokens, held = np.load(args.data / "train.npy"), np.load(args.data / "heldout.npy")
    optimiser = Optimiser(model)
    windows = train.Windows(tokens, {"epoch": 0, "at": 0, "T": 0})
    l1, l1_now, start, step, began = 0.03, 0.03, None, 0, time.process_time()
    while (share := (time.process_time() - began) / (60 * args.minutes)) < 1:
        length = [length for first, length in STAGES if share >= first][-1]
        x, y = windows.batch(length)
        loss = loss_of(model, x, y)
        seen = gates.take()
        total = loss
        if args.family != "gemma3n" and share > 0.05:
            elements = sum(gate.numel() for gate in seen)
            total = loss + l1_now / elements * sum(torch.relu(gate).sum() for gate in seen)
            mean = gates.activity(seen)
            start = mean if start is None else start
            wanted = train.activity_target(share, start, train.ACTIVITY_TARGET)
            error = min(max((mean - wanted) / wanted, -0.5), 0.5)
            l1 = min(max(l1 * math.exp(0.03 * error), 1e-4), 50.0)
            l1_now = l1 * math.exp(2.0 * error)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step(train.rate(share))
        model.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 1:
            print(f"{step} steps, {share:.3f}: {loss.item():.3f}, {gates.activity(seen):.3f} active",
                  flush=True)
    loss, activity = heldout(model, gates, held)
    return {"family": args.family, "steps": step, "tokens": step * train.BATCH_TOKENS,
            "heldout_loss": loss, "heldout_activity": activity}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(train.SEED)
    kind, config = FAMILIES[args.family]
    model = kind(config())
    result = fit(args, model, Gates(model, args.family))
    model.save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.data / name, args.out / name)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
