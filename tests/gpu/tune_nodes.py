"""The tuner's rules over two "nodes" of one machine: all ranks follow them, or none does, and nothing hangs.

python3 tune_nodes.py RINGWATCH [CASE ...]; needs 2 GPUs (RANKS=4: 4, two ranks a node) and torch with NCCL 2.27 or later. NCCL_HOSTID
makes the nodes. NCCL's own log (TUNING) says which protocol each all-reduce got. One line a check; exits 1 when one failed.
"""
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

RANKS = int(os.environ.get("RANKS", "2"))
PER_NODE = RANKS // 2
WAIT_S = 5
LIMIT_S = 120
# Small all-reduces of two or four ranks take LL by default.
RULES = "rules:\n- {operation: AllReduce, max_bytes: 64K, algorithm: RING, protocol: SIMPLE, channels: 1}\n"
OTHER = RULES.replace("64K", "32K")
failed = 0


def job():
    """One rank: the communicator of all, a child with split, and four small all-reduces on each."""
    import torch
    import torch.distributed as dist

    mode, there, rank = sys.argv[2], pathlib.Path(sys.argv[3]), int(os.environ["RANK"])
    os.environ["NCCL_HOSTID"] = f"node{rank // PER_NODE}"
    os.environ["NCCL_DEBUG_FILE"] = str(there / f"nccl.{rank}")
    if mode == "missing" and rank == RANKS - 1:
        os.environ["RINGWATCH_TUNE"] = "/nowhere/rules"
    if mode == "broken" and rank == RANKS - 1:
        (there / "broken").write_text("no rules")
        os.environ["RINGWATCH_TUNE"] = str(there / "broken")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if mode == "split" else None
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=30), device_id=device)
    groups = [None]
    if mode == "split":
        groups.append(dist.split_group(split_ranks=[list(range(RANKS))]))
    # Work that is under way while communicators are made stays undisturbed.
    x = torch.ones(1024, device="cuda")
    for group in groups:
        for _ in range(4):
            x.fill_(1)
            dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            assert x.eq(RANKS).all(), x
    print(f"rank {rank} done", flush=True)
    dist.destroy_process_group()


def check(name, good, detail):
    global failed
    failed += not good
    print(f"{'ok' if good else 'FAILED'} {name}: {detail}", flush=True)


def end(running):
    for p in running:
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.wait()
    # torchrun gives each rank a session of its own.
    for p in pathlib.Path("/proc").iterdir():
        try:
            if p.name.isdigit() and int(p.name) != os.getpid() and str(place).encode() in (p / "cmdline").read_bytes():
                os.kill(int(p.name), signal.SIGKILL)
        except OSError:
            pass


def run(case, options, bare_node=None, rules=(RULES, RULES)):
    """Runs both nodes: exit codes (None where one did not end by itself), what they wrote, seconds, NCCL's logs."""
    there = place / case
    there.mkdir()
    port, running, begun = str(29600 + os.getpid() % 300), [], time.time()
    for node in (0, 1):
        file = there / f"rules{node}.yaml"
        file.write_text(rules[node])
        (there / f"segments{node}").mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                    "--nproc-per-node", str(PER_NODE), "--master-addr", "127.0.0.1", "--master-port", port,
                    __file__, "--job", case, str(there)]
        command = [ringwatch, "run", "--preload", "--tune", str(file), "--tune-nodes", *options, "--", *torchrun]
        environment = dict(
            os.environ, RINGWATCH_DIR=str(there / f"segments{node}"), RINGWATCH_TUNE_WAIT_MS=str(WAIT_S * 1000),
            NCCL_SOCKET_IFNAME="lo", NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,TUNING", NCCL_NVLS_ENABLE="0",
            # PyTorch with a device makes communicators that do not block, and those follow no rules.
            TORCH_NCCL_USE_COMM_NONBLOCKING="1" if case == "nonblocking" else "0")
        if bare_node == node:
            command = torchrun
        log = open(there / f"log{node}", "w")
        running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    # A rank without the library waits for ranks that have given up: the other node is what counts.
    counted = [p for node, p in enumerate(running) if node != bare_node]
    while time.time() - begun < LIMIT_S and any(p.poll() is None for p in counted):
        time.sleep(0.2)
    codes, seconds = [p.poll() for p in counted], time.time() - begun
    end(running)
    text = "".join((there / f"log{node}").read_text(errors="replace") for node in (0, 1))
    logs = [(there / f"nccl.{r}").read_text(errors="replace") if (there / f"nccl.{r}").exists() else "" for r in range(RANKS)]
    return codes, text, seconds, logs


