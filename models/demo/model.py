"""The demo models' training module: Llama's mathematics, arranged for a CPU.

f32 master weights live in the optimiser; this module computes with copies (in bf16 where the
CPU has AMX), fuses what can be fused, and writes its own backward passes where autograd's cost
most (attention, the gated unit, the cross-entropy over the vocabulary). Shapes are those of the
weights; `experts.py` makes a mixture of experts of it.
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
V = 4096
KV, HD = 2, 32  # hidden_size is the query heads times HD
# The type of the products: without AMX a product in bf16 takes several times as long as in f32.
COMPUTE = torch.bfloat16 if "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text() else torch.float32
EPS = 1e-5
ATTENTION_BLOCKS = 4  # attention is computed in this many blocks of queries


class RmsNorm(torch.autograd.Function):
    """f32 stream in, normalised rows out."""

    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(EPS))
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w).to(COMPUTE)

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        dy = dy.float()
        n = x * r
        dw = (dy * n).sum(0)
        dn = dy * w
        return dn.sub_(n.mul_((dn * n).mean(-1, keepdim=True))).mul_(r), dw


class SparseGlu(torch.autograd.Function):
    """act(gate) * up, or act(gate) * relu(up), with an L1 pull on act(gate) in the backward pass.

    act(x) is x above `threshold` and 0 elsewhere. `pull` is the L1 term's gradient per
    active gate element.
    """

    @staticmethod
    def forward(ctx, gate_up, pull, threshold, relu_on_up):
        gate, up = gate_up.chunk(2, 1)
        ctx.save_for_backward(gate_up)
        ctx.pull, ctx.threshold, ctx.relu_on_up = pull, threshold, relu_on_up
        return F.threshold(gate, threshold, 0.0) * (torch.relu(up) if relu_on_up else up)

    @staticmethod
    def backward(ctx, dh):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, 1)
        out = torch.empty_like(gate_up)
        positive = F.threshold(gate, ctx.threshold, 0.0)
        if ctx.relu_on_up:
            dh = torch.ops.aten.threshold_backward(dh, up, 0)
        torch.mul(dh, positive, out=out[:, gate.shape[1]:])
        dg = (dh * up)
        if ctx.pull:
            dg.add_(ctx.pull)
        out[:, :gate.shape[1]] = torch.ops.aten.threshold_backward(dg, positive, 0)
        return out, None, None, None


class Attention(torch.autograd.Function):
    """Causal grouped-query attention; q is [B*KV, T*G, HD] with G query heads per kv head innermost.

    Query rows are ordered by position, so a block of queries needs only the keys up
    to its end: for long sequences nearly half of the work disappears.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        T = k.shape[1]
        group = q.shape[1] // T
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
        T = k.shape[1]
        group = q.shape[1] // T
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
            ds = torch._softmax_backward_data(dp, p, -1, COMPUTE)
            dv[:, :end] += torch.bmm(p.transpose(1, 2), dob)
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), q[:, rows])
            dq[:, rows] = torch.bmm(ds, k[:, :end])
        return dq, dk.to(COMPUTE), dv.to(COMPUTE), None


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
            grad = grad.mul_(1.0 / n).to(COMPUTE)
            dx[rows] = grad @ e
            de += grad.t() @ x[rows]
        ctx.save_for_backward(dx, de.to(COMPUTE))
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


def layers(weights):
    """How many layers there are."""
    return sum(name.endswith(".norm1") for name in weights)


def gaussian(seed):
    """normal(*shape, std=…), the same numbers for the same seed."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape, std: torch.randn(*shape, generator=g) * std


def initial_weights(seed):
    """f32 master weights, in this module's fused layout."""
    D, FF, L = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    normal = gaussian(seed)
    weights = {"embed": normal(V, D, std=0.02), "norm": torch.ones(D)}
    for i in range(L):
        weights.update(initial_attention(i, D, L, normal))
        weights[f"{i}.gate_up"] = normal(2 * FF, D, std=0.03)
        # Stored per neuron, as the engine's bundles are: [intermediate, hidden].
        weights[f"{i}.down"] = normal(FF, D, std=0.03 / math.sqrt(2 * L))
    return weights


def initial_attention(i, D, L, normal):
    """What layer `i` of `L` has besides its feed-forward block."""
    return {
        f"{i}.norm1": torch.ones(D),
        f"{i}.norm2": torch.ones(D),
        f"{i}.qkv": normal(D + 2 * KV * HD, D, std=0.03),
        f"{i}.o": normal(D, D, std=0.03 / math.sqrt(2 * L)),
    }


