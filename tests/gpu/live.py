"""The live test: real NCCL under PyTorch, watched by `ringwatch run`. Needs N >= 4 GPUs and torch.

python3 live.py PATH_OF_RINGWATCH [N]; prints one line a check and exits 1 when one failed.
"""
import os
import pathlib
import re
import subprocess
import sys

import torch

ringwatch = str(pathlib.Path(sys.argv[1]).resolve())
ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 4
if torch.cuda.device_count() < ranks:
    print(f"SKIPPED live: needs {ranks} GPUs, found {torch.cuda.device_count()}")
    sys.exit(0)
here = pathlib.Path(__file__).parent
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
failed = 0


def check(name, good, detail):
    global failed
    failed += not good
    print(f"{'ok' if good else 'FAILED'} {name}: {detail}", flush=True)


def watched(mode, environment):
    """Runs a mode with and without ringwatch; returns what both left."""
    command = [*torchrun, str(here / "job.py"), mode]
    bare = subprocess.run(command, env=environment, capture_output=True, text=True)
    seen = subprocess.run([ringwatch, "run", "--", *command], env=environment, capture_output=True, text=True)
    name = f"{mode}{' two-node' if 'FAKE_NODES' in environment else ''}"
    check(f"{name} exit code", bare.returncode == seen.returncode, f"{bare.returncode} and {seen.returncode}")
    # Four ranks write to one pipe: their bytes come in any order, but they are the same bytes.
    same = sorted(bare.stdout) == sorted(seen.stdout)
    check(f"{name} output", same, f"{len(bare.stdout)} and {len(seen.stdout)} bytes")
    live = re.findall(r"^ringwatch: ((?:missing-rank|mismatch|straggler): .*)$", seen.stderr, re.M)
    lost = re.findall(r"(\d+) records lost", seen.stderr)
    check(f"{name} losses", lost == ["0"], lost)
    return name, live


for extra in ({}, {"FAKE_NODES": "2", "NCCL_SOCKET_IFNAME": "lo"}):
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", **extra}
    for mode, want in (
        ("healthy", []),
        ("late", [f"straggler: rank {ranks - 1} in AllReduce of 16777216 bytes"]),
        ("missing-rank", [f"missing-rank: rank {ranks - 1} in AllReduce of 16777216 bytes"]),
        ("mismatch", ["mismatch: rank 1 in AllReduce of 16777216 bytes"]),
    ):
        name, live = watched(mode, environment)
        good = len(live) == len(want) and all(a.startswith(b) for a, b in zip(live, want))
        check(f"{name} verdict", good, live or "no findings")
sys.exit(1 if failed else 0)
