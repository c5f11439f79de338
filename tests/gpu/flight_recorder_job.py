"""A job over NCCL in which one rank goes wrong, watched by PyTorch's Flight Recorder alone:

torchrun --nproc-per-node N flight_recorder_job.py FAULT DIR

FAULT is healthy, or one of missing (rank 2 stays away from the gradients' all-reduce), mismatch (rank 1 calls an all-gather
instead), stall (rank 3 stays away from its pair). PyTorch's watchdog dumps pickles to DIR/trace_rank_N when it reports a
timeout; a thread dumps JSON to DIR/json_rank_N some seconds before. More ranks than GPUs take turns.
"""
import datetime
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

fault, place = sys.argv[1:3]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpus = torch.cuda.device_count()
if size > gpus:
    os.environ |= {"NCCL_HOSTID": f"node{rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"}
device = torch.device("cuda", rank % gpus)
torch.cuda.set_device(device)
DUMP_SECONDS, TIMEOUT_SECONDS = 6, 10
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS), device_id=device)
pairs = [dist.new_group([first, first + 1], group_desc="tensor") for first in range(0, size, 2)]
tensor = pairs[rank // 2]
options = {"device": device}


def reduce_gradients():
    dist.all_reduce(torch.ones(1000, **options))


def forward():
    dist.all_reduce(torch.ones(64, 16, **options), group=tensor)
    dist.all_gather_into_tensor(torch.empty(size * 8, **options), torch.ones(8, **options))


def evaluate():
    dist.all_gather_into_tensor(torch.empty(size * 10, **options), torch.ones(10, **options))


def exchange():
    """Sends to the next rank, receives from the one before."""
    x, y = torch.ones(256, **options), torch.empty(256, **options)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def step():
    forward()
    exchange()
    reduce_gradients()
    dist.broadcast(torch.ones(500, **options), 0)
    torch.cuda.synchronize()


def dump():
    time.sleep(DUMP_SECONDS)
    from torch._C._distributed_c10d import _dump_nccl_trace_json

    with open(f"{place}/json_rank_{rank}", "wb") as f:
        f.write(_dump_nccl_trace_json(True, False))


for _ in range(4):
    step()
threading.Thread(target=dump, daemon=True).start()
if fault == "healthy":
    time.sleep(DUMP_SECONDS + 2)
    dist.destroy_process_group()
    sys.exit(0)
if fault == "stall" and rank == 3:
    time.sleep(60)
forward()
exchange()
if fault == "missing" and rank == 2:
    time.sleep(60)
if fault == "mismatch" and rank == 1:
    evaluate()
else:
    reduce_gradients()
torch.cuda.synchronize()
time.sleep(60)
