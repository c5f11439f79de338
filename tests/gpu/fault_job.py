"""A job in which one thing goes wrong after some seconds: torchrun --nproc-per-node N fault_job.py FAULT DIR.

The moment of the fault (Unix time) is written to DIR/fault. FAKE_NODES=2 makes every two ranks a node of their own.
"""
import datetime
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

fault, place = sys.argv[1], pathlib.Path(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = size - 1
slow = min(2, last)
if "FAKE_NODES" in os.environ:
    os.environ["NCCL_HOSTID"] = f"node{rank // int(os.environ['FAKE_NODES'])}"
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=torch.device("cuda", rank))
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
x = torch.ones(4 << 20, device="cuda")
small = torch.ones(1 << 16, device="cuda")
gathered = torch.empty(size << 16, device="cuda")
first, second = (dist.new_group(list(range(size))) for _ in range(2))
peer = {0: 1, 1: 0}.get(rank)


def compute(rounds):
    for _ in range(rounds):
        torch.mm(a, a)


def step(rounds=20):
    compute(rounds)
    dist.all_reduce(x)
    dist.broadcast(small, 0)
    dist.all_gather_into_tensor(gathered, small)
    dist.all_reduce(small, group=first)
    dist.all_reduce(small, group=second)
    torch.cuda.synchronize()


def exchange(send=True, receive=True):
    if peer is None:
        return
    ops = [dist.P2POp(dist.isend, x, peer)] if send else []
    ops += [dist.P2POp(dist.irecv, torch.empty_like(x), peer)] if receive else []
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def planted():
    (place / "fault.new").write_text(str(time.time()))
    (place / "fault.new").rename(place / "fault")


def hold():
    """What is wrong stays so until somebody ends the job."""
    time.sleep(60)
    os._exit(3)


graph = None
if fault == "graph":
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        x.mul_(0.5)
for _ in range(3):
    exchange()
# Until nobody is at the beginning any more, by rank 0's clock.
until = time.time() + 2
while True:
    step()
    go = torch.tensor([time.time() < until], device="cuda", dtype=torch.int32)
    dist.broadcast(go, 0)
    if graph is not None:
        graph.replay()
        torch.cuda.synchronize()
    if not int(go):
        break

if fault == "healthy":
    if rank == 0:
        planted()
    end = time.time() + float(os.environ.get("SECONDS_HEALTHY", "60"))
    while True:
        step(10 if rank % 2 else 11)
        exchange()
        go = torch.tensor([time.time() < end], device="cuda", dtype=torch.int32)
        dist.broadcast(go, 0)
        if not int(go):
            break
    dist.destroy_process_group()
    sys.exit(0)
if fault in ("stop", "kill"):
    if rank == last:
        planted()
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    while True:
        step()
if fault == "missing":
    if rank == last:
        planted()
        hold()
    step()
    hold()
if fault == "size":
    if rank == 1:
        planted()
    dist.all_reduce(small[: 1 << 15] if rank == 1 else small)
    hold()
if fault == "root":
    if rank == 1:
        planted()
    dist.broadcast(small, 1 if rank == 1 else 0)
    hold()
if fault == "swapped":
    if rank == 1:
        planted()
    for group in (second, first) if rank == 1 else (first, second):
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
    hold()
if fault == "send":
    if rank == 0:
        planted()
    exchange(send=rank == 0, receive=False)
    torch.cuda.synchronize()
    hold()
if fault == "graph":
    if rank == last:
        planted()
        hold()
    graph.replay()
    torch.cuda.synchronize()
    hold()
if fault == "compute":
    if rank == slow:
        planted()
    while True:
        # About 20 and 26 ms on an H200.
        step(130 if rank == slow else 100)
if fault == "shared-gpu":
    other = None
    if rank == 1:
        code = "import torch\na=torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16)\nwhile True:\n for _ in range(20): a@a\n torch.cuda.synchronize()"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
        for name in ("NCCL_PROFILER_PLUGIN", "LD_PRELOAD"):
            environment.pop(name, None)
        other = subprocess.Popen([sys.executable, "-c", code], env=environment)
        (place / "children").write_text(str(other.pid))
        planted()
    while True:
        step(100)
if fault == "starved":
    if rank == last:
        cpu = sorted(os.sched_getaffinity(0))[-1]
        os.sched_setaffinity(0, {cpu})
        spin = [subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        (place / "children").write_text(" ".join(str(p.pid) for p in spin))
        planted()
    while True:
        # The host has something to do in every step.
        t = time.process_time()
        while time.process_time() - t < 0.005:
            pass
        step(1)
if fault == "network":
    # throttle.c, which is loaded before NCCL, delays what is sent from then on.
    for i in range(2000):
        if i == 300 and rank == 0:
            (place / "throttle").touch()
            planted()
        dist.all_reduce(x)
        torch.cuda.synchronize()
    hold()
