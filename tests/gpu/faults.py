"""Plants faults in a real job (fault_job.py) and measures what Ringwatch says, and how soon.

python3 faults.py PATH_OF_RINGWATCH [FAULT ...]; needs 4 GPUs and torch (RANKS=2 does for most). Prints one line a fault and exits 1 when one
was not named rightly in time. RECORDINGS=DIR also records each run to DIR/FAULT, and `diagnose --replay` has to say the same. THROTTLE=/path/of/throttle.so (built from throttle.c) is needed for `network`.
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch

from processes import end_all

RANKS = int(os.environ.get("RANKS", "4"))
LAST = RANKS - 1
# Of two that differ nobody can say which is wrong.
ODD = 1 if RANKS > 2 else None
# Fault: kinds that are right, the rank (None: any), seconds it may take, more of the environment.
FAULTS = {
    "stop": ("missing-rank", LAST, 5, {}),
    "kill": ("missing-rank|aborted-rank", LAST, 5, {}),
    "missing": ("missing-rank", LAST, 5, {}),
    "size": ("mismatch", ODD, 5, {}),
    "root": ("mismatch", ODD, 5, {}),
    "swapped": ("interleaved-communicators", None, 5, {}),
    "send": ("send-without-receive", 1, 5, {}),
    "graph": ("missing-replay", LAST, 5, {"RINGWATCH_GRAPHS": "full"}),
    "compute": ("straggler", min(2, LAST), 10, {}),
    "shared-gpu": ("straggler", 1, 10, {}),
    "starved": ("straggler", LAST, 10, {}),
    "network": ("slow-transfer|change-point|slow-node|slow-pair", None, 10, {"FAKE_NODES": str(RANKS // 2), "NCCL_SOCKET_IFNAME": "lo", "NCCL_SHM_DISABLE": "1"}),
    "healthy": (None, None, 75, {}),
}
ringwatch = str(pathlib.Path(sys.argv[1]).resolve())
chosen = sys.argv[2:] or list(FAULTS)
if torch.cuda.device_count() < RANKS:
    print(f"SKIPPED faults: needs {RANKS} GPUs, found {torch.cuda.device_count()}")
    sys.exit(0)
here = pathlib.Path(__file__).resolve().parent


def end(process, place):
    """Ends the job, the way a scheduler does at last, and waits until it is gone: the driver takes a while to clear up
    after killed processes, and disturbs whoever comes next meanwhile."""
    end_all(place)
    process.wait()
    time.sleep(0.5)


def named(fault, told):
    """What a replay says otherwise than was told while the job ran; nothing, if it says the same."""
    recording = pathlib.Path(os.environ["RECORDINGS"]) / fault
    said = subprocess.run([ringwatch, "diagnose", "--replay", recording, "--json"], capture_output=True, text=True)
    found = [json.loads(line) for line in said.stdout.splitlines()]
    ranks = lambda f: ", ".join(map(str, f["ranks"]))
    replayed = {(f["kind"], ranks(f)) for f in found if f["severity"] in ("warning", "critical")}
    live = {(kind, re.sub("ranks? ", "", who)) for _, kind, who, _ in told}
    return "" if replayed == live else f"; replayed: {sorted(replayed)} {said.stderr.strip()}"


def run(fault):
    kinds, rank, limit, more = FAULTS[fault]
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", **more}
        if fault == "network":
            throttle = os.environ.get("THROTTLE")
            if not throttle:
                return None, "SKIPPED: THROTTLE does not name throttle.so"
            environment |= {"LD_PRELOAD": throttle, "THROTTLE_FILE": f"{place}/throttle", "THROTTLE_US": "300"}
        records = ["--record", f"{os.environ['RECORDINGS']}/{fault}"] if "RECORDINGS" in os.environ else []
        command = [ringwatch, "run", *records, "--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        process = subprocess.Popen(
            [*command, str(here / "fault_job.py"), fault, place],
            env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        )
        told, lines = [], []

        def read():
            for line in process.stderr:
                found = re.match(r"ringwatch: ([a-z-]+): (ranks? [0-9, -]+|.*?) in (.*)", line)
                summary = re.match(r"ringwatch: \d+ processes", line)
                lines.append("SUMMARY" if summary else line.rstrip())
                if found and "SUMMARY" not in lines:
                    told.append((time.time(), found.group(1), found.group(2), line.strip()))

        reader = threading.Thread(target=read)
        reader.start()
        begun = time.time()
        moment = pathlib.Path(place) / "fault"
        planted = None
        while process.poll() is None:
            if planted is None and moment.exists():
                planted = float(moment.read_text())
            right = [t for t in told if kinds and re.fullmatch(kinds, t[1]) and planted and t[0] >= planted]
            # Somewhat longer, for what else is said.
            if right and time.time() > right[0][0] + 1.5:
                break
            if time.time() - (planted or begun + 60) > limit + 3:
                break
            time.sleep(0.02)
        end(process, place)
        children = pathlib.Path(place) / "children"
        for pid in children.read_text().split() if children.exists() else []:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        reader.join(5)
    if planted is None:
        return False, "the job did not get to the fault: " + " / ".join(lines[-4:])
    said = "; ".join(f"{t[3][11:110]} (after {t[0] - planted:.2f} s)" for t in told) or "nothing"
    otherwise = named(fault, told) if records else ""
    said += otherwise
    if kinds is None:
        return not told and not otherwise, said
    right = [t for t in told if re.fullmatch(kinds, t[1]) and (rank is None or t[2] == f"rank {rank}") and t[0] >= planted]
    good = bool(right) and right[0][0] - planted <= limit and len(told) == 1 and not otherwise
    evidence = [line for line in lines[: lines.index("SUMMARY") if "SUMMARY" in lines else None] if line.startswith("    - ")][:6]
    return good, said + "".join(f"\n      {line[6:150]}" for line in evidence)


failed = 0
for fault in chosen:
    good, said = run(fault)
    failed += good is False
    print(f"{'skipped' if good is None else 'ok' if good else 'FAILED'} {fault}: {said}", flush=True)
sys.exit(1 if failed else 0)
