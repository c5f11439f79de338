"""How much the GPUs of a machine differ in the same work, done by all of them at once.

python3 -m torch.distributed.run --nproc-per-node GPUS spread.py

Each GPU passes one batch through eight feed-forward blocks, 150 times a line. A line has the milliseconds of one pass on each
GPU, by index. In a training loop that computes most of the time all GPUs wait for the slowest, so a difference of more than
`detect.warning_cost_percent` is a `straggler` of that rank.
"""
import os

import torch
import torch.distributed as dist

PASSES, LINES = 150, 3

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("gloo")
torch.set_default_dtype(torch.bfloat16)
batch = torch.randn(16384, 2048, device="cuda")
up, down = torch.randn(2048, 8192, device="cuda"), torch.randn(8192, 2048, device="cuda")


def work():
    x = batch
    for _ in range(8):
        x = torch.nn.functional.gelu(x @ up) @ down * 0.01


for _ in range(20):
    work()
torch.cuda.synchronize()
dist.barrier()
for _ in range(LINES):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(PASSES):
        work()
    end.record()
    torch.cuda.synchronize()
    own = torch.tensor([begin.elapsed_time(end) / PASSES], dtype=torch.float32)
    everybody = [torch.zeros(1, dtype=torch.float32) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    if rank == 0:
        print("ms a pass:", [round(t.item(), 3) for t in everybody], flush=True)
dist.destroy_process_group()
