"""Plants faults in a job over NCCL (attach_job.py) that runs without Ringwatch, and asks `ringwatch attach`.

python3 attach.py PATH_OF_RINGWATCH DIR [FAULT ...]; needs a GPU and torch. Four ranks run on what GPUs there are. RAS's answers stay in
DIR/FAULT.json. Prints one line for each fault, and exits 1 when one was judged wrongly.
"""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from processes import end_all, processes_with

RANKS = 4
# Fault: the kind, and the rank in the job; None where RAS cannot tell.
FAULTS = {
    "missing": ("missing-rank", 2), "mismatch": ("mismatch", 1), "stall": ("missing-rank", 3), "stop": ("missing-rank", 2),
    "idle": (None, None), "healthy": (None, None),
}
PATIENCE_SECONDS = 90
HERE = pathlib.Path(__file__).resolve().parent


def rank_of(pid):
    """The rank in the job of a process, by its environment."""
    variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)


def ask(commands):
    """RAS's answer."""
    with socket.create_connection(("localhost", 28028), timeout=30) as s:
        f = s.makefile("rw")
        for command in commands:
            f.write(command + "\n")
            f.flush()
            if command != commands[-1]:
                f.readline()
        return f.read()


def attached(ringwatch):
    """The exit code of attach, the first finding, the job's ranks that it names, and what it says beside."""
    said = subprocess.run([ringwatch, "attach", "--json", "--seconds", "3"], capture_output=True, text=True)
    finding = json.loads(said.stdout.splitlines()[0]) if said.stdout.strip() else None
    evidence = " ".join(e["text"] for e in finding["evidence"]) if finding else ""
    words = evidence.replace(",", " ").replace(")", " ").split()
    pids = {int(n) for word, n in zip(words, words[1:]) if word.endswith("pid") and n.isdigit()}
    return said.returncode, finding, sorted(rank for rank in map(rank_of, pids) if rank is not None), said.stderr


def judged(ringwatch, fault, place):
    """Runs a job with a fault, and returns whether attach was right, the seconds it took, and its words."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(port),
         str(HERE / "attach_job.py"), {"stop": "healthy"}.get(fault, fault), str(place)],
        env=environment, stdout=open(place / f"{fault}.out", "w"), stderr=subprocess.STDOUT, start_new_session=True,
    )
    kind, culprit = FAULTS[fault]
    try:
        until = time.time() + PATIENCE_SECONDS
        while not (place / "began").exists():
            if time.time() > until or job.poll() is not None:
                return False, 0.0, "the job did not begin: " + (place / f"{fault}.out").read_text()[-2000:]
            time.sleep(0.2)
        time.sleep(3)
        if fault == "stop":
            for pid in processes_with(str(place)):
                if rank_of(pid) == culprit:
                    os.kill(pid, signal.SIGSTOP)
        began = time.time()
        while True:
            code, finding, ranks, beside = attached(ringwatch)
            if kind is None or finding is not None or time.time() - began > 40:
                break
        took = time.time() - began
        (place / f"{fault}.json").write_text(ask(["CLIENT PROTOCOL 2", "SET FORMAT json", "VERBOSE STATUS"]))
        if kind is None:
            right = finding is None and code == {"idle": 2, "healthy": 0}[fault]
        else:
            right = finding is not None and finding["kind"] == kind and ranks == [culprit]
        return right, took, f"code {code}, ranks {ranks}, {json.dumps(finding)} {beside}"
    finally:
        end_all(str(place))
        job.wait()
        (place / "began").unlink(missing_ok=True)


def main():
    ringwatch, place = str(pathlib.Path(sys.argv[1]).resolve()), pathlib.Path(sys.argv[2]).resolve()
    place.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for fault in sys.argv[3:] or FAULTS:
        right, took, words = judged(ringwatch, fault, place)
        wrong += not right
        print(f"{'ok' if right else 'FAILED'} {fault}: {took:.1f} s; {words}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
