"""A training or inference loop: torchrun --nproc-per-node N loop_job.py LOOP FAULT DIR SECONDS.

LOOP is one of ddp, fsdp, tensor, pipeline, experts, inference. FAULT is one of

    healthy   nothing is planted; the loop runs for SECONDS
    missing   the last rank stays in host code and makes no further call
    stop      the last rank is stopped by a signal (SIGSTOP)
    late      the last rank spends time in host code before its first call of each step: twice as long as a step takes,
              and at least 50 ms. Hosts are ahead of their GPUs, and less would hold nobody up

The moment of the fault (Unix time) is written to DIR/fault, and the moment at which a healthy job's host begins each step
to DIR/steps-RANK when the job ends (Unix time in ns, one a line). More ranks than GPUs share them by turns: then every rank
group that covers the GPUs once is a node of its own for NCCL (NCCL_HOSTID).
"""
import contextlib
import gc
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

LOOP, FAULT, PLACE, SECONDS = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = SIZE - 1
GPUS = torch.cuda.device_count()
if SIZE > GPUS:
    os.environ["NCCL_HOSTID"] = f"node{RANK // GPUS}"
DEVICE = torch.device("cuda", RANK % GPUS)
# A step on a GPU takes several times as long as its calls on the host. Otherwise the slowest host is late in every step
# of a healthy job, and Ringwatch reports it. Ranks that take turns on a GPU need less work for that.
WIDTH, TOKENS, MICROBATCH = (2048, 16384, 4096) if SIZE <= GPUS else (2048, 4096, 512)
torch.set_default_dtype(torch.bfloat16)


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self, width=WIDTH, inner=4 * WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(count):
    return nn.Sequential(*[Block() for _ in range(count)])


