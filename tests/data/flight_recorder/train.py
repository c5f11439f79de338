import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

fault, out = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
left = dist.new_group([0, 1], group_desc="tensor")
right = dist.new_group([2, 3], group_desc="tensor")
tensor = left if rank < 2 else right


def reduce_gradients():
    dist.all_reduce(torch.ones(1000))


def forward():
    dist.all_reduce(torch.ones(64, 16), group=tensor)
    parts = torch.empty(world * 8)
    dist.all_gather_into_tensor(parts, torch.ones(8))


def evaluate():
    dist.all_gather_into_tensor(torch.empty(world * 10), torch.ones(10))


def step():
    forward()
    reduce_gradients()
    dist.broadcast(torch.ones(500), 0)


def dump():
    time.sleep(6)
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/trace_rank_{rank}", "wb") as f:
        f.write(_dump_fr_trace())
    os._exit(0)


threading.Thread(target=dump, daemon=True).start()
for _ in range(4):
    step()
try:
    if fault == "stall" and rank == 3:
        time.sleep(60)
    forward()
    if fault == "missing" and rank == 2:
        time.sleep(60)
    if fault == "mismatch" and rank == 1:
        evaluate()
    elif fault == "circle" and rank < 2:
        if rank == 0:
            dist.all_reduce(torch.ones(1000)); dist.all_reduce(torch.ones(8), group=tensor)
        else:
            dist.all_reduce(torch.ones(8), group=tensor); dist.all_reduce(torch.ones(1000))
    else:
        reduce_gradients()
    time.sleep(60)
except RuntimeError:
    time.sleep(60)
