"""The load of the live test: a large all-reduce in a loop, timed with CUDA events by the job itself.

torchrun --nproc-per-node N load_events.py SECONDS; rank 0 prints the bus bandwidth by nccl-tests' definition.
"""
import os
import sys
import time

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
x = torch.ones(256 << 20, device="cuda", dtype=torch.bfloat16)
for _ in range(5):
    dist.all_reduce(x)
torch.cuda.synchronize()
end, rates = time.time() + float(sys.argv[1]), []
while True:
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(20):
        dist.all_reduce(x)
    b.record()
    torch.cuda.synchronize()
    seconds = a.elapsed_time(b) / 1e3 / 20
    rates.append(2 * (size - 1) / size * x.numel() * x.element_size() / seconds / 1e9)
    more = torch.tensor([time.time() < end], device="cuda", dtype=torch.int32)
    dist.broadcast(more, 0)
    if not int(more):
        break
if rank == 0:
    rates.sort()
    print(f"EVENTS busbw GB/s median {rates[len(rates) // 2]:.1f} min {rates[0]:.1f} max {rates[-1]:.1f} n {len(rates)}", flush=True)
dist.destroy_process_group()
