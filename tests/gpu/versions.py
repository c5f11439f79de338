"""Every NCCL release under one mixed job (mixed.c): what the plugin and the preloaded library record of it.

python3 versions.py RINGWATCH MIXED GPUS LIBNCCL... runs MIXED with each library, by the plugin and by the preloaded
library, reads the segments that are left (format: plugin/wire/src/FORMAT.md), and compares what they hold with what
the job printed. One line a check; exits 1 when one failed.
"""
import collections
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

FUNCS = [None, "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv"]
TIMED = ["unknown", "kernel", "events", "budget", "captured", "not offered", "not asked", "not free", "with others",
         "launch"]
FLAWS = ["pair order", "progress", "impossible event time", "event error", "event of several", "overwritten"]
# A time that is dropped because it cannot be true is no fault of the record.
HARMLESS = {"impossible event time", "event of several"}
ROUNDS = 100
failed = 0


def check(name, good, detail):
    global failed
    failed += not good
    print(f"{'ok' if good else 'FAILED'} {name}: {detail}", flush=True)


def read(path):
    """The operations of a segment: function, issued or not, how timed, how long, reduction."""
    words = struct.unpack(f"<{path.stat().st_size // 8}Q", path.read_bytes())
    region = lambda i: (words[3 + 2 * i] // 8, words[4 + 2 * i] & 0xFFFFFFFF, words[4 + 2 * i] >> 32)
    start, stride, slots = region(1)
    shift = slots.bit_length() - 1
    ops, channels = [], collections.Counter()
    at, width, n = region(3)
    for i in range(n):
        slot = words[at + i * width:at + i * width + width]
        if slot[0]:
            channels[slot[1] & (1 << 56) - 1] += 1
    for i in range(slots):
        slot = words[start + i * stride:start + (i + 1) * stride]
        if slot[0] == 0:
            continue
        ticket = (slot[0] >> 16) - 1
        lap = (ticket >> shift) % 65535 + 1
        event = slot[20] >> 16 if slot[20] & 0xFFFF == lap else None
        func = slot[1] >> 24 & 0xFF
        how = TIMED[slot[19] & 0xFF]
        known = event is not None or channels[ticket] > 0
        ops.append((FUNCS[func] if func < len(FUNCS) else func, slot[6] != 0, how, known, slot[21] & 0xFF))
    # Lines, from format 3 on: operations without a time. A mark of this lap in the last word says that it was issued.
    heads, slots, rings = words[37] // 8, words[38] & 0xFFFFFFFF, words[38] >> 32
    version = words[1] & 0xFFFFFFFF
    head_words, timed_at = (8, 56) if version == 3 else (16, 48)
    shift = slots.bit_length() - 1
    for ring in range(rings):
        first = heads + head_words * rings + (ring << shift) * 8
        for i in range(slots):
            line = words[first + 8 * i:first + 8 * i + 8]
            if line[0] == 0:
                continue
            lap = (((line[0] >> 16) - 1) >> shift) % 65535 + 1
            issued = line[7] != 0 and line[7] & 0xFFFF == lap
            func, how = line[1] >> 16 & 0xFF, TIMED[line[7] >> timed_at & 0xF] if issued else "unknown"
            ops.append((FUNCS[func] if func < len(FUNCS) else func, issued, how, False, 0))
    lost = sum(words[192 + i] for i in range(13) if i not in (2, 4, 6))
    flaws = {name: words[224 + i] for i, name in enumerate(FLAWS) if words[224 + i]}
    return ops, words[18] & 0xFFFFFFFF, words[18] >> 32, lost, flaws


def main():
    ringwatch, mixed = (str(pathlib.Path(p).resolve()) for p in sys.argv[1:3])
    gpus = int(sys.argv[3])
    for library in sys.argv[4:]:
        for way in ([], ["--preload"]):
            where = tempfile.mkdtemp(dir="/dev/shm")
            environment = dict(os.environ, RINGWATCH_DIR=where, LD_LIBRARY_PATH=str(pathlib.Path(library).parent))
            command = [ringwatch, "run", "--keep", *way, "--", mixed, str(gpus), str(ROUNDS)]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            version = re.search(r"^nccl (\d+)$", ran.stdout, re.M)
            name = f"{version[1] if version else library} {'preload' if way else 'plugin'}"
            good = ran.returncode == 0 and ran.stdout.count("collectives") == gpus
            check(f"{name} runs", good, "ok" if good else f"exit code {ran.returncode}: {ran.stderr[:400]}")
            if not version:
                continue
            segments = list(pathlib.Path(where).glob("*.seg"))
            if not segments:
                check(f"{name} segment", int(version[1]) < 22300 and not way, "none: no profiler before 2.23")
                continue
            ops, _, abi, lost, flaws = read(segments[0])
            each = gpus * ROUNDS
            want = {"AllReduce": 4 * each, "Broadcast": each, "Reduce": each, "AllGather": each,
                    "ReduceScatter": each, "Send": each, "Recv": each}
            have = collections.Counter(o[0] for o in ops if o[1])
            called = collections.Counter(o[0] for o in ops)
            for func, count in want.items():
                good = have[func] == count or (func == "Broadcast" and int(version[1]) >= 22902 and called[func] == count)
                check(f"{name} {func}", good, f"{have[func]} issued and {called[func]} called of {count}")
            check(f"{name} losses", lost == 0 and not flaws.keys() - HARMLESS, f"{lost} lost, flaws {flaws or 'none'}")
            how = dict(collections.Counter((o[2], "time" if o[3] else "no time") for o in ops if o[1]))
            reductions = sum(1 for o in ops if o[4])
            print(f"   {name}: ABI v{abi}, reductions of {reductions}, timed {how}")
            findings = re.findall(r"^ringwatch: (?:missing-rank|mismatch|straggler): .*$", ran.stderr, re.M)
            check(f"{name} findings", not findings, findings or "none")
            shutil.rmtree(where)
    sys.exit(failed > 0)


main()
