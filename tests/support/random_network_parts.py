"""The parts of random networks (random_networks.py): templates of the source of modules and of their forwards.

In the forwards ``h`` is float64[B, T, 8] ("seq") or float64[B, 8] ("row"); each snippet leaves it valid for the next.
In the templates ``<<a||b>>`` is a choice, ``{n}`` a number that no other snippet has, ``{v}`` an earlier value of the
shape of ``h``, ``{s}`` one of shape "seq", ``{c}`` the class of a block, ``{f}`` the function that calls it. Lines with
"+" belong to ``__init__``. Lines with "~" run later, in their order, after other snippets.
"""

HEADER = """import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""

# Modules that snippets name, in the same language: name, parameters of __init__, parameters of the forward.
MODULES = """
# Attention - h
+self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
B, T, _ = h.shape
q, k, v = (t.view(B, T, 2, 4).transpose(1, 2) for t in self.qkv(h).chunk(3, dim=-1))
scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
causal = torch.tril(torch.ones(T, T, device=h.device))
scores = <<scores.masked_fill(causal == 0, float("-inf"))||scores + torch.log(causal)>>
return self.out((scores.softmax(-1) @ v).<<transpose(1, 2).reshape(B, T, 8)||permute(0, 2, 1, 3).flatten(2)>>)
# Scale - h
+self.weight = nn.Parameter(torch.ones(8))
return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.01) * self.weight
# Residual *layers h
+self.layers = nn.<<Sequential(*layers)||ModuleList(layers)>>
skip = h
for layer in self.layers:
    h = layer(h)
return h + skip
# Keeps - h
+self.weight, self.last = nn.Parameter(torch.randn(8)), None
self.last = h * self.weight
return self.last.tanh()
# Appends - h,kept
<<+self.layer = nn.Linear(8, 8)
y = self.layer(h)||+self.weight = nn.Parameter(torch.randn(8))
y = h * self.weight>>
kept.append(y)
return y.tanh()
# Fills - h,out
+self.layer = nn.Linear(8, 8)
y = self.layer(h)
<<out[..., :4] = y[..., 4:]||out.add_(y)||out += y * 0.5||out[:, 0] = y[:, -1]>>
return y.sigmoid()
"""

# What else snippets name.
DEFINITIONS = """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


@dataclass
class State:
    h: torch.Tensor
    num: int


@dataclass
class Output:
    h: torch.Tensor
    aux: torch.Tensor


def halve_output(module, args, output):
    return output * 0.5


def shift_input(module, args):
    return (args[0] + 0.1,)
"""

# "# name shape cost needs". Shape: of h ("any", "seq", "row"), or its change. Cost: calls of modules with parameters.
# Needs: "ids" (whole numbers [B, T]), "net" (the model's own forward), "rows" (a model of rows), "state" (not within a
# checkpoint), "often".
SNIPPETS = """
# linear any 1 often
+self.linear{n} = nn.Linear(8, 8)
h = <<torch.tanh(self.linear{n}(h))||self.linear{n}(h)||h + self.linear{n}(input=h)||F.silu(self.linear{n}(h)) + {v}>>
# mlp any 2 often
+self.mlp{n} = nn.Sequential(
+    nn.Linear(8, 16), <<nn.GELU()||nn.ReLU(inplace=True)||nn.Tanh()>>, nn.Dropout(<<0.0||0.0||0.2>>), nn.Linear(16, 8)
+)
h = <<||h + >>self.mlp{n}(h)
# norm any 1 often
+self.norm{n} = <<nn.LayerNorm(8)||Scale()||nn.RMSNorm(8, eps=0.01)>>
h = self.norm{n}(h)
# batch_norm row 1
+self.norm{n} = nn.BatchNorm1d(8)
h = self.norm{n}(h)
# batch_norm seq 1
+self.norm{n} = nn.BatchNorm1d(8<<||, momentum=None>>)
h = self.norm{n}(h.transpose(1, 2)).transpose(1, 2)
# conv seq 1
+self.conv{n} = nn.Conv1d(8, 8, 3, padding=1, groups=<<1||2>>)
h = F.<<relu||gelu>>(self.conv{n}(h.transpose(1, 2)))<<.transpose(1, 2)||.mT||.swapaxes(-1, -2)>>
# u_net seq 4 often
+self.down{n} = nn.ModuleList(nn.Conv1d(8, 8, 3, stride=2, padding=1) for _ in range(2))
+self.up{n} = nn.ModuleList(nn.Conv1d(16, 8, 1) for _ in range(2))
stack, h = [], h.transpose(1, 2)
for down in self.down{n}:
    stack.append(h)
    h = F.relu(down(h))
