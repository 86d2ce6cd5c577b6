#!/usr/bin/env python3
"""Trains the demo model on a CPU within a wall-clock budget.

  train.py tokenizer --corpus DIR --out DIR     byte-level BPE, encoded corpus
  train.py run --data DIR --out DIR --minutes M the training run; resumes if stopped
  train.py run ... --experts                    the same for the mixture of experts
  train.py run ... --from FOLDER --activation drelu --steps N
                                                goes on from a trained model with another activation
  train.py export --run DIR --out DIR           a Hugging Face folder of the last checkpoint

The learning rate, the sequence length and the activity target are functions of the
elapsed share of the budget, so a run ends its schedule on time on any machine. A budget
in steps gives the same run on a machine whose speed varies.
"""

import argparse
import json
import math
import os
import pathlib
import signal
import sys
import time

# Without the first four, glibc returns every large buffer to the system and each step
# pays for page faults again. Without the last, threads that wait for each other spin,
# which costs far more on a machine that is shared than it saves on an idle one.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_WAIT_POLICY": "passive",
}
if __name__ == "__main__" and os.environ.get("MALLOC_TOP_PAD_") is None:
    os.environ.update(ENVIRONMENT)
    os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy as np
import torch

import experts
import model as demo

SEED = 20_260_425
END_OF_TEXT = "<|endoftext|>"
SPECIAL = [END_OF_TEXT, "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>\nExplain: {{ message['content'] }}<|end|>\n"
    "{% elif message['role'] == 'assistant' %}<|assistant|>\n{{ message['content'] }}<|end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BATCH_TOKENS = 4096
# (share of the budget at which the stage starts, sequence length)
STAGES = [(0.0, 256), (0.6, 512), (0.85, 1024)]
STAGES_FROM = [(0.0, 1024)]
# A step takes longer where products are made in f32, so its long sequences are fewer.
STAGES_EXPERTS = [(0.0, 256), (0.7, 512), (0.92, 1024)]
MUON_LR, ADAM_LR = 0.012, 0.003
WEIGHT_DECAY = 0.1
# Muon's rounds; the many small matrices of experts would make them a third of a step's time.
ROUNDS, ROUNDS_EXPERTS = 5, 3
WARMUP, DECAY_FROM = 0.01, 0.3
# An expert has few neurons, so more of them are to be active.
ACTIVITY_TARGET, ACTIVITY_TARGET_EXPERTS = 0.155, 0.25


def make_tokenizer(args):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    split = END_OF_TEXT + "\n"
    train = (args.corpus / "train.txt").read_text(encoding="utf-8").split(split)
    train = [text for text in train if text]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B",
                                      special_tokens=[(END_OF_TEXT, 0)]),
    ])
    trainer = trainers.BpeTrainer(
        vocab_size=demo.V, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(train, trainer)
    assert tokenizer.get_vocab_size() == demo.V
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3]
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "additional_special_tokens": SPECIAL[1:],
        "model_max_length": demo.CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    order = np.random.default_rng(SEED).permutation(len(train))
    encode(tokenizer, [train[i] for i in order], out / "train.npy")
    held = (args.corpus / "heldout.txt").read_text(encoding="utf-8").split(split)
    encode(tokenizer, [text for text in held if text], out / "heldout.npy")


def encode(tokenizer, documents, path):
    """Every document starts with the end-of-text token, which is also the model's bos."""
    ids = []
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        ids.append(0)
        ids.extend(encoding.ids)
    np.save(path, np.array(ids, dtype=np.uint16))
    size = sum(len(text.encode()) for text in documents)
    print(f"{path.name}: {len(documents)} documents, {size} bytes, {len(ids)} tokens")


