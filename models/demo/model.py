"""The demo model's training module: Llama's mathematics, arranged for a CPU with AMX.

f32 master weights live in the optimiser; this module computes with bf16 copies,
fuses what can be fused, and writes its own backward passes where autograd's cost
most (attention, the gated unit, the cross-entropy over the vocabulary).
"""

import json
import math
import os
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "relu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
# What the second and later activations change in it. dReLU (Bamboo, TurboSparse) is
# `relu(gate) * relu(up)`, FATReLU (ProSparse) is ReLU with a threshold above zero.
FATRELU_THRESHOLD = 0.05
ACTIVATIONS = {
    "relu": {},
    "drelu": {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"},
    "fatrelu": {"hidden_act": "fatrelu", "hidden_act_param": FATRELU_THRESHOLD},
    "silu": {"hidden_act": "silu"},
}
D, FF, L, V = 320, 960, 8, 4096
HEADS, KV, HD = 10, 2, 32
EPS = 1e-5
ATTENTION_BLOCKS = 4  # attention is computed in this many blocks of queries


class RmsNorm(torch.autograd.Function):
    """f32 stream in, bf16 normalised rows out."""

    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(EPS))
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w).bfloat16()

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        dy = dy.float()
        n = x * r
        dw = (dy * n).sum(0)
        dn = dy.mul_(w)
        return dn.sub_(n.mul_((dn * n).mean(-1, keepdim=True))).mul_(r), dw


class SparseGlu(torch.autograd.Function):
    """act(gate) * up, or act(gate) * relu(up), with an L1 pull on act(gate) in the backward pass.

    act(x) is x above `threshold` and 0 elsewhere. `pull` is the L1 term's gradient per
    active gate element.
    """

    @staticmethod
    def forward(ctx, gate_up, pull, threshold, relu_on_up):
        gate, up = gate_up[:, :FF], gate_up[:, FF:]
        ctx.save_for_backward(gate_up)
        ctx.pull, ctx.threshold, ctx.relu_on_up = pull, threshold, relu_on_up
        return F.threshold(gate, threshold, 0.0) * (torch.relu(up) if relu_on_up else up)

    @staticmethod
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up[:, :FF], gate_up[:, FF:]
        out = torch.empty_like(gate_up)
        positive = F.threshold(gate, ctx.threshold, 0.0)
        if ctx.relu_on_up:
            dh = torch.ops.aten.threshold_backward(dh, up, 0)
        torch.mul(dh, positive, out=out[:, FF:])
        dg = (dh * up)
        if ctx.pull:
            dg.add_(ctx.pull)
        out[:, :FF] = torch.ops.aten.threshold_backward(dg, positive, 0)
        return out, None, None, None


class Attention(torch.autograd.Function):
    """Causal grouped-query attention; q is [B*KV, T*G, HD] with G heads per kv head innermost.

    Query rows are ordered by position, so a block of queries needs only the keys up
    to its end: for long sequences nearly half of the work disappears.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        group = HEADS // KV
        T = k.shape[1]
        step = T // ATTENTION_BLOCKS
        outs, probs = [], []
        kt = k.transpose(1, 2)
        for start in range(0, T, step):
            end = start + step
            s = torch.bmm(q[:, start * group:end * group], kt[:, :, :end])
            s[:, :, start:end] += mask
            p = torch.softmax(s, -1)
            outs.append(torch.bmm(p, v[:, :end]))
            probs.append(p)
        ctx.save_for_backward(q, k, v, *probs)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    @staticmethod
    def backward(ctx, do):
        q, k, v, *probs = ctx.saved_tensors
        group = HEADS // KV
        T = k.shape[1]
        step = T // ATTENTION_BLOCKS
        dq = torch.empty_like(q)
        dk = torch.zeros(k.shape, dtype=torch.float32)
        dv = torch.zeros(v.shape, dtype=torch.float32)
        vt = v.transpose(1, 2)
        do = do.contiguous()
        for i, start in enumerate(range(0, T, step)):
            end = start + step
            rows = slice(start * group, end * group)
            p, dob = probs[i], do[:, rows]
            dp = torch.bmm(dob, vt[:, :, :end])
            ds = torch._softmax_backward_data(dp, p, -1, torch.bfloat16)
            dv[:, :end] += torch.bmm(p.transpose(1, 2), dob)
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), q[:, rows])
            dq[:, rows] = torch.bmm(ds, k[:, :end])
        return dq, dk.bfloat16(), dv.bfloat16(), None


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x @ e^T in row chunks; gradients are made on the way."""

    @staticmethod
    def forward(ctx, x, e, targets, chunk=1024):
        n = x.shape[0]
        dx = torch.empty_like(x)
        de = torch.zeros(e.shape, dtype=torch.float32)
        total = 0.0
        for start in range(0, n, chunk):
            rows = slice(start, start + chunk)
            logits = x[rows] @ e.t()
            target = targets[rows, None]
            logp = torch.log_softmax(logits, -1, dtype=torch.float32)
            total -= logp.gather(1, target).sum().item()
            grad = logp.exp_()
            grad.scatter_add_(1, target, torch.full(target.shape, -1.0))
            grad = grad.mul_(1.0 / n).bfloat16()
            dx[rows] = grad @ e
            de += grad.t() @ x[rows]
        ctx.save_for_backward(dx, de.bfloat16())
        return torch.tensor(total / n)

    @staticmethod
    def backward(ctx, scale):
        dx, de = ctx.saved_tensors
        return dx * scale, de * scale, None, None