for up in self.up{n}:
    other = stack.pop()
    h = up(torch.cat([F.interpolate(h, size=other.shape[-1]), other], dim=1))
h = h.transpose(1, 2)
# gru_cell seq 6 often
+self.cell{n} = nn.GRUCell(8, 8)
hidden, steps = <<h.new_zeros(len(h), 8)||h.mean(1)>>, []
for <<_ in range(h.shape[1])||_ in h.unbind(1)>>:
    hidden = self.cell{n}(<<h[:, len(steps)]||h.select(1, len(steps))>>, hidden)
    steps.append(hidden)
h = torch.stack(steps, <<dim=1)||dim=0).transpose(0, 1)>>
# recurrent seq 1
<<+self.gru{n} = nn.GRU(8, 8, batch_first=True)
h, state{n} = self.gru{n}(h)
~h = h + state{n}[-1].unsqueeze(1)||+self.lstm{n} = nn.LSTM(8, 8, batch_first=True)
h, (state{n}, cell{n}) = self.lstm{n}(h)
~h = h + cell{n}[0][:, None]>>
# attention seq 1
+self.attention{n} = nn.MultiheadAttention(8, 2, batch_first=True)
T = h.shape[1]
mask = <<None||torch.tril(torch.ones(T, T, device=h.device)) == 0||torch.ones(T, T, dtype=torch.bool).triu(1)>>
h = h + self.attention{n}(h, h, <<h||{v}>>, attn_mask=mask, need_weights=<<False||True>>)[0]
# padding_mask seq 1 ids often
+self.attention{n} = nn.MultiheadAttention(8, 2, batch_first=True)
y, weights{n} = self.attention{n}(query=h, key=h, value=h, key_padding_mask=ids == 0)
h = <<h + y||torch.where((ids != 0).unsqueeze(-1), y, h)>>
~h = h + weights{n} @ h
# own_attention seq 3
+self.attention{n} = <<Attention()||Residual(nn.LayerNorm(8), Attention())>>
h = self.attention{n}(h)
# encoder_layer seq 5 often
+self.layer{n} = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True<<||, norm_first=True>>)
h = self.layer{n}(h)
# residual any 2
+self.residual{n} = Residual(nn.Linear(8, 8), nn.<<ReLU(inplace=True)||GELU()>>, Residual(nn.Linear(8, 8)))
h = self.residual{n}(h)
# positions seq 1
+self.positions{n} = nn.Embedding(16, 8)
h = h + self.positions{n}(torch.arange(h.<<shape[1]||size(1)>>, device=h.device))
# words seq 1 ids often
+self.words{n} = nn.Embedding(10, 8<<||, padding_idx=0>>)
h = h + self.words{n}(ids)
~h = h + F.linear(F.linear(h, self.words{n}.weight).softmax(-1), self.words{n}.weight.t())
# tied any 2
+self.first{n}, self.second{n} = nn.Linear(8, 8), nn.Linear(8, 8)
+self.second{n}.weight = self.first{n}.weight
h = self.first{n}(h)
~h = h + self.second{n}(h.tanh())
# shared any 2
+self.shared{n} = <<nn.Linear(8, 8)||Scale()||nn.Sequential(nn.Linear(8, 8), nn.ReLU())>>
h = self.shared{n}(h)<<||.tanh()>>
~h = h + self.shared{n}<<||.forward>>(h)
# functional any 1
+self.weight{n} = nn.Parameter(torch.randn(8, 8) * 0.3)
+self.bias{n} = nn.Parameter(torch.zeros(8))
h = h + <<F.linear(h, self.weight{n}, self.bias{n})||
F.layer_norm(h, (8,), self.weight{n}[0], self.bias{n})||h @ self.weight{n}>>
# weight_read any 1
+self.linear{n} = nn.Linear(8, 8)
h = self.linear{n}(h) / (1 + self.linear{n}.weight<<.norm()||.square().sum()>>)
~h = h + self.linear{n}.<<bias||weight[0]>>
# late any 0
v{n} = h
~h = h <<+ v{n}||- 0.5 * v{n}||* torch.sigmoid(v{n})>>
~<<h = torch.stack([h, v{n}]).mean(0)||h = torch.lerp(h, v{n}, 0.3)||
h = torch.cat([h[..., :4], v{n}[..., 4:]], dim=-1)>>
# skip_stack any 1
+self.merge{n} = nn.Linear(16, 8)
skips{n} = [h]
~skips{n}.append(h)
~h = h + skips{n}.pop()
~h = self.merge{n}(torch.cat([h, skips{n}.pop()], dim=-1))
# dense any 3 often
+for i in range(3):
+    setattr(self, f"dense{n}_{i}", nn.Linear(8 * (i + 1), 8))
features = [h]
for i in range(3):
    features.append(torch.tanh(getattr(self, f"dense{n}_{i}")(torch.cat(features, dim=-1))))
