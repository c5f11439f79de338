/* A plugin for tests of the replayer: writes down what it is called with, in the text form of the
 * recordings, to <own path>.log, and what that form has no words for to <own path>.extra.
 *
 * Its structs are written from the tables of offsets, by hand and apart from both the replayer's and
 * the plugin's, and the compiler checks the offsets. Its file name tells it how to behave:
 *   null=HEX   give NULL for these types of events
 *   mask=HEX   write this activation mask (default: all)
 *   warn       write a warning through the logger at each init
 *   silent     never write to the handle's place for ProxyCtrl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define AT(type, member, offset) _Static_assert(offsetof(type, member) == (offset), #type "." #member)
#define SIZE(type, size) _Static_assert(sizeof(type) == (size), #type)

typedef void (*logger_fn)(int level, uint64_t flags, const char *file, int line, const char *format, ...);

typedef struct { int pid; uint8_t channel; int peer, steps, chunk, is_send; } proxy_op;
typedef struct { uint8_t channel; uint64_t stamp; } kernel_ch;

typedef struct {
  uint8_t type; void *parent; int rank;
  union {
    struct { const char *name; uint64_t hash, seq; uint8_t func; const void *send; void *recv; size_t count;
             int root; uint8_t dtype; uint32_t op; size_t traffic; uint8_t max_ch, warps, algo, proto;
             int collnet, nvls; } coll;
    struct { const char *name; uint64_t hash; uint8_t func; void *buffer; uint8_t dtype; size_t count; int peer; } p2p;
    proxy_op op; int step;
  };
} d1;
SIZE(d1, 120); AT(d1, coll.func, 48); AT(d1, coll.dtype, 84); AT(d1, coll.op, 88); AT(d1, coll.traffic, 96);
AT(d1, coll.algo, 106); AT(d1, coll.proto, 107); AT(d1, coll.nvls, 112); AT(d1, p2p.peer, 72);
AT(d1, op.is_send, 44); AT(d1, p2p.dtype, 56);

typedef struct {
  uint8_t type; void *parent; int rank;
  union {
    struct { const char *name; uint64_t hash, seq; const char *func; const void *send; void *recv; size_t count;
             int root; const char *dtype; size_t traffic; uint8_t max_ch, warps; const char *algo, *proto; } coll;
    struct { const char *name; uint64_t hash; const char *func; void *buffer; const char *dtype; size_t count; int peer; } p2p;
    proxy_op op; int step;
  };
} d2;
SIZE(d2, 128); AT(d2, coll.dtype, 88); AT(d2, coll.traffic, 96); AT(d2, coll.max_ch, 104); AT(d2, coll.proto, 120);

typedef struct {
  uint8_t type; void *parent; int rank;
  union {
    struct { const char *name; uint64_t hash, seq; const char *func; const void *send; void *recv; size_t count;
             int root; const char *dtype; uint8_t max_ch, warps; const char *algo, *proto; } coll;
    struct { const char *name; uint64_t hash; const char *func; void *buffer; const char *dtype; size_t count; int peer; } p2p;
    proxy_op op; int step; uint8_t channel;
  };
} d3;
SIZE(d3, 120); AT(d3, coll.max_ch, 96); AT(d3, coll.algo, 104); AT(d3, p2p.func, 40); AT(d3, p2p.peer, 72);

typedef struct {
  uint8_t type; void *parent; int rank;
  union {
    struct { uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *dtype;
             uint8_t channels, warps; const char *algo, *proto; } coll;
    struct { const char *func; void *buffer; const char *dtype; size_t count; int peer; uint8_t channels; } p2p;
    proxy_op op; int step; kernel_ch ch;
  };
} d4;
SIZE(d4, 104); AT(d4, coll.channels, 80); AT(d4, coll.algo, 88); AT(d4, p2p.channels, 60); AT(d4, ch.stamp, 32);

typedef struct { bool captured; int depth; } group_api;
/* The arms of v5 begin those of v6 and v7. */
typedef struct {
  uint64_t type; void *parent; int rank;
  union {
    group_api group;
    struct { const char *func; size_t count; const char *dtype; int root; void *stream; bool captured; } coll_api;
    struct { const char *func; size_t count; const char *dtype; void *stream; bool captured; } p2p_api;
    struct { void *stream; } launch;
    struct { uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *dtype;
             uint8_t channels, warps; const char *algo, *proto; void *group; } coll;
    struct { const char *func; void *buffer; const char *dtype; size_t count; int peer; uint8_t channels; void *group; } p2p;
    proxy_op op; int step; kernel_ch ch;
  };
} d5;
SIZE(d5, 112); AT(d5, group.depth, 28); AT(d5, coll_api.stream, 56); AT(d5, coll_api.captured, 64);
AT(d5, p2p_api.stream, 48); AT(d5, p2p_api.captured, 56); AT(d5, coll.group, 104); AT(d5, p2p.group, 64);