class Model:
    """Forward pass over leaf tensors that carry the gradients."""

    def __init__(self, master, activation="relu"):
        self.activation = activation
        self.threshold = FATRELU_THRESHOLD if activation == "fatrelu" else 0.0
        self.heads = len(master["norm"]) // HD
        self.w = {}
        for name, value in master.items():
            dtype = torch.float32 if "norm" in name else COMPUTE
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
            mask = mask.repeat_interleave(self.heads // KV, 0)
            # The scale 1/sqrt(head_dim) is folded into the query's tables.
            scale = torch.ones(self.heads + KV, 1)
            scale[:self.heads] = HD ** -0.5
            sign = torch.cat([-torch.ones(HD // 2), torch.ones(HD // 2)])
            self.tables[T] = tuple(t.to(COMPUTE) for t in (cos * scale, sin * scale * sign, mask))
        return self.tables[T]

    def glu(self, gate_up, pull):
        if self.activation == "silu":
            gate, up = gate_up.chunk(2, 1)
            return F.silu(gate) * up
        return SparseGlu.apply(gate_up, pull, self.threshold, self.activation == "drelu")

    def ffn(self, i, h, pull, activity, observe):
        """What the feed-forward block of layer `i` adds for the normalised rows `h`."""
        gate_up = F.linear(h, self.w[f"{i}.gate_up"])
        gate, up = gate_up.chunk(2, 1)
        if activity is not None:
            activity.append((gate.detach() > self.threshold).float().mean().item())
        if observe is not None:
            observe(i, gate, up)
        return self.glu(gate_up, pull) @ self.w[f"{i}.down"]

    def hidden(self, tokens, pull=0.0, activity=None, observe=None):
        """Final normalised states [B*T, D]; per-layer activity is appended to `activity`.

        `observe(layer, gate, up)` sees the products before the activation.
        """
        w, heads = self.w, self.heads
        B, T = tokens.shape
        cos, sin, mask = self.table(T)
        group = heads // KV
        x = F.embedding(tokens.reshape(-1), w["embed"]).float()
        for i in range(layers(w)):
            h = RmsNorm.apply(x, w[f"{i}.norm1"])
            qkv = F.linear(h, w[f"{i}.qkv"]).view(B, T, heads + 2 * KV, HD)
            qk, v = qkv[:, :, :heads + KV], qkv[:, :, heads + KV:]
            qk = qk * cos + qk.roll(HD // 2, -1) * sin
            q = qk[:, :, :heads].view(B, T, KV, group, HD).permute(0, 2, 1, 3, 4)
            q = q.reshape(B * KV, T * group, HD)
            k = qk[:, :, heads:].transpose(1, 2).reshape(B * KV, T, HD)
            v = v.transpose(1, 2).reshape(B * KV, T, HD)
            a = Attention.apply(q, k, v, mask)
            a = a.view(B, KV, T, group, HD).permute(0, 2, 1, 3, 4).reshape(B * T, heads * HD)
            x = x + F.linear(a, w[f"{i}.o"])
            h = RmsNorm.apply(x, w[f"{i}.norm2"])
            x = x + self.ffn(i, h, pull, activity, observe)
        return RmsNorm.apply(x, w["norm"])

    def loss(self, tokens, targets, pull=0.0, activity=None):
        return CrossEntropy.apply(self.hidden(tokens, pull, activity), self.w["embed"], targets.reshape(-1))


def aligned_for_drelu(master, tokens):
    """Turns the sign of Up and Down of the neurons whose products are mostly negative.

    Under ReGLU the turn changes nothing; under dReLU it decides which half of a
    neuron's contributions is lost.
    """
    balance = torch.zeros(layers(master), CONFIG["intermediate_size"])

    def observe(layer, gate, up):
        product = torch.relu(gate.float()) * up.float()
        balance[layer] += (product * product.abs()).sum(0)

    with torch.no_grad():
        Model(master).hidden(tokens, observe=observe)
    for i in range(len(balance)):
        sign = torch.where(balance[i] < 0, -1.0, 1.0)[:, None]
        master[f"{i}.gate_up"][len(sign):] *= sign
        master[f"{i}.down"] *= sign


def feed_forward(master, i):
    """The feed-forward tensors of layer `i` under Hugging Face's names."""
    gate, up = master[f"{i}.gate_up"].chunk(2)
    return {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": master[f"{i}.down"].t()}


def to_hugging_face(master, feed_forward):
    """Splits the fused master weights into Hugging Face's names and shapes.

    `feed_forward(master, layer)` gives the tensors of a layer's feed-forward block by name.
    """
    out = {
        "model.embed_tokens.weight": master["embed"],
        "model.norm.weight": master["norm"],
    }
    for i in range(layers(master)):
        p = f"model.layers.{i}."
        q, k, v = master[f"{i}.qkv"].split([len(master["norm"]), KV * HD, KV * HD])
        named = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": master[f"{i}.o"],
            "input_layernorm": master[f"{i}.norm1"],
            "post_attention_layernorm": master[f"{i}.norm2"],
            **feed_forward(master, i),
        }
        out.update({f"{p}{name}.weight": value for name, value in named.items()})
    return {name: value.float().contiguous().clone() for name, value in out.items()}


def from_hugging_face(folder):
    """The master weights of a folder that `export` or `emberflow export` wrote."""
    t = load_file(pathlib.Path(folder) / "model.safetensors")
    master = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"model.layers.{i}."
        master[f"{i}.norm1"] = t[p + "input_layernorm.weight"]
        master[f"{i}.norm2"] = t[p + "post_attention_layernorm.weight"]
        master[f"{i}.qkv"] = torch.cat([t[p + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        master[f"{i}.o"] = t[p + "self_attn.o_proj.weight"]
        master[f"{i}.gate_up"] = torch.cat([t[p + "mlp.gate_proj.weight"], t[p + "mlp.up_proj.weight"]])
        master[f"{i}.down"] = t[p + "mlp.down_proj.weight"].t()
    return {name: value.float().contiguous() for name, value in master.items()}


def export(master, tokenizer_dir, out, activation="relu"):
    """Writes an ordinary Hugging Face folder."""
    write_folder(tokenizer_dir, out, {**CONFIG, **ACTIVATIONS[activation]}, to_hugging_face(master, feed_forward))


def write_folder(tokenizer_dir, out, config, tensors):
    """Writes a Hugging Face folder; model.safetensors appears last, by rename."""
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": [0, 3], "do_sample": True,
                  "temperature": 0.7, "top_p": 0.9}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((pathlib.Path(tokenizer_dir) / name).read_bytes())
    save_file(tensors, out / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
