"""The same round in JAX: `vmap` over lanes, `scan` over steps, compiled as a whole by `jit`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

# Otherwise it takes three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from rivals import Round, pooled, schedule
from workloads import CLASSES, HEADS, Workload

from fmol import Federation, min_norm

Params = dict[str, Any]
Forward = Callable[[Params, Any], Any]


def with_jax(workload: Workload, federation: Federation, device: torch.device) -> Round:
    """Lanes are stacked as far as memory goes: where it runs out, half as many at a time."""
    exact = not torch.backends.cuda.matmul.allow_tf32
    jax.config.update("jax_default_matmul_precision", "highest" if exact else "tensorfloat32")
    forward, loss_of = MODELS[workload.kind]
    place = jax.devices("gpu" if device.type == "cuda" else "cpu")[0]
    start = {
        name: jax.device_put(p.detach().numpy(), place)
        for name, p in federation.model.named_parameters()
    }
    names = list(start)  # In the order of `x`; inside `jit` a dict is in that of the alphabet.
    x = torch.cat([p.detach().reshape(-1) for p in federation.model.parameters()])
    cpu = torch.device("cpu")
    inputs, targets = (jax.device_put(t.numpy(), place) for t in pooled(federation, cpu))
    size, objectives = len(inputs) // workload.clients, workload.objectives
    at_once = [workload.lanes]

    def loss(params: Params, inputs: Any, targets: Any, objective: Any) -> Any:
        return loss_of(forward(params, inputs), targets, objective).mean()

    gradients = jax.vmap(jax.grad(loss))

    @jax.jit
    def descend(start: Params, inputs: Any, targets: Any, rows: Any, which: Any) -> Any:
        """Sums of Δ per objective `[S, d]`, from the batches `[K, L, B]` of lanes on `which` `[L]`."""
        stacked = jax.tree.map(lambda p: jnp.broadcast_to(p, (len(which), *p.shape)), start)

        def step(carry: tuple[Params, Params], now: Any) -> tuple[tuple[Params, Params], None]:
            params, total = carry
            found = gradients(params, inputs[now], targets[now], which)
            params = jax.tree.map(lambda p, g: p - workload.local_lr * g, params, found)
            return (params, jax.tree.map(jnp.add, total, found)), None

        zeros = jax.tree.map(jnp.zeros_like, stacked)
        (_, total), _ = lax.scan(step, (stacked, zeros), rows)
        flat = jnp.concatenate([total[name].reshape(len(which), -1) for name in names], 1)
        return jax.nn.one_hot(which, objectives, axis=0) @ flat

    def round(t: int) -> torch.Tensor:
        order = torch.stack(schedule(workload, federation, t), 1)
        order += torch.arange(workload.clients)[:, None] * size
        rows = order.repeat_interleave(objectives, 1).numpy().astype(np.int32)
        which = np.tile(np.arange(objectives, dtype=np.int32), workload.clients)
        sums, done = None, 0
        while done < workload.lanes:
            part = slice(done, done + at_once[0])
            moved = [jax.device_put(a, place) for a in (rows[:, part], which[part])]
            try:
                mine = descend(start, inputs, targets, *moved)
                mine.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or at_once[0] == 1:
                    raise
                at_once[0] = (at_once[0] + 1) // 2
                continue
            sums = mine if sums is None else sums + mine
            done += at_once[0]
        deltas = sums / workload.clients
        gram = torch.from_numpy(np.array(deltas @ deltas.T, dtype=np.float64))
        weights = jnp.asarray(min_norm(gram).weights.numpy(), jnp.float32)
        return x - torch.from_numpy(np.array(workload.algorithm().server_lr * (weights @ deltas)))

    return round


# ---- the models, with torch's names of parameters --------------------------------------------


def linear(p: Params, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def conv(p: Params, name: str, x: Any, stride: int = 1, padding: int = 0) -> Any:
    out = lax.conv_general_dilated(
        x, p[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2
    )
    bias = p.get(f"{name}.bias")
    return out if bias is None else out + bias[:, None, None]


def max_pool(x: Any, size: int, stride: int, padding: int = 0) -> Any:
    window, strides = (1, 1, size, size), (1, 1, stride, stride)
    pads = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)


def normalise(p: Params, name: str, x: Any, groups: int) -> Any:
    """Over groups of channels, `[B, C, h, w]`."""
    grouped = x.reshape(len(x), groups, -1)
    mean = grouped.mean(-1, keepdims=True)
    grouped = (grouped - mean) * lax.rsqrt(grouped.var(-1, keepdims=True) + 1e-5)
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    return grouped.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]


def layer_norm(p: Params, name: str, x: Any) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def lenet(p: Params, x: Any) -> Any:
    for name in ("trunk.0", "trunk.3"):
        x = jax.nn.relu(max_pool(conv(p, name, x), 2, 2))
    x = jax.nn.relu(linear(p, "trunk.7", x.reshape(len(x), -1)))
    return jnp.stack([linear(p, "left", x), linear(p, "right", x)], 1)


def mlp(p: Params, x: Any) -> Any:
    return linear(p, "4", jnp.tanh(linear(p, "2", jnp.tanh(linear(p, "0", x)))))


def groups_of(channels: int) -> int:
    return next(g for g in range(32, 0, -1) if channels % g == 0 and 2 * g <= channels)


def resnet(p: Params, x: Any) -> Any:
    x = x.astype(jnp.float32) / 127.5 - 1
    x = conv(p, "trunk.stem", x, 2, 3)
    x = jax.nn.relu(normalise(p, "trunk.norm", x, groups_of(x.shape[1])))
    x = max_pool(x, 3, 2, 1)
    for i in range(8):
        name, stride = f"trunk.blocks.{i}", 2 if i in (2, 4, 6) else 1
        hidden = conv(p, f"{name}.conv1", x, stride, 1)
        groups = groups_of(hidden.shape[1])
        hidden = jax.nn.relu(normalise(p, f"{name}.norm1", hidden, groups))
        hidden = normalise(p, f"{name}.norm2", conv(p, f"{name}.conv2", hidden, 1, 1), groups)
        if f"{name}.shortcut.0.weight" in p:
            x = normalise(p, f"{name}.shortcut.1", conv(p, f"{name}.shortcut.0", x, stride), groups)
        x = jax.nn.relu(hidden + x)
    heads = sorted((n for n in p if n.startswith("heads.") and n.endswith("weight")), key=_number)
    weight = jnp.concatenate([p[n] for n in heads])
    bias = jnp.concatenate([p[n.replace("weight", "bias")] for n in heads])
    return x.mean((2, 3)) @ weight.T + bias


def _number(name: str) -> int:
    return int(name.split(".")[1][1:])


def transformer(p: Params, tokens: Any) -> Any:
    x = p["tokens.weight"][tokens] + p["places"]
    b, t, d = x.shape
    for i in range(2):
        name = f"layers.{i}"
        qkv = linear(p, f"{name}.qkv", layer_norm(p, f"{name}.norm1", x))
        q, k, v = qkv.reshape(b, t, 3, HEADS, d // HEADS).transpose(2, 0, 3, 1, 4)
        weights = jax.nn.softmax(q @ k.swapaxes(-2, -1) / math.sqrt(d // HEADS), -1)
        mixed = (weights @ v).swapaxes(1, 2).reshape(b, t, d)
        x = x + linear(p, f"{name}.out", mixed)
        hidden = jax.nn.relu(linear(p, f"{name}.up", layer_norm(p, f"{name}.norm2", x)))
        x = x + linear(p, f"{name}.down", hidden)
    return linear(p, "head", x.mean(1)).reshape(b, -1, CLASSES)


def cross_entropy(outputs: Any, targets: Any, s: Any) -> Any:
    scores, label = jax.nn.log_softmax(outputs[:, s]), targets[:, s]
    return -jnp.take_along_axis(scores, label[:, None], 1)[:, 0]


def squared_error(outputs: Any, targets: Any, s: Any) -> Any:
    return (outputs[:, s] - targets[:, s]) ** 2


def binary_cross_entropy(outputs: Any, targets: Any, s: Any) -> Any:
    return jax.nn.softplus(outputs[:, s]) - outputs[:, s] * targets[:, s]


MODELS: dict[str, tuple[Forward, Callable[[Any, Any, Any], Any]]] = {
    "lenet": (lenet, cross_entropy),
    "mlp": (mlp, squared_error),
    "resnet": (resnet, binary_cross_entropy),
    "transformer": (transformer, cross_entropy),
}
