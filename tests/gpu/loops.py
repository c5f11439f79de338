"""Watches real training and inference loops (loop_job.py), healthy ones and such with a planted fault.

python3 loops.py PATH_OF_RINGWATCH [LOOP[:FAULT] ...]

Each run has an agent of its own, whose JSON events are read. A healthy run (SECONDS_HEALTHY, 300 by default) fails on any
finding of severity warning or critical. A planted fault fails unless a finding of the right kind names the last rank
within the limit and no other warning is reported before. RANKS is the number of ranks (2), PARALLEL how many healthy
loops run side by side (1), LOGS a directory in which outputs of agents and jobs are kept, and the segments of faults and
of the first false warning (as tar files), RECORDINGS one in which each run is recorded, with the moments at which its steps
began. Prints one line a run and exits 1 if one failed. Needs torch and 2 GPUs, or RANKS and fewer: ranks then take
turns on the GPUs, so that orders and hangs mean what they mean elsewhere, and times mean little. Loops that share GPUs or
CPUs with anything else hold each other up, and Ringwatch reports it: run healthy loops alone.
"""
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch

from processes import end_all

RANKS = int(os.environ.get("RANKS", "2"))
SECONDS_HEALTHY = int(os.environ.get("SECONDS_HEALTHY", "300"))
LOOPS = ["ddp", "fsdp", "tensor", "pipeline", "experts", "inference"]
# What an absent rank may be called: the others wait for it in a collective, or in a transfer of theirs.
ABSENT = ("missing-rank", "not-started", "send-without-receive", "receive-without-send")
# Fault: kinds that are right, seconds until the finding is due.
FAULTS = {
    "healthy": ((), 0),
    "missing": (ABSENT, 5),
    "stop": (ABSENT, 5),
    "late": (("straggler",), 10),
}
# Where ranks take turns on a GPU a step takes seconds. A rank that is away for longer than 3 s in each of them is absent first.
AWAY = ("straggler", "missing-rank")
START_SECONDS = 90
HERE = pathlib.Path(__file__).resolve().parent


def end(process, place):
    """Kills a job and waits until it is gone."""
    end_all(str(place / "job"), 20)
    process.kill()
    process.wait()


class Agent:
    """An agent on a directory of segments, and the events that it has printed."""

    def __init__(self, ringwatch, place):
        self.out = place / "agent.out"
        self.process = subprocess.Popen(
            [ringwatch, "agent", "--json", "--set", f'segments.directories=["{place / "segments"}"]',
             "--set", "http.listen=null", "--set", f"socket.path={place / 'agent.sock'}",
             "--set", f"findings.directory={place / 'findings'}"],
            stdout=open(self.out, "w"), stderr=open(place / "agent.err", "w"),
        )

    def events(self):
        """Changes of findings, oldest first."""
        lines = self.out.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def warnings(self):
        return [e for e in self.events() if e.get("severity") in ("warning", "critical") and e.get("change") != "closed"]

    def end(self):
        self.process.terminate()
        self.process.wait(20)


def text_of(event):
    evidence = "; ".join(e["text"] for e in event.get("evidence", [])[:4])
    return f"{event.get('change')} {event['severity']} {event['kind']} ranks {event.get('ranks')}: {evidence}"


def judged_fault(agent, fault, planted):
    """Waits for the finding of a fault; returns whether it is right, and a text."""
    kinds, limit = FAULTS[fault]
    shares_gpus = RANKS > torch.cuda.device_count()
    if fault == "late" and shares_gpus:
        kinds = AWAY
    while time.time() < planted + limit + 3:
        right = [e for e in agent.warnings() if e["kind"] in kinds]
        if right:
            break
        time.sleep(0.05)
    took = time.time() - planted
    time.sleep(1.5)
    # Ranks that take turns on a GPU are late now and then, whatever is planted.
    takes_turns = shares_gpus and "straggler" not in kinds
    seen = [e for e in agent.warnings() if not (takes_turns and e["kind"] == "straggler")]
    good = bool(right) and took <= limit and all(e["kind"] in kinds and e["ranks"] == [RANKS - 1] for e in seen)
    shown = seen or agent.events()
    return good, f"{took:.2f} s; " + (" | ".join(map(text_of, shown[:4])) or "nothing")


def keep_segments(name, place):
    """Keeps what a job's processes have recorded up to now, if a directory for it is named."""
    if "LOGS" in os.environ and (place / "segments").is_dir():
        shutil.make_archive(str(pathlib.Path(os.environ["LOGS"]) / f"{name}-{RANKS}.segments"), "gztar", place / "segments")


