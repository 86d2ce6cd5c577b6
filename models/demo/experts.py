"""The second demo model: the first one's mathematics with a mixture of experts in every layer.

Mixtral's router and names: softmax over all experts, the best two, their weights made to sum to 1.
Tokens are grouped by expert, so that each expert computes one product over its own rows.
"""

import math

import torch
import torch.nn.functional as F

import model as demo

CONFIG = {
    **demo.CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_local_experts": 12,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
}
TOP = CONFIG["num_experts_per_tok"]


def initial_weights(seed):
    """f32 master weights; a layer's experts lie in one tensor, [experts, rows, hidden]."""
    D, FF, L, E = (CONFIG[key] for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts"))
    normal = demo.gaussian(seed)
    weights = {"embed": normal(demo.V, D, std=0.02), "norm": torch.ones(D)}
    for i in range(L):
        weights.update(demo.initial_attention(i, D, L, normal))
        weights[f"{i}.router"] = normal(E, D, std=0.02)
        weights[f"{i}.gate_up"] = normal(E, 2 * FF, D, std=0.03)
        weights[f"{i}.down"] = normal(E, FF, D, std=0.03 / math.sqrt(2 * L))
    return weights


class Gather(torch.autograd.Function):
    """Rows `source[i]` of x; `back` lists for each row of x its TOP places in the result."""

    @staticmethod
    def forward(ctx, x, source, back):
        ctx.save_for_backward(source, back)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, dy):
        _, back = ctx.saved_tensors
        return dy.index_select(0, back.flatten()).view(*back.shape, -1).sum(1), None, None


class Scatter(torch.autograd.Function):
    """The sum of each token's TOP rows: the transpose of `Gather`."""

    @staticmethod
    def forward(ctx, y, source, back):
        ctx.save_for_backward(source)
        return y.index_select(0, back.flatten()).view(*back.shape, -1).sum(1)

    @staticmethod
    def backward(ctx, dx):
        (source,) = ctx.saved_tensors
        return dx.index_select(0, source), None, None


class Model(demo.Model):
    """`demo.Model` with experts; `balance` gathers the load-balancing loss of the layers."""

    def __init__(self, master, activation="relu"):
        super().__init__(master, activation)
        self.balance = []

    def ffn(self, i, h, pull, activity, observe):
        w = self.w
        shares = torch.softmax(F.linear(h, w[f"{i}.router"]).float(), -1)
        best, chosen = shares.topk(TOP, -1)
        best = best / best.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=shares.shape[1])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(-1, TOP)
        source = order // TOP
        self.balance.append(len(counts) * (counts / len(flat) * shares.mean(0)).sum())
        rows = Gather.apply(h, source, back).split(counts.tolist())
        experts = zip(rows, w[f"{i}.gate_up"].unbind(), w[f"{i}.down"].unbind())
        products = [(F.linear(x, gate_up), down) for x, gate_up, down in experts]
        if activity is not None:
            positive = sum((p.detach().chunk(2, 1)[0] > 0).sum().item() for p, _ in products)
            activity.append(positive / (len(flat) * w[f"{i}.down"].shape[1]))
        if observe is not None:
            observe(i, chosen, [p.chunk(2, 1)[0] for p, _ in products])
        out = torch.cat([self.glu(p, pull) @ down for p, down in products])
        out = out * best.flatten()[order, None].to(out.dtype)
        return Scatter.apply(out, source, back)

    def loss(self, tokens, targets, pull=0.0, activity=None):
        self.balance = []
        loss = super().loss(tokens, targets, pull, activity)
        if not torch.is_grad_enabled():
            return loss
        # Its value is left out, its gradient is not.
        balance = CONFIG["router_aux_loss_coef"] * sum(self.balance)
        return loss + balance - balance.detach()


def feed_forward(master, i):
    """The router and the experts of layer `i` under Mixtral's names."""
    out = {"block_sparse_moe.gate": master[f"{i}.router"]}
    for e, (gate_up, down) in enumerate(zip(master[f"{i}.gate_up"], master[f"{i}.down"])):
        p = f"block_sparse_moe.experts.{e}."
        gate, up = gate_up.chunk(2)
        out.update({p + "w1": gate, p + "w3": up, p + "w2": down.t()})
    return out


def export(master, tokenizer_dir, out, activation="relu"):
    """Writes an ordinary Hugging Face folder."""
    assert activation == "relu"
    demo.write_folder(tokenizer_dir, out, CONFIG, demo.to_hugging_face(master, feed_forward))
