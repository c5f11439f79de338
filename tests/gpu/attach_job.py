"""A training loop over NCCL in which one rank goes wrong after some seconds, for attach.py:

torchrun --nproc-per-node N attach_job.py FAULT DIR

FAULT is healthy, or one of missing (rank 2 stays away from the gradients' all-reduce), mismatch (rank 1 calls an all-gather instead),
stall (rank 3 stays away from its pair), idle (all ranks sleep between two steps). DIR/began appears when the loop runs. More ranks than
GPUs take turns.
"""
import datetime
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

fault, place = sys.argv[1], pathlib.Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpus = torch.cuda.device_count()
if size > gpus:
    os.environ |= {"NCCL_HOSTID": f"node{rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"}
device = torch.device("cuda", rank % gpus)
torch.cuda.set_device(device)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=600), device_id=device)
pairs = [dist.new_group([first, first + 1], group_desc="tensor") for first in range(0, size, 2)]
tensor = pairs[rank // 2]
GOES_WRONG_AT, FOREVER_SECONDS = 20, 600


def step(number):
    is_wrong = number == GOES_WRONG_AT
    if is_wrong and (fault == "idle" or (fault, rank) in {("stall", 3)}):
        time.sleep(FOREVER_SECONDS)
    dist.all_reduce(torch.ones(1024, device=device), group=tensor)
    if is_wrong and (fault, rank) == ("missing", 2):
        time.sleep(FOREVER_SECONDS)
    if is_wrong and (fault, rank) == ("mismatch", 1):
        dist.all_gather_into_tensor(torch.empty(size * 1000, device=device), torch.ones(1000, device=device))
    else:
        dist.all_reduce(torch.ones(1000, device=device))
    torch.cuda.synchronize()
    time.sleep(0.02)


number = 0
while True:
    step(number)
    number += 1
    if number == GOES_WRONG_AT - 1 and rank == 0:
        (place / "began").touch()