h = <<features[-1]||sum(features)||torch.stack(features).amax(0)>>
# branches any 2
+self.left{n}, self.right{n} = nn.Linear(8, 8), nn.Linear(8, 8)
h = <<torch.stack([f(h) for f in (self.left{n}, self.right{n})]).mean(0)||
self.left{n}(h) * torch.sigmoid(self.right{n}(h))>>
# experts any 4 often
+self.router{n}, self.experts{n} = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
gates = self.router{n}(h).softmax(-1)
<<h = h + sum(gates[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts{n}))||
index, out = gates.argmax(-1), torch.zeros_like(h)
for i, expert in enumerate(self.experts{n}):
    out[index == i] = expert(h[index == i])
h = h + out>>
# kept_by_leaf any 1 state
+self.keeps{n} = Keeps()
h = self.keeps{n}(h)
~h = h + self.keeps{n}.last
# list_argument any 2
+self.layers{n} = nn.ModuleList([Appends(), Appends()])
kept{n} = []
for layer in self.layers{n}:
    h = layer(h, kept{n})
~h = h + torch.stack(kept{n}).sum(0)
# written_argument any 2
+self.fills{n} = nn.ModuleDict({"a": Fills(), "b": Fills()})
out{n} = <<torch.zeros_like(h)||h.new_zeros(h.shape)||
torch.zeros(h.shape, dtype=h.dtype, device=h.device)>>
for name, layer in self.fills{n}.items():
    h = layer(h, out=out{n})