def protocols(log):
    """The protocols of the job's all-reduces of 4 KiB, by NCCL's log."""
    return set(re.findall(r"AllReduce: 4096 Bytes -> Algo \S+ proto (\S+)", log))


def applies(name, logs, wanted):
    # NCCL prints this line on one rank. Ranks that chose differently would not finish.
    have = set().union(*map(protocols, logs))
    good = have == {"SIMPLE"} if wanted else bool(have) and "SIMPLE" not in have
    check(f"{name} protocol", good, f"{sorted(have)}")


def ends_well(name, codes, seconds, text):
    good = codes == [0, 0] and text.count(" done") == RANKS
    check(f"{name} ends", good, f"exit codes {codes}, {seconds:.0f} s" + ("" if good else f": {text[-3000:]}"))


def agreed(case):
    codes, text, seconds, logs = run(case, [])
    ends_well(case, codes, seconds, text)
    applies(case, logs, True)
    count = 2 if case == "split" else 1
    good = all(log.count("all ranks agree on the tuner's rules") >= count for log in logs)
    check(f"{case} is logged", good, f"{[log.count('all ranks agree') for log in logs]} agreements")


def refused(case, named, **how):
    codes, text, seconds, logs = run(case, [], **how)
    ends_well(case, codes, seconds, text)
    applies(case, logs, False)
    check(f"{case} names the rank", all(named in log for log in logs), named)
    if case in ("differs", "missing"):
        check(f"{case} is found", "tuner-rules-differ" in text, "by `run`")


def nonblocking(case):
    codes, text, seconds, logs = run(case, [])
    ends_well(case, codes, seconds, text)
    applies(case, logs, False)


def required(case):
    codes, text, seconds, _ = run(case, ["--tune-require"], rules=(RULES, OTHER))
    good = all(codes) and seconds < LIMIT_S and text.count("the communicator is not made") >= RANKS
    check(f"{case} fails init on all ranks", good, f"exit codes {codes}, {seconds:.0f} s")


def bare(case):
    codes, text, seconds, _ = run(case, [], bare_node=1)
    good = all(codes) and None not in codes and seconds < LIMIT_S and "the communicator is not made" in text
    check(f"{case} hangs nobody", good, f"exit codes {codes}, {seconds:.0f} s" + ("" if good else f": {text[-3000:]}"))
    said = re.search(r"ringwatch: the communicator is not made: .*", text)
    print(f"   {said[0] if said else 'no reason'}")


CASES = {
    "agreed": agreed,
    "split": agreed,
    "differs": lambda case: refused(case, "has other rules", rules=(RULES, OTHER)),
    "missing": lambda case: refused(case, f"rank {RANKS - 1} cannot read its rule file"),
    "broken": lambda case: refused(case, f"rank {RANKS - 1} refuses its rule file"),
    "nonblocking": nonblocking,
    "required": required,
    "bare": bare,
}

if len(sys.argv) > 2 and sys.argv[1] == "--job":
    job()
    sys.exit(0)
ringwatch = str(pathlib.Path(sys.argv[1]).resolve())
place = pathlib.Path(tempfile.mkdtemp(prefix="rw-tune-nodes-", dir="/dev/shm"))
for chosen in sys.argv[2:] or CASES:
    CASES[chosen](chosen)
sys.exit(failed > 0)
