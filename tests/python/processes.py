"""Work in processes of their own that torch.distributed joins by gloo; none of them can hang a test."""

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Imported once in a server of which every process is a fork: importing them takes longer than the tests.
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "transformers.generation", "transformers.models.llama.modeling_llama", "kvferry"]
)


def run(work: Callable, folder: Path, *arguments, count: int = 2, seconds: float = 120) -> list:
    """What work(rank, *arguments) returns in each of `count` new processes. They meet in a file: no port to be free."""
    context = torch.multiprocessing.start_processes(
        _enter, (work, folder, arguments, count), count, join=False, daemon=True, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):  # raises what a process raised
            assert time.monotonic() < deadline, f"{work.__name__} is not done after {seconds} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join(10)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _enter(rank: int, work: Callable, folder: Path, arguments: tuple, count: int) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(work(rank, *arguments), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