~h = h + out{n}
# filled_buffer seq 1
+self.linear{n} = nn.Linear(8, 8)
out = <<torch.zeros_like(h)||h.new_zeros(h.shape)>>
view = out[..., :<<3||6>>]
out[:, 0] = self.linear{n}(h[:, 0])
out[..., 4:] = h[..., 4:]
h = h + out
h = torch.cat([h[..., : view.shape[-1]] + view, h[..., view.shape[-1] :]], dim=-1)
# in_place any 1 often
+self.linear{n} = nn.Linear(8, 8)
h = <<self.linear{n}(h)||h + self.linear{n}(h)||self.linear{n}(h) * 0.5>>
<<h.relu_()||h += {v}||h.add_({v}, alpha=0.2)||h.mul_(0.5)||h[..., 0] = 0.0||h[:, 0] += 1||torch.relu_(h)||
F.relu(h, inplace=True)||h.clamp_(-2, 2)>>
# alias any 1
+self.linear{n} = nn.Linear(8, 8)
h = <<self.linear{n}(h)||self.linear{n}(h) + h>>
view{n} = h<<||[..., :4]||.flatten(0, -2)>>
h <<+= {v}||-= 0.5||*= 0.5>>
~h = h + view{n}.mean()
# late_write any 1
+self.linear{n} = nn.Linear(8, 8)
made{n} = self.linear{n}(h)<<||.transpose(0, 1).transpose(0, 1)>>
~part = made{n}<<||[..., :4]||[:, :1]>>
~part <<+= 1||.mul_(0.5)||.clamp_(min=-1)||[:] = 0.1>>
~h = h + made{n}
# views any 1
+self.half{n} = nn.Linear(4, 4)
a, b = h.<<chunk(2, dim=-1)||split(4, dim=-1)||unflatten(-1, (2, 4)).unbind(-2)>>
h = torch.cat([<<b, self.half{n}(a)||self.half{n}(a) + b, a||a, self.half{n}(b).flip(-1)>>], dim=-1)
# length_as_number seq 1
+self.linear{n} = nn.Linear(8, 8)
tokens{n} = self.linear{n}(h.reshape(1, -1, 8))
h = h + tokens{n}.view_as(h) / math.sqrt(h.size(-1))
~h = h / tokens{n}.shape[1]
# size_as_number any 0
h = h <</ h.shape[1]||/ math.sqrt(h.size(-1))||* (h.numel() / 200)||* (1 + 1 / len(h))>>
# class_token seq 1
+self.token{n}, self.linear{n} = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 8)
h = torch.cat([self.token{n}.expand(len(h), -1, -1), h], dim=1)
h = h + self.linear{n}(h.mean(1, keepdim=True))
h = h[:, 1:] + h[:, :1]
# table any 0
+self.register_buffer("table{n}", torch.linspace(0, 1, 8)<<||, persistent=False>>)
h = h + self.table{n}
# made_table seq 0
<<angles = torch.arange(h.shape[1], device=h.device)[:, None] / torch.arange(1, 9, device=h.device)||
angles = torch.outer(torch.arange(h.shape[1]), 1.0 / 10 ** torch.linspace(0, 1, 8))>>
h = h + torch.<<sin||cos>>(angles).to(h.dtype)
# counter_buffer any 0 state
+self.register_buffer("steps{n}", torch.zeros((), dtype=torch.long))
self.steps{n} += 1
h = h <</ (1 + self.steps{n})||* torch.cos(self.steps{n} * 0.1)>>
# python_counter any 0 state
+self.calls{n} = 0
self.calls{n} += 1
h = h / <<self.calls{n}||(2 if self.calls{n} % 2 else 1)>>
# temperature any 0 state
+self.temperature{n} = 1.0
if self.training:
    self.temperature{n} *= 0.9
h = h / self.temperature{n}
# ema any 0 state
+self.register_buffer("mean{n}", torch.zeros(8))
<<||h = h - self.mean{n}
>>with torch.no_grad():
    self.mean{n}.mul_(0.9).add_(h.flatten(0, -2).mean(0), alpha=0.1)
~h = h - self.mean{n}
# reassigned_buffer any 0 state
+self.register_buffer("mean{n}", torch.ones(8))
<<||h = h * self.mean{n}.sigmoid()
>>self.mean{n} = 0.9 * self.mean{n} + 0.1 * h.detach().flatten(0, -2).mean(0)
~h = h <<* self.mean{n}.tanh()||- self.mean{n}>>
# no_grad any 1
+self.linear{n} = nn.Linear(8, 8)
with torch.no_grad():
    size = self.linear{n}(h).abs().mean() + 1
