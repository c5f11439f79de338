"""A small job for the live test: torchrun --nproc-per-node N job.py healthy|late|missing-rank|mismatch.

FAKE_NODES=2 makes every two ranks a node of their own, so that NCCL takes its network path on one machine.
"""
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

mode, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "FAKE_NODES" in os.environ:
    os.environ["NCCL_HOSTID"] = f"node{rank // int(os.environ['FAKE_NODES'])}"
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=30), device_id=torch.device("cuda", rank))
last = size - 1
x = torch.ones(1 << 20, device="cuda")
for _ in range(50):
    dist.all_reduce(x)
    dist.broadcast(x, 0)
torch.cuda.synchronize()
big = torch.ones(4 << 20, device="cuda")
if mode == "late":
    if rank == last:
        time.sleep(0.4)
    dist.all_reduce(big)
elif mode == "missing-rank":
    if rank == last:
        time.sleep(8)
        os._exit(3)
    dist.all_reduce(big)
elif mode == "mismatch":
    if rank == 1:
        dist.all_gather_into_tensor(torch.empty(size << 20, device="cuda"), x)
    else:
        dist.all_reduce(big)
    time.sleep(4)
    os._exit(3)
torch.cuda.synchronize()
print(f"rank {rank} done", flush=True)
dist.destroy_process_group()
