"""A rank of a job in Python, which hands operations to the plugin as NCCL 2.27 does: rank.py PLUGIN RANK RANKS.

The last rank stays in load_batch() after 20 operations, and the others issue one more.
"""
import ctypes
import sys
import time

pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int


class Descriptor(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint8), ("parent", pointer), ("rank", integer), ("sequence", ctypes.c_uint64), ("function", text),
        ("send", pointer), ("receive", pointer), ("count", ctypes.c_size_t), ("root", integer), ("datatype", text),
        ("channels", ctypes.c_uint8), ("warps", ctypes.c_uint8), ("algorithm", text), ("protocol", text),
    ]


def function(*arguments):
    return ctypes.CFUNCTYPE(integer, *arguments)


class Table(ctypes.Structure):
    _fields_ = [
        ("name", text),
        ("init", function(
            ctypes.POINTER(pointer), ctypes.POINTER(integer), text, ctypes.c_uint64, integer, integer, integer, pointer)),
        ("start_event", function(pointer, ctypes.POINTER(pointer), ctypes.POINTER(Descriptor))),
        ("stop_event", function(pointer)),
        ("record_event_state", pointer),
        ("finalize", function(pointer)),
    ]


RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
PLUGIN = Table.in_dll(ctypes.CDLL(sys.argv[1]), "ncclProfiler_v4")
CONTEXT, MASK = pointer(), integer()
assert PLUGIN.init(ctypes.byref(CONTEXT), ctypes.byref(MASK), b"world", 0x1234, 1, RANKS, RANK, None) == 0


def all_reduce(sequence):
    collective, event = 2, pointer()
    descriptor = Descriptor(
        type=collective, rank=RANK, sequence=sequence, function=b"AllReduce", count=1024, datatype=b"ncclFloat32", channels=1,
        warps=4, algorithm=b"RING", protocol=b"LL",
    )
    PLUGIN.start_event(CONTEXT, ctypes.byref(event), ctypes.byref(descriptor))
    PLUGIN.stop_event(event)


def load_batch():
    time.sleep(600)


for sequence in range(20):
    all_reduce(sequence)
    time.sleep(0.01)
if RANK != RANKS - 1:
    all_reduce(20)
load_batch()