typedef struct {
  uint64_t type; void *parent; int rank;
  union {
    struct { char begin[48]; uint64_t tag; } coll_api;
    struct { char begin[40]; uint64_t tag; } p2p_api;
    struct { char begin[88]; const char *variant; bool sym; uint64_t tag; } coll;
    struct { char begin[48]; uint64_t tag; } p2p;
  };
} d7;
SIZE(d7, 136); AT(d7, coll_api.tag, 72); AT(d7, p2p_api.tag, 64); AT(d7, coll.variant, 112); AT(d7, coll.sym, 120);
AT(d7, coll.tag, 128); AT(d7, p2p.tag, 72);

typedef union { struct { size_t bytes; int steps; } op; struct { int appended; } ctrl; } args_old;
SIZE(args_old, 16);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *main_log, *extra_log;
static uint64_t next_handle;
static uint64_t null_types, mask_bits = ~0ull;
static bool warns, silent;

static uint64_t option(const char *path, const char *key, uint64_t otherwise) {
  const char *at = strstr(path, key);
  return at ? strtoull(at + strlen(key), NULL, 16) : otherwise;
}

static void open_logs(void) {
  Dl_info info;
  char path[4096];
  if (!dladdr((void *)open_logs, &info)) abort();
  snprintf(path, sizeof path, "%s.log", info.dli_fname);
  main_log = fopen(path, "w");
  snprintf(path, sizeof path, "%s.extra", info.dli_fname);
  extra_log = fopen(path, "w");
  if (!main_log || !extra_log) abort();
  null_types = option(info.dli_fname, "null=", 0);
  mask_bits = option(info.dli_fname, "mask=", 0x7fffffff);
  warns = strstr(info.dli_fname, "warn") != NULL;
  silent = strstr(info.dli_fname, "silent") != NULL;
}

__attribute__((destructor)) static void close_logs(void) {
  if (main_log) fclose(main_log);
  if (extra_log) fclose(extra_log);
}

static void begin_line(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  pthread_mutex_lock(&lock);
  if (!main_log) open_logs();
  fprintf(main_log, "%lld %ld ", now.tv_sec * 1000000000ll + now.tv_nsec, (long)syscall(SYS_gettid));
}

static int end_line(void) {
  fputc('\n', main_log);
  pthread_mutex_unlock(&lock);
  return 0;
}

static int init(void **ctx, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, logger_fn logger) {
  begin_line();
  *ctx = (void *)++next_handle;
  *mask = (int)mask_bits;
  fprintf(main_log, "init ctx=%llu id=%llx name=%s nn=%d nr=%d r=%d", (unsigned long long)next_handle,
          (unsigned long long)id, name ? name : "-", nodes, ranks, rank);
  bool warn = warns && logger;
  end_line();
  if (warn) {
    logger(3, 0x4000, "recorder.c", 1, "%s", "for information");
    logger(2, 0x4000, "recorder.c", 1, "%s", "the segment is full");
  }
  return 0;
}

static int init_old(void **ctx, int *mask) { return init(ctx, mask, NULL, 0, 0, 0, 0, NULL); }
static int init_5(void **ctx, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, logger_fn logger) {
  return init(ctx, mask, name, id, nodes, ranks, rank, logger);
}

static void start_line(void *ctx, void **handle, void *parent, uint64_t type) {
  begin_line();
  uint64_t number = ++next_handle;
  if (null_types & type) {
    *handle = NULL;
  } else if (!(silent && type == 32)) {
    *handle = (void *)number;
  }
  fprintf(main_log, "start h=%llu c=%llu p=%llu ", (unsigned long long)number, (unsigned long long)(uintptr_t)ctx,
          (unsigned long long)(uintptr_t)parent);
}

