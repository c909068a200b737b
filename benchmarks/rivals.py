"""The same round by other means: a plain loop, and `torch.func.vmap` as its tutorials show it.

Each takes the number of a round and returns the next `x` `[d]`: K local steps on every objective of
every client, means per objective, min-norm step. All draw the batches that fmol draws, so that what
comes out can be compared; nothing else of fmol's engines is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Workload

from fmol import Federation, min_norm
from fmol.local import batches

Round = Callable[[int], Tensor]
SEED = 0


def schedule(workload: Workload, federation: Federation, round: int) -> list[Tensor]:
    """Each client's batches of this round, `[K, B]` indices into its own samples."""
    local = workload.algorithm().local(round, workload.batch)
    drawn = []
    for id in federation.population.ids():
        n = len(federation.client(id).data[0])
        order = batches(n, local, seed=SEED, round=round, client=id)
        drawn.append(torch.stack([torch.arange(n) if rows is None else rows for rows in order]))
    return drawn


def server_step(x: Tensor, deltas: Tensor, lr: float) -> Tensor:
    """`x − lr · Σ λ_s Δ_s` with the weights of the shortest combination of `deltas` `[S, d]`."""
    weights = min_norm((deltas @ deltas.T).double().cpu()).weights
    return x - lr * (weights.to(deltas) @ deltas)


def plain(workload: Workload, federation: Federation, device: torch.device) -> Round:
    """What one writes by hand: a deep copy and an SGD object per trajectory, gradients added up."""
    model = copy.deepcopy(federation.model).to(device)
    x = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    data = [
        tuple(part.to(device) for part in federation.client(id).data)
        for id in federation.population.ids()
    ]

    def round(t: int) -> Tensor:
        sums = [[torch.zeros_like(p) for p in model.parameters()] for _ in federation.objectives]
        for (inputs, targets), order in zip(data, schedule(workload, federation, t), strict=True):
            rows = order.to(device)
            for objective, total in zip(federation.objectives, sums, strict=True):
                local = copy.deepcopy(model)
                optimizer = torch.optim.SGD(local.parameters(), lr=workload.local_lr)
                for k in range(workload.steps):
                    optimizer.zero_grad()
                    objective.loss(local(inputs[rows[k]]), targets[rows[k]]).mean().backward()
                    for g, p in zip(total, local.parameters(), strict=True):
                        if p.grad is not None:
                            g += p.grad
                    optimizer.step()
        flat = [torch.cat([g.reshape(-1) for g in total]) for total in sums]
        return server_step(x, torch.stack(flat) / len(data), workload.algorithm().server_lr)

    return round


def with_vmap(workload: Workload, federation: Federation, device: torch.device) -> Round:
    """`vmap(grad(loss))` over stacked parameters, every lane's objective marked by a one.

    Where memory runs out, half as many lanes are stacked.
    """
    model = copy.deepcopy(federation.model).to(device)
    start = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.cat([p.reshape(-1) for p in start.values()])
    inputs, targets = pooled(federation, device)
    size, objectives = len(inputs) // workload.clients, workload.objectives
    at_once = [workload.lanes]

    def loss(params: dict[str, Tensor], inputs: Tensor, targets: Tensor, mark: Tensor) -> Tensor:
        outputs = functional_call(model, params, (inputs,))
        losses = [objective.loss(outputs, targets).mean() for objective in federation.objectives]
        return (torch.stack(losses) * mark).sum()

    gradients = vmap(grad(loss))

    def descend(rows: Tensor, marks: Tensor) -> dict[str, Tensor]:
        """Each lane's sum of gradients, from the batches `[K, L, B]` and marks `[L, S]`."""
        params = {name: p.expand(len(marks), *p.shape).clone() for name, p in start.items()}
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        for now in rows:
            found = gradients(params, inputs[now], targets[now], marks)
            for name, g in found.items():
                total[name] += g
                params[name] -= workload.local_lr * g
        return total

    def round(t: int) -> Tensor:
        order = torch.stack(schedule(workload, federation, t), 1)
        order += torch.arange(workload.clients)[:, None] * size
        rows = order.repeat_interleave(objectives, 1).to(device)
        marks = torch.eye(objectives, device=device).repeat(workload.clients, 1)
        sums = torch.zeros(objectives, x.numel(), device=device)
        done = 0
        while done < workload.lanes:
            part = slice(done, done + at_once[0])
            try:
                total = descend(rows[:, part], marks[part])
                flat = torch.cat([g.flatten(1) for g in total.values()], 1)
                sums += marks[part].T @ flat
            except torch.OutOfMemoryError:
                if at_once[0] == 1:
                    raise
                at_once[0] = (at_once[0] + 1) // 2
                total = flat = None
                torch.cuda.empty_cache()
                continue
            done += at_once[0]
        return server_step(x, sums / workload.clients, workload.algorithm().server_lr)

    return round


def pooled(federation: Federation, device: torch.device) -> tuple[Tensor, Tensor]:
    """All clients' samples one after the other, on the device."""
    data = [federation.client(id).data for id in federation.population.ids()]
    return tuple(torch.cat([d[i] for d in data]).to(device) for i in (0, 1))
