"""A stand-in for CUDA graphs on the CPU, and the steps of a loss that are replayed on it."""

import copy

import torch

from rankgrad import graphs


def as_it_is(module):
    """A Module with the same tensors whose settings, functions and parts stay what they are now."""
    kept = copy.copy(module)
    kept.__dict__ = dict(vars(module))
    kept._parameters = dict(module._parameters)
    kept._buffers = {name: None if one is None else one.detach() for name, one in module._buffers.items()}
    kept._modules = {name: as_it_is(one) for name, one in module._modules.items()}
    return kept


def replay_on_the_cpu(monkeypatch):
    """A stand-in for the graph: it runs the loss as it was then, on the same tensors, into the same results."""

    def record(self):
        results = []
        then = copy.copy(self)
        then.loss = as_it_is(self.loss)

        def replay():
            found = then.run_once()
            results[:] = results or [None if one is None else torch.empty_like(one) for one in found]
            for place, one in zip(results, found, strict=True):
                if one is not None:
                    place.copy_(one)

        return replay, results

    real = graphs.Graphed.replays
    on_a_gpu = lambda: torch.is_grad_enabled() and not torch.cuda.is_available()  # noqa: E731
    monkeypatch.setattr(graphs._Recording, "record", record)
    monkeypatch.setattr(graphs.Graphed, "replays", lambda self, *inputs: real(self, *inputs) or on_a_gpu())


def batch(rows, step, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    embeddings = torch.randn(rows, 16, generator=generator).to(device, dtype).requires_grad_()
    return embeddings, torch.randint(8, (rows,), generator=generator).to(device)


def taken(loss, embeddings, labels, factor=3.0):
    """Value and gradients of a step, those of the loss's own parameters too."""
    loss.zero_grad()
    value = loss(embeddings, labels)
    (factor * value).backward()
    return [value.detach(), embeddings.grad, *(p.grad.clone() for p in loss.parameters())]


def replayed(loss):
    return any(one.replay is not None for one in loss._recordings)