def batch(step):
    """A batch; steps differ in length by a quarter, as sentences do."""
    return torch.randn(TOKENS - TOKENS // 16 * (step % 5), WIDTH, device=DEVICE)


def train(model, optimizer):
    def step(n):
        loss = model(batch(n)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if n % 10 == 0:
            loss.item()

    return step


def ddp():
    model = nn.parallel.DistributedDataParallel(blocks(8).to(DEVICE), device_ids=[DEVICE.index])
    return train(model, torch.optim.AdamW(model.parameters(), fused=True))


def fsdp():
    from torch.distributed.fsdp import fully_shard

    model = blocks(8).to(DEVICE)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return train(model, torch.optim.AdamW(model.parameters(), fused=True))


def tensor():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (SIZE,))
    model = blocks(8).to(DEVICE)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # A fused optimizer takes distributed tensors or plain ones, not both. Four batches at once: with one, hosts that issue
    # work for distributed tensors are slower than GPUs, and the slowest host is late in every step.
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == is_distributed] for is_distributed in (True, False)]
    optimizers = [torch.optim.AdamW(parameters, fused=True) for parameters in kinds]

    def step(n):
        # All ranks of a tensor group compute on the same batch.
        loss = model(batch(n).repeat(4, 1)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if n % 10 == 0:
            loss.item()

    return step


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    microbatches = 2 * SIZE
    layers = blocks(max(1, 8 // SIZE)).to(DEVICE)
    stage = PipelineStage(layers, RANK, SIZE, DEVICE)
    schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=lambda y, t: (y - t).square().mean())
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def step(_):
        x = torch.randn(microbatches * MICROBATCH, WIDTH, device=DEVICE)
        if RANK == 0:
            schedule.step(x)
        elif RANK == LAST:
            schedule.step(target=torch.zeros_like(x))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def experts():
    before, after = blocks(2).to(DEVICE), blocks(2).to(DEVICE)
    parameters = [*before.parameters(), *after.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step(n):
        for _ in range(3):
            x = before(batch(0))
            sent = list(x.detach().chunk(SIZE))
            received = [torch.empty_like(part) for part in sent]
            dist.all_to_all(received, sent)
            y = after(torch.cat(received))
            back = [torch.empty_like(part) for part in sent]
            dist.all_to_all(back, list(y.detach().chunk(SIZE)))
            y.square().mean().backward()
            x.square().mean().backward()
        for p in parameters:
            if p.numel() > WIDTH * WIDTH:
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference():
    """Tensor-parallel decoding: a captured step replayed for each token, and an eager prefill for each request."""
    # Where ranks take turns on a GPU an operation takes some hundred times as long: a smaller model, and fewer tokens.
    depth, share = (16, 1) if SIZE <= GPUS else (4, 16)
    up = [torch.randn(WIDTH, 4 * WIDTH // SIZE, device=DEVICE) / WIDTH for _ in range(depth)]
    down = [torch.randn(4 * WIDTH // SIZE, WIDTH, device=DEVICE) / WIDTH for _ in range(depth)]

    def layers(x):
        for u, d in zip(up, down):
            y = torch.nn.functional.gelu(x @ u) @ d
            dist.all_reduce(y)
            x = x + y
        return x

    token = torch.randn(8, WIDTH, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers(token)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = layers(token)

    def step(n):
        layers(batch(n))
        for _ in range((32 + 8 * (n % 7)) // share):
            graph.replay()
        decoded.sum().item()

    return step


def planted():
    (PLACE / "fault.new").write_text(str(time.time()))
    (PLACE / "fault.new").rename(PLACE / "fault")


def goes_on(until):
    """Rank 0 decides for all ranks."""
    flag = torch.tensor([time.time() < until], device=DEVICE, dtype=torch.int32)
    dist.broadcast(flag, 0)
    return bool(flag.item())


def checkpoint(step):
    """Rank 0 writes some state, the others wait, as training scripts do."""
    if RANK == 0:
        torch.save({"step": step, "state": torch.ones(8 << 20)}, PLACE / "checkpoint.pt")
    dist.barrier()


def evaluate():
    """A metric over all ranks, without gradients."""
    with torch.no_grad():
        total = torch.ones(1, device=DEVICE)
        for _ in range(20):
            dist.all_reduce(total)
            total /= SIZE
    total.item()


def run(step):
    # What is usual in a job has to be learned before a fault; GPUs that ranks share take seconds for a step.
    warm_seconds = 10 if SIZE <= GPUS else 25
    warm, plan = time.time() + warm_seconds, time.time() + 3 + SECONDS
    asked_every = 20 if SIZE <= GPUS else 8
    begun = []
    for n in range(1 << 30):
        begun.append(time.time_ns())
        step(n)
        if n % asked_every == asked_every - 1:
            if not goes_on(plan if FAULT == "healthy" else warm):
                break
            if LOOP != "inference" and n % 400 == 399:
                evaluate()
            if LOOP != "inference" and n % 2000 == 1999:
                checkpoint(n)
    if FAULT == "healthy":
        (PLACE / f"steps-{RANK}").write_text("".join(f"{at}\n" for at in begun))
        return
    torch.cuda.synchronize()
    began = time.time()
    for _ in range(3):
        step(0)
        torch.cuda.synchronize()
    delay = max(0.05, 2 * (time.time() - began) / 3)
    if RANK == LAST:
        planted()
        if FAULT == "missing":
            time.sleep(SECONDS)
        elif FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    end = time.time() + SECONDS
    while time.time() < end or FAULT == "late":
        if FAULT == "late" and RANK == LAST:
            time.sleep(delay)
        step(0)


def main():
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(1)
    dist.init_process_group("nccl", device_id=DEVICE)
    if RANK == 0 and FAULT == "healthy":
        planted()
    step = {f.__name__: f for f in (ddp, fsdp, tensor, pipeline, experts, inference)}[LOOP]()
    run(step)
    torch.cuda.synchronize()
    # A communicator is not destroyed before the graphs that captured its operations.
    del step
    gc.collect()
    dist.destroy_process_group()


with contextlib.suppress(KeyboardInterrupt):
    main()
