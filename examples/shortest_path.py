"""Blackbox differentiation of another solver: learn the costs of a grid from its shortest path.

python examples/shortest_path.py
"""

import networkx as nx
import torch
from torch import Tensor

import rankgrad


def shortest_path(costs: Tensor) -> Tensor:
    """Cells of the cheapest path from corner to corner as 0/1: argmin of path . costs."""
    rows, columns = costs.shape
    grid = nx.grid_2d_graph(rows, columns, create_using=nx.DiGraph)
    price = costs.clamp(min=1e-6).tolist()
    path = nx.dijkstra_path(grid, (0, 0), (rows - 1, columns - 1), weight=lambda u, v, _: price[v[0]][v[1]])
    solution = torch.zeros_like(costs)
    for row, column in path:
        solution[row, column] = 1
    return solution


def learn(size: int = 8, steps: int = 100, seed: int = 0) -> tuple[int, int]:
    """Cells in which the path differs from the wanted one, before and after learning."""
    generator = torch.Generator().manual_seed(seed)
    wanted = shortest_path(torch.rand(size, size, generator=generator))
    costs = torch.rand(size, size, generator=generator).requires_grad_()
    solve = rankgrad.blackbox(shortest_path, lam=2.0)
    optimizer = torch.optim.SGD([costs], lr=0.1)
    first = int((shortest_path(costs.detach()) != wanted).sum())
    for _ in range(steps):
        optimizer.zero_grad()
        (solve(costs) - wanted).abs().sum().backward()
        optimizer.step()
    return first, int((shortest_path(costs.detach()) != wanted).sum())


if __name__ == "__main__":
    before, after = learn()
    print(f"cells off the wanted path: {before} before, {after} after")