def rope_tables(length):
    inverse = 1.0 / (10000.0 ** (torch.arange(0, HD, 2, dtype=torch.float32) / HD))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], -1)
    return angles.cos()[:, None, :], angles.sin()[:, None, :]


def initial_weights(seed):
    """f32 master weights, in this module's fused layout."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, std):
        return torch.randn(*shape, generator=g) * std

    weights = {"embed": normal(V, D, std=0.02), "norm": torch.ones(D)}
    for i in range(L):
        weights[f"{i}.norm1"] = torch.ones(D)
        weights[f"{i}.norm2"] = torch.ones(D)
        weights[f"{i}.qkv"] = normal((HEADS + 2 * KV) * HD, D, std=0.03)
        weights[f"{i}.o"] = normal(D, D, std=0.03 / math.sqrt(2 * L))
        weights[f"{i}.gate_up"] = normal(2 * FF, D, std=0.03)
        # Stored per neuron, as the engine's bundles are: [intermediate, hidden].
        weights[f"{i}.down"] = normal(FF, D, std=0.03 / math.sqrt(2 * L))
    return weights


class Model:
    """Forward pass over bf16 leaf tensors that carry the gradients."""

    def __init__(self, master, activation="relu"):
        self.activation = activation
        self.threshold = FATRELU_THRESHOLD if activation == "fatrelu" else 0.0
        self.w = {}
        for name, value in master.items():
            dtype = torch.float32 if "norm" in name else torch.bfloat16
            self.w[name] = value.detach().to(dtype, copy=True).requires_grad_()
        self.tables = {}

    def load(self, master):
        with torch.no_grad():
            for name, value in master.items():
                self.w[name].copy_(value)

    def table(self, T):
        if T not in self.tables:
            cos, sin = rope_tables(T)
            step = T // ATTENTION_BLOCKS
            mask = torch.full((step, step), float("-inf")).triu(1)
            mask = mask.repeat_interleave(HEADS // KV, 0)
            # The scale 1/sqrt(head_dim) is folded into the query's tables.
            scale = torch.ones(HEADS + KV, 1)
            scale[:HEADS] = HD ** -0.5
            sign = torch.cat([-torch.ones(HD // 2), torch.ones(HD // 2)])
            self.tables[T] = ((cos * scale).bfloat16(), (sin * scale * sign).bfloat16(), mask.bfloat16())
        return self.tables[T]

    def glu(self, gate_up, pull):
        if self.activation == "silu":
            return F.silu(gate_up[:, :FF]) * gate_up[:, FF:]
        return SparseGlu.apply(gate_up, pull, self.threshold, self.activation == "drelu")

    def hidden(self, tokens, pull=0.0, activity=None, observe=None):
        """Final normalised states [B*T, D] in bf16; per-layer activity is appended to `activity`.

        `observe(layer, gate, up)` sees the products before the activation.
        """
        w = self.w
        B, T = tokens.shape
        cos, sin, mask = self.table(T)
        group = HEADS // KV
        x = F.embedding(tokens.reshape(-1), w["embed"]).float()
        for i in range(L):
            h = RmsNorm.apply(x, w[f"{i}.norm1"])
            qkv = F.linear(h, w[f"{i}.qkv"]).view(B, T, HEADS + 2 * KV, HD)
            qk, v = qkv[:, :, :HEADS + KV], qkv[:, :, HEADS + KV:]
            qk = qk * cos + qk.roll(HD // 2, -1) * sin
            q = qk[:, :, :HEADS].view(B, T, KV, group, HD).permute(0, 2, 1, 3, 4)
            q = q.reshape(B * KV, T * group, HD)
            k = qk[:, :, HEADS:].transpose(1, 2).reshape(B * KV, T, HD)
            v = v.transpose(1, 2).reshape(B * KV, T, HD)
            a = Attention.apply(q, k, v, mask)
            a = a.view(B, KV, T, group, HD).permute(0, 2, 1, 3, 4).reshape(B * T, D)
            x = x + F.linear(a, w[f"{i}.o"])
            h = RmsNorm.apply(x, w[f"{i}.norm2"])
            gate_up = F.linear(h, w[f"{i}.gate_up"])
            if activity is not None:
                activity.append((gate_up.detach()[:, :FF] > self.threshold).float().mean().item())
            if observe is not None:
                observe(i, gate_up[:, :FF], gate_up[:, FF:])
            x = x + self.glu(gate_up, pull) @ w[f"{i}.down"]
        return RmsNorm.apply(x, w["norm"])

    def loss(self, tokens, targets, pull=0.0, activity=None):
        return CrossEntropy.apply(self.hidden(tokens, pull, activity), self.w["embed"], targets.reshape(-1))


def aligned_for_drelu(master, tokens):
    """Turns the sign of Up and Down of the neurons whose products are mostly negative.

    Under ReGLU the turn changes nothing; under dReLU it decides which half of a
    neuron's contributions is lost.
    """
    balance = torch.zeros(L, FF)

    def observe(layer, gate, up):
        product = torch.relu(gate.float()) * up.float()
        balance[layer] += (product * product.abs()).sum(0)

    with torch.no_grad():
        Model(master).hidden(tokens, observe=observe)
    for i in range(L):
        sign = torch.where(balance[i] < 0, -1.0, 1.0)[:, None]
        master[f"{i}.gate_up"][FF:] *= sign
        master[f"{i}.down"] *= sign


def to_hugging_face(master):
    """Splits the fused master weights into Hugging Face's names and shapes."""
    out = {
        "model.embed_tokens.weight": master["embed"],
        "model.norm.weight": master["norm"],
    }
    for i in range(L):
        p = f"model.layers.{i}."
        q, k, v = master[f"{i}.qkv"].split([HEADS * HD, KV * HD, KV * HD])
        gate, up = master[f"{i}.gate_up"].split([FF, FF])
        out.update({
            p + "self_attn.q_proj.weight": q,
            p + "self_attn.k_proj.weight": k,
            p + "self_attn.v_proj.weight": v,
            p + "self_attn.o_proj.weight": master[f"{i}.o"],
            p + "mlp.gate_proj.weight": gate,
            p + "mlp.up_proj.weight": up,
            p + "mlp.down_proj.weight": master[f"{i}.down"].t(),
            p + "input_layernorm.weight": master[f"{i}.norm1"],
            p + "post_attention_layernorm.weight": master[f"{i}.norm2"],
        })
    return {name: value.float().contiguous().clone() for name, value in out.items()}


