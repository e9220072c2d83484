"""Two processes of torch.distributed on this machine, as torchrun starts them, and what each of them found."""

import os
import socket

import torch
import torch.distributed as dist


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _process(rank, function, folder, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test", CUDA_VISIBLE_DEVICES=""
    )
    torch.set_num_threads(1)
    torch.save(function(rank, folder), f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def two(function, folder):
    """What ``function(rank, folder)``, a function of a module, returns in each of two processes."""
    torch.multiprocessing.spawn(_process, (function, str(folder), free_port()), nprocs=2)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]