h = h / size
# detach any 0
h = h <<+ h.detach().tanh()||- {v}.detach().mean(0)||/ (1 + h.detach().abs().amax())>>
# checkpoint any 1
+self.linear{n} = nn.Linear(8, 8)
y{n} = {v}
h = checkpoint(<<self.linear{n}, h||lambda t: torch.tanh(self.linear{n}(t)) + y{n}, h>>, use_reentrant=False)
# reverse any 0
h = Reverse.apply(h)
# tensor_hook any 0 state
v{n} = h = h * 1
<<||~>>if v{n}.requires_grad: v{n}.register_hook(lambda grad: grad * 0.5)
~h = h + v{n}
# module_hook any 1
+self.linear{n} = nn.Linear(8, 8)
+self.linear{n}.<<register_forward_hook(halve_output)||register_forward_pre_hook(shift_input)>>
h = self.linear{n}(h)
# parameter_hook any 1 state
+self.linear{n} = nn.Linear(8, 8)
+self.linear{n}.weight.register_hook(lambda grad: grad.clamp(-1, 1))
h = self.linear{n}(h)
# requires_grad any 0
y = h * 1
y += {v}
h = h * (1.5 if y.requires_grad and h.is_floating_point() else 1)
# dtype any 0
h = h + <<h.float().tanh().to(h.dtype)||(h > 0).to(h.dtype)||{v}.clone().type_as(h) * 0.1>>
# id_mask seq 0 ids often
h = <<h * (ids != 0).unsqueeze(-1)||h.masked_fill((ids == 0)[..., None], 0.1)||torch.where(ids[..., None] > 3, h, {v})>>
# gather any 0
h = 0.5 * h[<<torch.arange(len(h) - 1, -1, -1, device=h.device)||torch.arange(len(h)).roll(1)>>] + h
# early_return any 0 net often
if not self.training:
    return <<h||(h, {v})||{"early": h}>>