def from_hugging_face(folder):
    """The master weights of a folder that `export` or `emberflow export` wrote."""
    t = load_file(pathlib.Path(folder) / "model.safetensors")
    master = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    for i in range(L):
        p = f"model.layers.{i}."
        master[f"{i}.norm1"] = t[p + "input_layernorm.weight"]
        master[f"{i}.norm2"] = t[p + "post_attention_layernorm.weight"]
        master[f"{i}.qkv"] = torch.cat([t[p + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        master[f"{i}.o"] = t[p + "self_attn.o_proj.weight"]
        master[f"{i}.gate_up"] = torch.cat([t[p + "mlp.gate_proj.weight"], t[p + "mlp.up_proj.weight"]])
        master[f"{i}.down"] = t[p + "mlp.down_proj.weight"].t()
    return {name: value.float().contiguous() for name, value in master.items()}


def export(master, tokenizer_dir, out, activation="relu"):
    """Writes an ordinary Hugging Face folder; model.safetensors appears last, by rename."""
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps({**CONFIG, **ACTIVATIONS[activation]}, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": [0, 3], "do_sample": True,
                  "temperature": 0.7, "top_p": 0.9}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((pathlib.Path(tokenizer_dir) / name).read_bytes())
    save_file(to_hugging_face(master), out / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