class Windows:
    """Shuffled windows over the token stream; every epoch starts at another offset."""

    def __init__(self, tokens, state):
        self.tokens = tokens
        self.state = state  # {"epoch", "at", "T"}
        self.order = None

    def batch(self, T):
        count = BATCH_TOKENS // T
        s = self.state
        if s["T"] != T:
            s.update(epoch=s["epoch"] + 1, at=0, T=T)
            self.order = None
        if self.order is not None and s["at"] + count > len(self.order):
            s.update(epoch=s["epoch"] + 1, at=0)
            self.order = None
        if self.order is None:
            rng = np.random.default_rng([SEED, s["epoch"]])
            offset = int(rng.integers(0, T))
            self.order = rng.permutation(np.arange(offset, len(self.tokens) - T - 1, T))
        picked = self.order[s["at"]:s["at"] + count]
        s["at"] += count
        rows = np.stack([self.tokens[i:i + T + 1] for i in picked]).astype(np.int64)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def orthogonal(stack, rounds):
    """Newton-Schulz iteration of Muon on a stack of wide matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.to(demo.COMPUTE)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        xxt = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(xxt, xxt, xxt, beta=b, alpha=c), x, beta=a)
    return x.float()


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, master, rounds):
        self.master = master
        self.rounds = rounds
        self.steps = 0
        self.m = {name: torch.zeros_like(value) for name, value in master.items()}
        self.v = {name: torch.zeros_like(value) for name, value in master.items() if not self.is_matrix(name)}

    @staticmethod
    def is_matrix(name):
        return name.split(".")[-1] in ("qkv", "o", "gate_up", "down")

    @staticmethod
    def parts(name, value):
        """Views that Muon treats as separate matrices."""
        kind = name.split(".")[-1]
        if kind == "qkv":
            return list(value.split([value.shape[1], demo.KV * demo.HD, demo.KV * demo.HD]))
        halves = value.chunk(2, -2) if kind == "gate_up" else [value]
        return [m for half in halves for m in (half.unbind() if half.dim() == 3 else [half])]

    def step(self, grads, scale):
        self.steps += 1
        shapes = {}
        for name, grad in grads.items():
            m, w = self.m[name], self.master[name]
            grad = grad.float()
            if self.is_matrix(name):
                m.mul_(0.95).add_(grad, alpha=0.05)
                update = grad.mul_(0.05).add_(m, alpha=0.95)
                for u, p in zip(self.parts(name, update), self.parts(name, w)):
                    shapes.setdefault(tuple(u.shape), []).append((u, p))
            else:
                v = self.v[name]
                m.mul_(0.9).add_(grad, alpha=0.1)
                v.mul_(0.98).addcmul_(grad, grad, value=0.02)
                mh = m / (1 - 0.9 ** self.steps)
                vh = v / (1 - 0.98 ** self.steps)
                lr = ADAM_LR * scale
                if name == "embed":
                    w.mul_(1 - lr * 0.01)
                w.addcdiv_(mh, vh.sqrt_().add_(1e-10), value=-lr)
        for (rows, cols), pairs in shapes.items():
            stack = torch.stack([u for u, _ in pairs])
            if rows > cols:
                stack = stack.transpose(1, 2).contiguous()
            stack = orthogonal(stack, self.rounds)
            if rows > cols:
                stack = stack.transpose(1, 2)
            lr = MUON_LR * scale
            for update, (_, p) in zip(stack, pairs):
                p.mul_(1 - lr * WEIGHT_DECAY).add_(update, alpha=-lr * max(1.0, rows / cols) ** 0.5)


def rate(share):
    """Learning-rate factor at a share of the budget: warm up, hold, fall to zero."""
    if share < WARMUP:
        return max(share / WARMUP, 0.02)
    if share < DECAY_FROM:
        return 1.0
    return max(0.0, (1 - share) / (1 - DECAY_FROM))


def activity_target(share, start, end):
    """Geometric path from the activity seen at 5 % of the run to the target at 60 %."""
    t = min(max((share - 0.05) / 0.55, 0.0), 1.0)
    return start * (end / start) ** t


def heldout_loss(net, held, batches=4):
    T = 256
    losses, activity = [], []
    with torch.no_grad():
        for i in range(batches):
            at = np.linspace(0, len(held) - T - 2, batches * 16).astype(int)[i * 16:(i + 1) * 16]
            rows = torch.from_numpy(np.stack([held[a:a + T + 1] for a in at]).astype(np.int64))
            losses.append(net.loss(rows[:, :-1], rows[:, 1:], 0.0, activity).item())
    return sum(losses) / batches, sum(activity) / len(activity)


def save(path, state):
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def run(args):
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens = np.load(args.data / "train.npy")
    held = np.load(args.data / "heldout.npy")
    checkpoint = args.out / "checkpoint.pt"
    state = {"step": 0, "elapsed": 0.0, "tokens": 0, "l1": 0.03, "l1_now": 0.03, "start_activity": None,
             "windows": {"epoch": 0, "at": 0, "T": 0}, "activation": args.activation}
    arch = experts if args.experts else demo
    if args.start and args.experts:
        raise SystemExit("--from takes the dense model; leave out --experts")
    if args.start:
        master = demo.from_hugging_face(args.start)
        # The weight at which the pull had come to rest when these weights were trained.
        state.update(l1=0.4, l1_now=0.4)
    else:
        master = arch.initial_weights(SEED)
    optimiser = Optimiser(master, ROUNDS_EXPERTS if args.experts else ROUNDS)
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, value in saved["master"].items():
            master[name].copy_(value)
        optimiser.m, optimiser.v = saved["m"], saved["v"]
        state = {**state, **saved["state"]}
        optimiser.steps = state["step"]
        if state["activation"] != args.activation:
            raise SystemExit(f"{checkpoint} was trained with {state['activation']}")
    elif args.activation == "drelu":
        at = np.linspace(0, len(tokens) - 1025, 16).astype(int)
        rows = torch.from_numpy(np.stack([tokens[a:a + 1024] for a in at]).astype(np.int64))
        demo.aligned_for_drelu(master, rows)
    net = arch.Model(master, args.activation)
    # Gate elements that a token computes.
    gates = arch.CONFIG["num_hidden_layers"] * arch.CONFIG["intermediate_size"] * (experts.TOP if args.experts else 1)
    target = ACTIVITY_TARGET_EXPERTS if args.experts else ACTIVITY_TARGET
    windows = Windows(tokens, state["windows"])
    log = open(args.out / "log.csv", "a", buffering=1)
    if state["step"] == 0:
        log.write("step,minutes,tokens,seq,rate,loss,heldout_loss,activity,l1,grad_norm\n")
    exports = sorted((float(m), p) for m, p in (e.split(":", 1) for e in args.export_at))
    exports = [(m, p) for m, p in exports if m * 60 > state["elapsed"]]
    budget = args.minutes * 60
    stages = STAGES_FROM if args.start else STAGES_EXPERTS if args.experts else STAGES
    before, began, last_save = state["elapsed"], time.monotonic(), time.monotonic()
    running = None
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    while not stop:
        state["elapsed"] = before + time.monotonic() - began
        share = state["step"] / args.steps if args.steps else state["elapsed"] / budget
        if share >= 1 or (args.max_steps and state["step"] >= args.max_steps):
            break
        T = [length for start, length in stages if share >= start][-1]
        x, y = windows.batch(T)
        pull = state["l1_now"] / (BATCH_TOKENS * gates) if share > 0.05 or args.start else 0.0
        activity = [] if state["step"] % 10 == 0 else None
        loss = net.loss(x, y, pull, activity)
        loss.backward()
        grads = {name: value.grad for name, value in net.w.items()}
        norm = math.sqrt(sum(g.float().square().sum().item() for g in grads.values()))
        if not math.isfinite(norm):
            raise SystemExit(f"gradient is not finite at step {state['step']}")
        if norm > 1.0:
            for g in grads.values():
                g.mul_(1.0 / norm)
        optimiser.step(grads, args.rate * rate(share))
        for value in net.w.values():
            value.grad = None
        net.load(master)
        state["step"] += 1
        state["tokens"] += BATCH_TOKENS
        running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()
        if activity:
            mean = sum(activity) / len(activity)
            if share > 0.05:
                if state["start_activity"] is None:
                    state["start_activity"] = mean
                wanted = activity_target(share, state["start_activity"], target)
                error = min(max((mean - wanted) / wanted, -0.5), 0.5)
                state["l1"] = min(max(state["l1"] * math.exp(0.3 * error), 1e-4), 50.0)
                state["l1_now"] = state["l1"] * math.exp(2.0 * error)
            if state["step"] % args.log_every == 1:
                held_loss = ""
                if state["step"] % args.eval_every == 1:
                    held_loss = f"{heldout_loss(net, held)[0]:.4f}"
                log.write(f"{state['step']},{state['elapsed'] / 60:.2f},{state['tokens']},{T},"
                          f"{args.rate * rate(share):.4f},{running:.4f},{held_loss},{mean:.4f},"
                          f"{state['l1_now']:.5f},{norm:.4f}\n")
        while exports and state["elapsed"] >= exports[0][0] * 60:
            arch.export(master, args.data, exports.pop(0)[1], args.activation)
        if time.monotonic() - last_save > args.save_every * 60:
            save(checkpoint, {"master": master, "m": optimiser.m, "v": optimiser.v, "state": state})
            last_save = time.monotonic()
    save(checkpoint, {"master": master, "m": optimiser.m, "v": optimiser.v, "state": state})
    if stop:
        return
    final, activity = heldout_loss(net, held, 8)
    print(json.dumps({"steps": state["step"], "tokens": state["tokens"], "heldout_loss": final,
                      "heldout_activity": activity, "minutes": state["elapsed"] / 60}))
    for _, path in exports:
        arch.export(master, args.data, path, args.activation)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("tokenizer")
    sub.add_argument("--corpus", type=pathlib.Path, required=True)
    sub.add_argument("--out", type=pathlib.Path, required=True)
    sub = commands.add_parser("run")
    sub.add_argument("--data", type=pathlib.Path, required=True)
    sub.add_argument("--out", type=pathlib.Path, required=True)
    budget = sub.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, default=0.0)
    budget.add_argument("--steps", type=int, default=0)
    sub.add_argument("--from", dest="start", type=pathlib.Path, metavar="FOLDER",
                     help="Hugging Face folder of a trained demo model to go on from")
    sub.add_argument("--activation", choices=demo.ACTIVATIONS, default="relu")
    sub.add_argument("--experts", action="store_true", help="the mixture of experts")
    sub.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    sub.add_argument("--threads", type=int, default=2)
    sub.add_argument("--max-steps", type=int, default=0)
    sub.add_argument("--log-every", type=int, default=20)
    sub.add_argument("--eval-every", type=int, default=200)
    sub.add_argument("--save-every", type=float, default=4, help="minutes between checkpoints")
    sub.add_argument("--export-at", action="append", default=[], metavar="MINUTES:DIR")
    sub = commands.add_parser("export")
    sub.add_argument("--run", type=pathlib.Path, required=True)
    sub.add_argument("--data", type=pathlib.Path, required=True)
    sub.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if args.command == "tokenizer":
        make_tokenizer(args)
    elif args.command == "run":
        run(args)
    else:
        saved = torch.load(args.run / "checkpoint.pt")
        arch = experts if "0.router" in saved["master"] else demo
        arch.export(saved["master"], args.data, args.out, saved["state"].get("activation", "relu"))


if __name__ == "__main__":
    main()