# to_row seq>row 0 net
h = h<<.mean(1)||[:, -1]||[:, 0]||.amax(dim=1)||.sum(1) / h.shape[1]>>
# to_row seq>row 0 net ids
mask = (ids != 0).to(h.dtype).unsqueeze(-1)
h = <<(h * mask).sum(1) / mask.sum(1)||h[torch.arange(len(h), device=h.device), (ids != 0).sum(1) - 1]>>
# to_seq row>seq 0 net often
h = h.unsqueeze(1) + {s}
# to_seq row>seq 0 net rows often
h = torch.stack([h, <<h + 1||h * h>>, h.tanh()], dim=1)
"""

# Around a snippet that keeps no values: the last line opens its block.
WRAPS = """
# branch_shape any 0
if <<h.shape[0] > 3||len(h) % 2||h.shape[1] != 4||h.ndim == 3 and h.size(1) > 3||h.numel() > 90>>:
# branch_dtype any 0
if <<h.dtype == torch.float64||h.is_floating_point()||not isinstance(h, tuple)>>:
# branch_training any 0
if <<self.training||not self.training>>:
# branch_counter any 0 state
+self.calls{n} = 0
self.calls{n} += 1
if self.calls{n} % <<2||3>>:
# branch_data any 0 ids
if <<int(ids.max()) > 7||(ids == 0).any()||ids.sum().item() % 2>>:
# branch_value any 0
if <<h.mean() > 0||bool((h > 1).any())>>:
# layer_drop any 0 state
if not self.training or <<torch.rand(())||random.random()>> > 0.3:
# repeat any 0
for _ in range(2):
# context any 0
with <<torch.set_grad_enabled(self.training)||torch.autograd.profiler.record_function("part")>>:
"""

# Blocks: name, parameters, last lines of the forward, call. "plain" blocks fit Sequential and checkpoint.
FORMS = {
    "plain": ("h", "return h", "h = {f}(h)"),
    "keywords": (
        "h, *, scale=1.0, skip=None",
        "return h * scale if skip is None else h * scale + skip",
        "h = {f}(h<<||, skip={v}||, scale=0.5||, skip={v}, scale=1 / len(h)>>)",
    ),
    "number": ("h", "return h, h.shape[<<0||1>>]", "h, size{n} = {f}(h)\n~h = h / size{n}"),
    "pair": ("h", "return h, h.tanh()", "h, v{n} = {f}(h)\n~h = h + v{n}"),
    "dict": (
        "h",
        'return {"h": h, "scale": h.mean()}',
        'out{n} = {f}(h)\nh = out{n}["h"]\n~h = h * out{n}["scale"].sigmoid()',
    ),
    "dataclass": (
        "state",
        "return State(h, state.num + 1)",
        "state{n} = {f}(State(h, 1))\nh = state{n}.h / state{n}.num",
    ),
    "changed_dict": (
        "state",
        'state.update(h=h, num=len(state))\nreturn state["num"]',
        'state{n} = {"h": h}\nnum = {f}(state{n})\nh = state{n}["h"] / num',
    ),
    "list": (
        "h, skips",
        "skips.append(h)\nreturn h.tanh()",
        "skips{n} = [h]\nh = {f}(h, skips{n})\n~h = h + skips{n}.pop()",
    ),
    "ids": ("h, ids", "return h", "h = {f}(h, <<ids||ids=ids>>)"),
    "number_of_ids": ("h, ids", "return h, int(ids.max())", "h, num{n} = {f}(h, ids)\n~h = h / num{n}"),
}
FIRST_LINES = {"dataclass": ["h = state.h"], "changed_dict": ['h = state["h"]']}

# How blocks are held: calls of each, the lines that hold them, and around a call.
HOLDERS = {
    "one": (1, "+self.block{n} = {c}()", "", "self.block{n}"),
    "twice": (2, "+self.block{n} = {c}()", "for _ in range(2):", "self.block{n}"),
    "module_list": (
        2,
        "+self.blocks{n} = nn.ModuleList({c}() for _ in range(2))",
        "for block in self.blocks{n}:",
        "block",
    ),
    "module_dict": (
        2,
        '+self.blocks{n} = nn.ModuleDict({"a": {c}(), "b": {c}()})',
        "for block in self.blocks{n}.values():",
        "block",
    ),
    "sequential": (
        2,
        "+self.blocks{n} = nn.Sequential({c}(), nn.<<GELU()||ReLU(inplace=False)>>, {c}())",
        "",
        "self.blocks{n}",
    ),
    "checkpointed_block": (1, "+self.block{n} = {c}()", "", "self.block{n}"),
}

INPUTS = {  # the parameters of the model's forward, the shape of h, and the first lines
    "input_tensor": ("x", "seq", "h = x"),
    "input_rows": ("x", "row", "h = x"),
    "input_ids": ("ids", "seq", "+self.words = nn.Embedding(10, 8)\nh = self.words(ids)"),
    "input_tuple": ("x, ids", "seq", "h = x"),
    "input_dict": ("ids, x=None", "seq", "h = x"),
    "input_mask": ("x, mask", "seq", "h, ids = x, mask.long() * 4"),
}
OUTPUTS = {
    "output_tensor": "h",
    "output_tuple": "(h, {v})",
    "output_dict": '{"logits": h, "aux": {v}<<||.detach()>>}',
    "output_dataclass": "Output(h, aux={v}.mean(-1))",
    "output_nested": '{"hidden": [h, ({v},)], "loss": h.abs().mean(), "size": len(h)}',
    "output_scalar": "F.smooth_l1_loss(h, torch.zeros_like(h))",
}