static const char *const functions[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv"};
static const char *const types[] = {"ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64",
                                    "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16"};
static const char *const algos[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char *const protos[] = {"LL", "LL128", "SIMPLE"};
#define NAME(table, id) ((id) < sizeof(table) / sizeof *(table) ? (table)[id] : "?")

static void coll_line(int rank, uint64_t seq, const char *func, size_t n, int root, const char *dtype, int channels,
                      int warps, const char *algo, const char *proto) {
  fprintf(main_log, "Coll rank=%d seq=%llu %s n=%zu root=%d dt=%s nch=%d nw=%d algo=%s proto=%s", rank,
          (unsigned long long)seq, func, n, root, dtype, channels, warps, algo, proto);
}

static void p2p_line(int rank, const char *func, size_t n, const char *dtype, int peer, int channels) {
  fprintf(main_log, "P2p rank=%d %s n=%zu dt=%s peer=%d nch=%d", rank, func, n, dtype, peer, channels);
}

static void common_line(uint64_t type, int rank, const proxy_op *op, int step) {
  if (type == 0x1) {
    fputs("Group", main_log);
  } else if (type == 0x8) {
    fprintf(main_log, "ProxyOp pid=%d ch=%d peer=%d nsteps=%d chunk=%d send=%d", op->pid, op->channel, op->peer,
            op->steps, op->chunk, op->is_send);
    fprintf(extra_log, "proxyop rank=%d local=%d\n", rank, op->pid == getpid());
  } else if (type == 0x10) {
    fprintf(main_log, "ProxyStep %d", step);
  } else {
    fprintf(main_log, "type=%llu", (unsigned long long)type);
  }
}

static int start_1(void *ctx, void **handle, d1 *d) {
  start_line(ctx, handle, d->parent, d->type);
  if (d->type == 2) {
    coll_line(d->rank, d->coll.seq, NAME(functions, d->coll.func), d->coll.count, d->coll.root,
              NAME(types, d->coll.dtype), d->coll.max_ch, d->coll.warps, NAME(algos, d->coll.algo), NAME(protos, d->coll.proto));
    fprintf(extra_log, "coll name=%p hash=%llx traffic=%zu op=%u collnet=%d nvls=%d buffers=%d\n", (void *)d->coll.name,
            (unsigned long long)d->coll.hash, d->coll.traffic, d->coll.op, d->coll.collnet, d->coll.nvls,
            d->coll.send && d->coll.recv);
  } else if (d->type == 4) {
    p2p_line(d->rank, NAME(functions, d->p2p.func), d->p2p.count, NAME(types, d->p2p.dtype), d->p2p.peer, 0);
    fprintf(extra_log, "p2p name=%p hash=%llx buffers=%d\n", (void *)d->p2p.name, (unsigned long long)d->p2p.hash, !!d->p2p.buffer);
  } else {
    common_line(d->type, d->rank, &d->op, d->step);
  }
  return end_line();
}

#define COLL(d, max) coll_line(d->rank, d->coll.seq, d->coll.func, d->coll.count, d->coll.root, d->coll.dtype, d->coll.max, d->coll.warps, d->coll.algo, d->coll.proto)

static int start_2(void *ctx, void **handle, d2 *d) {
  start_line(ctx, handle, d->parent, d->type);
  if (d->type == 2) {
    COLL(d, max_ch);
    fprintf(extra_log, "coll name=%p hash=%llx traffic=%zu buffers=%d\n", (void *)d->coll.name,
            (unsigned long long)d->coll.hash, d->coll.traffic, d->coll.send && d->coll.recv);
  } else if (d->type == 4) {
    p2p_line(d->rank, d->p2p.func, d->p2p.count, d->p2p.dtype, d->p2p.peer, 0);
    fprintf(extra_log, "p2p name=%p hash=%llx buffers=%d\n", (void *)d->p2p.name, (unsigned long long)d->p2p.hash, !!d->p2p.buffer);
  } else {
    common_line(d->type, d->rank, &d->op, d->step);
  }
  return end_line();
}

static int start_3(void *ctx, void **handle, d3 *d) {
  start_line(ctx, handle, d->parent, d->type);
  if (d->type == 2) {
    COLL(d, max_ch);
    fprintf(extra_log, "coll name=%p hash=%llx buffers=%d\n", (void *)d->coll.name, (unsigned long long)d->coll.hash,
            d->coll.send && d->coll.recv);
  } else if (d->type == 4) {
    p2p_line(d->rank, d->p2p.func, d->p2p.count, d->p2p.dtype, d->p2p.peer, 0);
    fprintf(extra_log, "p2p name=%p hash=%llx buffers=%d\n", (void *)d->p2p.name, (unsigned long long)d->p2p.hash, !!d->p2p.buffer);
  } else if (d->type == 0x40) {
    fprintf(main_log, "KernelCh ch=%d pt=0", d->channel);
  } else {
    common_line(d->type, d->rank, &d->op, d->step);
  }
  return end_line();
}

static int start_4(void *ctx, void **handle, d4 *d) {
  start_line(ctx, handle, d->parent, d->type);
  if (d->type == 2) {
    COLL(d, channels);
    fprintf(extra_log, "coll buffers=%d\n", d->coll.send && d->coll.recv);
  } else if (d->type == 4) {
    p2p_line(d->rank, d->p2p.func, d->p2p.count, d->p2p.dtype, d->p2p.peer, d->p2p.channels);
    fprintf(extra_log, "p2p buffers=%d\n", !!d->p2p.buffer);
  } else if (d->type == 0x40) {
    fprintf(main_log, "KernelCh ch=%d pt=%llu", d->ch.channel, (unsigned long long)d->ch.stamp);
  } else {
    common_line(d->type, d->rank, &d->op, d->step);
  }
  return end_line();
}

static int start_5(void *ctx, void **handle, d5 *d) {
  start_line(ctx, handle, d->parent, d->type);
  switch (d->type) {
  case 0x2:
    COLL(d, channels);
    fprintf(extra_log, "coll group=%llu buffers=%d\n", (unsigned long long)(uintptr_t)d->coll.group, d->coll.send && d->coll.recv);
    break;
  case 0x4:
    p2p_line(d->rank, d->p2p.func, d->p2p.count, d->p2p.dtype, d->p2p.peer, d->p2p.channels);
    fprintf(extra_log, "p2p group=%llu buffers=%d\n", (unsigned long long)(uintptr_t)d->p2p.group, !!d->p2p.buffer);
    break;
  case 0x40:
    fprintf(main_log, "KernelCh ch=%d pt=%llu", d->ch.channel, (unsigned long long)d->ch.stamp);
    break;
  case 0x100:
    fprintf(main_log, "GroupApi depth=%d graph=%d", d->group.depth, d->group.captured);
    break;
  case 0x200:
    fprintf(main_log, "CollApi %s n=%zu dt=%s root=%d st=%p graph=%d", d->coll_api.func, d->coll_api.count,
            d->coll_api.dtype, d->coll_api.root, d->coll_api.stream, d->coll_api.captured);
    break;
  case 0x400:
    fprintf(main_log, "P2pApi %s n=%zu dt=%s st=%p graph=%d", d->p2p_api.func, d->p2p_api.count, d->p2p_api.dtype,
            d->p2p_api.stream, d->p2p_api.captured);
    break;
  case 0x800:
    fprintf(main_log, "KernelLaunch st=%p", d->launch.stream);
    break;
  default:
    common_line(d->type, d->rank, &d->op, d->step);
  }
  return end_line();
}

static int start_7(void *ctx, void **handle, d7 *d) {
  bool good = true;
  if (d->type == 0x2) good = !d->coll.variant && !d->coll.sym && !d->coll.tag;
  if (d->type == 0x4) good = !d->p2p.tag;
  if (d->type == 0x200) good = !d->coll_api.tag;
  if (d->type == 0x400) good = !d->p2p_api.tag;
  int code = start_5(ctx, handle, (d5 *)d);
  if (!good) {
    begin_line();
    fputs("v7 field out of place", main_log);
    end_line();
  }
  return code;
}

static int stop(void *handle) {
  begin_line();
  fprintf(main_log, "stop h=%llu", (unsigned long long)(uintptr_t)handle);
  return end_line();
}

static int record(void *handle, uint32_t state, void *args) {
  begin_line();
  fprintf(main_log, "state h=%llu s=%u", (unsigned long long)(uintptr_t)handle, state);
  if (args) fprintf(main_log, " a=%llu", (unsigned long long)*(uint64_t *)args);
  return end_line();
}

static int record_old(void *handle, uint32_t state, args_old *args) {
  int code = record(handle, state, args);
  if (state < 8) {
    pthread_mutex_lock(&lock);
    fprintf(extra_log, "opstate h=%llu s=%u bytes=%zu steps=%d\n", (unsigned long long)(uintptr_t)handle, state,
            args->op.bytes, args->op.steps);
    pthread_mutex_unlock(&lock);
  }
  return code;
}

static int finalize(void *ctx) {
  begin_line();
  fprintf(main_log, "finalize ctx=%llu", (unsigned long long)(uintptr_t)ctx);
  return end_line();
}

typedef struct { const char *name; void *init, *start, *stop, *record, *finalize; } table;
table ncclProfiler_v1 = {"recorder", init_old, start_1, stop, record_old, finalize};
table ncclProfiler_v2 = {"recorder", init_old, start_2, stop, record_old, finalize};
table ncclProfiler_v3 = {"recorder", init_old, start_3, stop, record_old, finalize};
table ncclProfiler_v4 = {"recorder", init, start_4, stop, record, finalize};
table ncclProfiler_v5 = {"recorder", init_5, start_5, stop, record, finalize};
table ncclProfiler_v6 = {"recorder", init_5, start_5, stop, record, finalize};
table ncclProfiler_v7 = {"recorder", init_5, start_7, stop, record, finalize};