def clocks():
    """Returns the clock of each GPU's multiprocessors in MHz."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return [float(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def watched(agent, job, seconds, name, place):
    """Waits for a healthy job's end and keeps its segments at the first warning. Returns its exit code (None: no end), and the
    GPUs' mean clocks in MHz, read every ten seconds."""
    until, warned, seen = time.time() + seconds, False, [clocks()]
    next_clocks = time.time() + 10
    while job.poll() is None and time.time() < until:
        if time.time() >= next_clocks:
            seen.append(clocks())
            next_clocks += 10
        if not warned and agent.warnings():
            warned = True
            keep_segments(name, place)
        time.sleep(0.2)
    return job.poll(), [round(sum(of) / len(of)) for of in zip(*seen)]


def free_port():
    """A port for a job's rendezvous; other jobs of this machine may have taken any fixed one."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(ringwatch, plugin, loop, fault):
    place = pathlib.Path(tempfile.mkdtemp(prefix=f"loop-{loop}-{fault}-", dir="/dev/shm"))
    (place / "segments").mkdir()
    (place / "job").mkdir()
    agent = Agent(ringwatch, place)
    recorder = recorded = None
    if "RECORDINGS" in os.environ:
        recorded = pathlib.Path(os.environ["RECORDINGS"]) / f"{loop}-{fault}-{RANKS}"
        recorder = subprocess.Popen([ringwatch, "record", "-o", recorded, "--dir", place / "segments"])
    seconds = SECONDS_HEALTHY if fault == "healthy" else 60
    environment = {
        **os.environ, "NCCL_NVLS_ENABLE": "0", "RINGWATCH_DIR": str(place / "segments"), "NCCL_PROFILER_PLUGIN": plugin,
        "OMP_NUM_THREADS": "2", **({"NCCL_SOCKET_IFNAME": "lo"} if RANKS > torch.cuda.device_count() else {}),
    }
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(free_port()),
         str(HERE / "loop_job.py"), loop, fault, str(place / "job"), str(seconds)],
        env=environment, stdout=open(place / "job.out", "w"), stderr=subprocess.STDOUT, start_new_session=True,
    )
    try:
        moment, until = place / "job" / "fault", time.time() + START_SECONDS
        while not moment.exists() and job.poll() is None and time.time() < until:
            time.sleep(0.02)
        if not moment.exists():
            return False, "the job did not start: " + (place / "job.out").read_text()[-1500:]
        if fault != "healthy":
            return judged_fault(agent, fault, float(moment.read_text()))
        code, mhz = watched(agent, job, seconds + START_SECONDS, f"{loop}-{fault}", place)
        if code is None:
            return False, "the job did not end"
        time.sleep(1)
        seen = agent.warnings()
        opened = [e for e in agent.events() if e.get("change") == "opened"]
        text = f"{len(seen)} warnings, {len(opened)} findings, exit code {code}, GPUs at {mhz} MHz; "
        text += " | ".join(map(text_of, (seen or opened)[:4]))
        return not seen and code == 0, text
    finally:
        end(job, place)
        agent.end()
        if recorder:
            recorder.terminate()
            recorder.wait(20)
            for steps in (place / "job").glob("steps-*"):
                shutil.copy(steps, recorded / steps.name)
        if "LOGS" in os.environ:
            kept = pathlib.Path(os.environ["LOGS"]) / f"{loop}-{fault}-{RANKS}"
            for name in ("agent.out", "agent.err", "job.out"):
                shutil.copy(place / name, f"{kept}.{name}")
            if fault != "healthy":
                keep_segments(f"{loop}-{fault}", place)
        shutil.rmtree(place, ignore_errors=True)


def main():
    # Whoever ends this program ends its jobs and agents.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ringwatch = str(pathlib.Path(sys.argv[1]).resolve())
    if torch.cuda.device_count() < (1 if "RANKS" in os.environ else 2):
        print(f"SKIPPED loops: needs 2 GPUs (or RANKS and at least one), found {torch.cuda.device_count()}")
        return 0
    everything = [f"{loop}:{fault}" for loop in LOOPS for fault in FAULTS]
    named = sys.argv[2:] or everything
    chosen = [run for c in named for run in ([c] if ":" in c else [f"{c}:{f}" for f in FAULTS])]
    library = tempfile.mkdtemp(prefix="ringwatch-plugin-")
    subprocess.run([ringwatch, "plugin", library], check=True, stdout=subprocess.DEVNULL)
    plugin = f"{library}/libnccl-profiler-ringwatch.so"
    failed = 0

    def one(name):
        loop, fault = name.split(":")
        good, text = run(ringwatch, plugin, loop, fault)
        print(f"{'ok' if good else 'FAILED'} {loop} {fault} ({RANKS} ranks): {text}", flush=True)
        return good

    healthy = [c for c in chosen if ":healthy" in c]
    faulty = [c for c in chosen if ":healthy" not in c]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("PARALLEL", "1"))) as pool:
        failed += sum(not good for good in pool.map(one, healthy))
    failed += sum(not one(c) for c in faulty)
    shutil.rmtree(library)
    return 1 if failed else 0


sys.exit(main())
