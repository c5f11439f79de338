"""A real job over two "nodes", an agent for each, a NATS server and an analyser: what `diagnose --cluster` says, and how soon.

python3 cluster.py PATH_OF_RINGWATCH PATH_OF_NATS_SERVER [FAULT ...]; needs 2 GPUs (RANKS=4: 4, two ranks a node) and torch. NCCL takes
its network path, since the ranks' hosts have different names (fault_job.py, FAKE_NODES). Prints one line a fault and exits 1
when one was not named rightly in time.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import torch

RANKS = int(os.environ.get("RANKS", "2"))
LAST = RANKS - 1
# Fault: kinds that are right, the ranks (with two ranks a mismatch does not tell who is wrong), seconds it may take.
FAULTS = {
    "missing": (("missing-rank",), [LAST], 8),
    "size": (("mismatch",), [0, 1] if RANKS == 2 else [1], 8),
    "compute": (("straggler",), [2 if RANKS > 2 else 1], 15),
    "kill": (("missing-rank", "aborted-rank"), [LAST], 8),
    # Nothing is to be told of the job itself for so many seconds.
    "healthy": ((), None, int(os.environ.get("SECONDS_HEALTHY", "30"))),
}
ringwatch, nats = (str(pathlib.Path(a).resolve()) for a in sys.argv[1:3])
chosen = sys.argv[3:] or list(FAULTS)
if torch.cuda.device_count() < RANKS:
    print(f"SKIPPED cluster: needs {RANKS} GPUs, found {torch.cuda.device_count()}")
    sys.exit(0)
here = pathlib.Path(__file__).resolve().parent
place = pathlib.Path(tempfile.mkdtemp(prefix="rw-cluster-", dir="/dev/shm"))
url = "nats://127.0.0.1:14222"
running = []


def start(name, *command, **environment):
    log = open(place / f"{name}.log", "w")
    p = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True)
    running.append(p)
    return p


def end(p):
    try:
        os.killpg(p.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    p.wait()


def end_job(jobs, there):
    """torchrun gives each rank a session of its own, but all have the place in their command."""
    [end(j) for j in jobs]
    for p in pathlib.Path("/proc").iterdir():
        try:
            if p.name.isdigit() and int(p.name) != os.getpid() and str(there).encode() in (p / "cmdline").read_bytes():
                os.kill(int(p.name), signal.SIGKILL)
        except OSError:
            pass
    # The driver takes a while to clear up after killed processes, and verdicts end with their job.
    until = time.time() + 20
    while time.time() < until and ask("diagnose", "--json")[0].strip():
        time.sleep(0.5)
    time.sleep(3)


def ask(*what):
    done = subprocess.run([ringwatch, *what, "--cluster", url], capture_output=True, text=True)
    return done.stdout, done.stderr


try:
    subprocess.run([ringwatch, "plugin", str(place / "plugin")], check=True, stdout=subprocess.DEVNULL)
    start("up", ringwatch, "cluster", "up", "--port", "14222", "--http", "19479", "--dir", str(place / "nats"), "--server", nats, "--json")
    time.sleep(3)
    for node in "ab":
        (place / node).mkdir()
        start(f"agent-{node}", ringwatch, "agent", "--json", "--set", f'segments.directories=["{place / node}"]', "--set",
              "socket.path=null", "--set", "http.listen=null", "--set", f"cluster.node=node-{node}", "--set", f'cluster.servers=["{url}"]')
    time.sleep(2)
    print(ask("cluster", "status")[0].splitlines()[0], flush=True)
    wrong = 0
    for fault in chosen:
        kinds, ranks, limit = FAULTS[fault]
        there = place / fault
        there.mkdir()
        jobs = []
        for i, node in enumerate("ab"):
            jobs.append(start(
                f"job-{fault}-{node}", sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(i),
                "--nproc-per-node", str(RANKS // 2), "--master-addr", "127.0.0.1", "--master-port", "29511",
                str(here / "fault_job.py"), fault, str(there),
                RINGWATCH_DIR=str(place / node), NCCL_PROFILER_PLUGIN=str(place / "plugin" / "libnccl-profiler-ringwatch.so"),
                FAKE_NODES=str(RANKS // 2), NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0"))
        until = time.time() + 90
        while not (there / "fault").exists() and time.time() < until:
            time.sleep(0.05)
        if not (there / "fault").exists():
            print(f"{fault:8} the job did not come to its fault: {(place / f'job-{fault}-a.log').read_text()[-1500:]}", flush=True)
            wrong += 1
            end_job(jobs, there)
            continue
        at = float((there / "fault").read_text())
        before = (place / "up.log").read_text().count("\n")

        def printed():
            return [json.loads(l) for l in (place / "up.log").read_text().splitlines()[before:] if l.startswith("{")]

        if not kinds:
            time.sleep(limit)
            told = printed()
            wrong += bool(told)
            print(f"{fault:8} {'WRONG' if told else 'ok':6} {limit} s: {[(f['kind'], f['ranks'], [e['text'] for e in f['evidence']]) for f in told]}", flush=True)
            end_job(jobs, there)
            continue
        found, other = None, []
        while found is None and time.time() < at + limit + 10:
            # A launcher ends a job whose rank was killed: then it was told, and is over.
            other = [json.loads(l) for l in ask("diagnose", "--json")[0].splitlines()] + (printed() if fault == "kill" else [])
            found = next((f for f in other if f["kind"] in kinds), None)
        took = time.time() - at
        right = found is not None and found["ranks"] == ranks and took <= limit
        wrong += not right
        said = f"{found['kind']} {found['ranks']}" if found else f"nothing of {kinds}: {[(f['kind'], f['ranks']) for f in other]}"
        print(f"{fault:8} {'ok' if right else 'WRONG':6} {took:5.2f} s after the fault: {said}", flush=True)
        if found:
            print("         " + "; ".join(e["text"] for e in found["evidence"][:3]), flush=True)
        end_job(jobs, there)
    print(ask("cluster", "status")[0], flush=True)
    told = [json.loads(l) for l in (place / "up.log").read_text().splitlines() if l.startswith("{")]
    print("told by the analyser:", [(f["kind"], f["ranks"], f["since"]) for f in told], flush=True)
    for f in told:
        if f["kind"] not in ("missing-rank", "mismatch"):
            print(f["kind"], f["since"], f["operation"], "; ".join(e["text"] for e in f["evidence"]), flush=True)
    sys.exit(1 if wrong else 0)
finally:
    for p in running:
        end(p)
    shutil.rmtree(place, ignore_errors=True)
