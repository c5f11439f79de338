"""Plants faults in a job over NCCL (flight_recorder_job.py), and reads PyTorch's dumps of it with `ringwatch diagnose --import`.

python3 flight_recorder.py PATH_OF_RINGWATCH DIR [FAULT ...]; needs a GPU and torch. Four ranks run on what GPUs there are.
The dumps stay in DIR/FAULT. Prints one line for the watchdog's pickles of a fault and one for its JSON, and exits 1 when
one of them was judged wrongly.
"""
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import torch

from processes import end_all

RANKS = 4
# Fault: kinds that are right, the rank.
FAULTS = {"missing": ("missing-rank", 2), "mismatch": ("mismatch", 1), "stall": ("missing-rank", 3), "healthy": (None, None)}
RUN_SECONDS = 60
HERE = pathlib.Path(__file__).resolve().parent


def dump(fault, place):
    """Runs a job until its ranks have dumped, and kills it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{place}/trace_rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{place}/trace_rank_",
    }
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port),
         str(HERE / "flight_recorder_job.py"), fault, str(place)],
        env=environment, stdout=open(place / "job.out", "w"), stderr=subprocess.STDOUT, start_new_session=True,
    )
    until = time.time() + RUN_SECONDS
    wanted = RANKS * (1 if fault == "healthy" else 2)
    while time.time() < until and job.poll() is None and len(list(place.glob("*_rank_*"))) < wanted:
        time.sleep(0.1)
    time.sleep(1)
    end_all(str(place))
    job.wait()


def judged(form, place):
    """The findings that an import of all dumps of a form makes, from warning on."""
    dumps = sorted(place.glob(f"{form}_rank_*"))
    if len(dumps) < RANKS:
        return None, f"only {len(dumps)} dumps"
    said = subprocess.run([ringwatch, "diagnose", "--json", "--import", *dumps], capture_output=True, text=True)
    if said.returncode > 1:
        return None, said.stderr.strip()
    found = [f for f in map(json.loads, said.stdout.splitlines()) if f["severity"] in ("warning", "critical")]
    return [(f["kind"], f["ranks"]) for f in found], said.stderr.strip()


ringwatch, kept = str(pathlib.Path(sys.argv[1]).resolve()), pathlib.Path(sys.argv[2]).resolve()
if not torch.cuda.device_count():
    print("SKIPPED flight_recorder: needs a GPU, found none")
    sys.exit(0)
failed = 0
for fault in sys.argv[3:] or FAULTS:
    place = kept / fault
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    dump(fault, place)
    kind, rank = FAULTS[fault]
    for form in ("json",) if kind is None else ("trace", "json"):
        found, notes = judged(form, place)
        good = found == ([] if kind is None else [(kind, [rank])])
        failed += not good
        print(f"{'ok' if good else 'FAILED'} {fault} {form}: {found}; {notes}", flush=True)
sys.exit(1 if failed else 0)
