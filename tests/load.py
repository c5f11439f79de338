"""What the agent costs beside a steady job: 8 processes, 2,000 operations a second each, through the real plugin.

python3 tests/load.py PATH_OF_RINGWATCH [SECONDS [PROCESSES [OPERATIONS_A_SECOND]]]; prints the agent's CPU and memory, and what it
read. The callbacks are those of NCCL 2.28 for an all-reduce of 1 MiB on 4 channels, all of them with kernel events: the
replayer's mask is not where NCCL's is, so the plugin's governor leaves it alone.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

RANKS, CHANNELS, BURST = 4, 4, 10
GPU_AHEAD = 1_700_000_000_000_000_000


def log(path, comm, rank, seconds, rate):
    """One rank's callbacks, as the recorder would have written them."""
    handle, out = 10, [f"1000000000 1 init ctx=1 id={comm:x} name=- nn=1 nr={RANKS} r={rank}"]
    # Ten in a row, as in a training step: the host runs ahead, the GPU follows, and NCCL's thread tells what it did. So a
    # process sleeps a few times for ten of them; a virtual machine's sleeps end too late for more.
    step = BURST * 1_000_000_000 // rate
    for n in range(seconds * rate):
        burst, place = divmod(n, BURST)
        at = 1_100_000_000 + burst * step + place * 2_800
        group, api, launch, plan, coll = range(handle, handle + 5)
        handle += 5
        say = lambda after, text: out.append(f"{at + after} 1 {text}")
        say(0, f"start h={group} c=1 p=0 GroupApi depth=1 graph=0")
        say(200, f"start h={api} c=1 p={group} CollApi AllReduce n=262144 dt=ncclFloat32 root=0 st=(nil) graph=0")
        say(300, f"stop h={api}")
        say(400, f"start h={launch} c=1 p={group} KernelLaunch st=(nil)")
        say(2000, f"stop h={launch}")
        say(2100, f"start h={plan} c=1 p=0 Group")
        say(2200, f"start h={coll} c=1 p={api} Coll rank={rank} seq={n} AllReduce n=262144 root=0 dt=ncclFloat32 nch={CHANNELS} nw=16 algo=RING proto=LL128")
        say(2300, f"stop h={coll}")
        say(2400, f"stop h={plan}")
        say(2500, f"stop h={group}")
        began = 1_100_000_000 + burst * step + 100_000 + place * 20_000
        told = 1_100_000_000 + burst * step + 100_000 + BURST * 20_000 + place * 2_800
        for c in range(CHANNELS):
            out.append(f"{told + c * 100} 2 start h={handle} c=1 p={coll} KernelCh ch={c} pt={GPU_AHEAD + began + c * 30}")
            out.append(f"{told + 1_000 + c * 100} 2 state h={handle} s=22 a={GPU_AHEAD + began + 18_000}")
            out.append(f"{told + 1_050 + c * 100} 2 stop h={handle}")
            handle += 1
    # Threads of one log are told apart by their ids, and time goes on in the file.
    head, rest = out[0], sorted(out[1:], key=lambda line: int(line.split(" ", 1)[0]))
    last = int(rest[-1].split(" ", 1)[0])
    path.write_text("\n".join([head, *rest, f"{last + 1_000_000} 1 finalize ctx=1"]) + "\n")


def scrape():
    text = urllib.request.urlopen("http://127.0.0.1:19479/metrics").read().decode()
    total = lambda name: sum(float(l.rsplit(" ", 1)[1]) for l in text.splitlines() if l.startswith(name + "{"))
    return total("ringwatch_operations_total"), total("ringwatch_lost_records_total")


def main():
    program = str(pathlib.Path(sys.argv[1]).resolve())
    seconds, processes, rate = (int(a) for a in (sys.argv[2:] + ["20", "8", "2000"][len(sys.argv) - 2:]))
    room = pathlib.Path(tempfile.mkdtemp())
    segments = tempfile.mkdtemp(prefix="ringwatch-load-", dir="/dev/shm")
    subprocess.run([program, "plugin", str(room)], check=True, stdout=subprocess.DEVNULL)
    begin, players = time.monotonic_ns() + 3_000_000_000 + processes * seconds * rate * 60_000, []
    agent = None
    try:
        for p in range(processes):
            job, rank = divmod(p, RANKS)
            path = room / f"{p}.log"
            if p == 0:
                log(path, 0xA0, 0, seconds + 9, rate)
                first = path.read_text()
            else:
                path.write_text(first.replace("id=a0 ", f"id={0xA0 + job:x} ", 1).replace(" r=0\n", f" r={rank}\n", 1).replace(" rank=0 ", f" rank={rank} "))
            environment = dict(os.environ, RINGWATCH_DIR=segments, RINGWATCH_JOB=f"job{job}", RANK=str(rank), WORLD_SIZE=str(RANKS))
            command = [program, "replay", "--scenario", "mixed", "--trace", str(path), "--rank", "0", "--honour-mask", "--start-at", str(begin), "--plugin", str(room / "libnccl-profiler-ringwatch.so")]
            players.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        settings = [f"socket.path={room}/agent.sock", "http.listen=127.0.0.1:19479", f'segments.directories=["{segments}"]']
        command = [program, "agent"] + [part for s in settings for part in ("--set", s)] + os.environ.get("AGENT", "").split()
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while time.monotonic_ns() < begin + 6_000_000_000:
            time.sleep(0.1)

        def used():
            fields = pathlib.Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        (before, _), cpu, at = scrape(), used(), time.time()
        if os.environ.get("PERF"):
            subprocess.run(["perf", "record", "-q", "-o", os.environ["PERF"], "-F", "1999", "-p", str(agent.pid), "--", "sleep", str(seconds)], stderr=subprocess.DEVNULL)
        else:
            time.sleep(seconds)
        cpu, took = used() - cpu, time.time() - at
        after, lost = scrape()
        memory = dict(re.findall(r"(VmHWM|VmRSS|RssAnon|RssShmem):\s+(\d+) kB", pathlib.Path(f"/proc/{agent.pid}/status").read_text()))
        print(f"agent: {100 * cpu / took:.2f} % of a core, {(after - before) / took:.0f} collectives a second joined of {processes // RANKS * rate}, {lost:.0f} records lost")
        print("memory in MiB: " + ", ".join(f"{k} {int(v) / 1024:.1f}" for k, v in memory.items()))
    finally:
        for p in players + ([agent] if agent else []):
            p.kill()
            p.wait()
        shutil.rmtree(segments, ignore_errors=True)
        shutil.rmtree(room, ignore_errors=True)


main()
