// Stands for libnccl.so.2 where there is no GPU: the public calls, and the profiler's callbacks in the order in
// which NCCL of the ABI that FAKE_ABI names makes them (0: an NCCL without profiler). Nothing is moved.
//
// FAKE_MEET names a directory in which the ranks of several processes exchange what they gather on streams of the fake
// driver; FAKE_CONNECT=1: the call waits for the other ranks, as where NCCL connects them late. FAKE_NODES: nodes of a
// communicator. FAKE_ASK=1: each all-reduce asks the tuner, and prints its answer. FAKE_LOG=1: prints NCCL's log.
// count 666 fails with ncclInvalidArgument; count 777 never returns; FAKE_HANG=1 lets inits hang.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;
typedef struct Comm {
  uint64_t hash;
  int rank, ranks, state, splits, gathered, aborted;
  uint64_t seq[16];
  void *ctx, **tuner, *tuner_ctx;
} Comm;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

enum { OK = 0, BAD_ARGUMENT = 4, BAD_USAGE = 5, IN_PROGRESS = 7 };
static const char *FUNC[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv",
                             "Send", "Recv", "AlltoAll", "Scatter", "Gather"};
static const char *TYPE[] = {"ncclInt8", "Unknown", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64",
                             "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16"};
static const int SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct {
  const char *name;
  void *init;
  int (*start)(void *, void **, void *);
  int (*stop)(void *);
  int (*record)(void *, int, void *);
  int (*finalize)(void *);
} Table;
typedef void (*Log)(int, unsigned long, const char *, int, const char *, ...);

static int abi(void) {
  static int known = -1;
  if (known < 0) known = getenv("FAKE_ABI") ? atoi(getenv("FAKE_ABI")) : 0;
  return known;
}
static Table *table;
static int mask;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static void load(void) {
  pthread_mutex_lock(&loading);
  static int tried;
  if (!tried && abi()) {
    tried = 1;
    const char *name = getenv("NCCL_PROFILER_PLUGIN");
    void *lib = dlopen(name && *name ? name : "libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
    char symbol[] = "ncclProfiler_v0";
    symbol[14] += abi();
    if (lib) table = dlsym(lib, symbol);
  }
  pthread_mutex_unlock(&loading);
}

static void quiet(int level, unsigned long b, const char *c, int d, const char *format, ...) {
  if (!getenv("FAKE_LOG")) return;
  char text[2000];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  fprintf(stderr, "log %d %s\n", level, text);
}
static int nodes(void) { return getenv("FAKE_NODES") ? atoi(getenv("FAKE_NODES")) : 1; }

static void profiler_init(Comm *c) {
  load();
  if (!table) return;
  if (abi() <= 3)
    ((int (*)(void **, int *))table->init)(&c->ctx, &mask);
  else if (abi() == 4)
    ((int (*)(void **, int *, const char *, uint64_t, int, int, int, Log))table->init)(
        &c->ctx, &mask, "name", c->hash, nodes(), c->ranks, c->rank, quiet);
  else
    ((int (*)(void **, uint64_t, int *, const char *, int, int, int, Log))table->init)(
        &c->ctx, c->hash, &mask, "name", nodes(), c->ranks, c->rank, quiet);
}

// A descriptor, field by field at the offsets of its version.
typedef struct { char at[160]; } Event;
#define PUT(e, offset, type, value) (*(type *)((e).at + (offset)) = (type)(value))

static Event event(uint64_t type, void *parent, int rank) {
  Event e;
  memset(&e, 0, sizeof e);
  if (abi() >= 5) PUT(e, 0, uint64_t, type); else PUT(e, 0, uint8_t, type);
  PUT(e, 8, void *, parent);
  PUT(e, 16, int, rank);
  return e;
}
static void *start(Comm *c, Event e) {
  void *h = (void *)0x5a5a;
  table->start(c->ctx, &h, &e);
  return h;
}

typedef struct {
  Comm *c;
  int func, type, peer;
  size_t count;
  void *api, *stream;
} Task;
static __thread Task tasks[4096];
static __thread int n_tasks, depth;
static __thread void *group_api;
static __thread struct { Comm *c, **place; } inits[64];
static __thread int n_inits;

static void tell_call(Task *t) {
  if (!table || abi() < 5) return;
  if (!group_api) {
    Event g = event(1 << 8, NULL, 0);
    PUT(g, 28, int, depth + 1);
    group_api = start(t->c, g);
    table->record(group_api, 23, NULL);
  }
  int pair = t->func == 6 || t->func == 7;
  Event e = event(pair ? 1 << 10 : 1 << 9, group_api, 0);
  PUT(e, 24, const char *, FUNC[t->func]);
  PUT(e, 32, size_t, t->count);
  PUT(e, 40, const char *, TYPE[t->type]);
  if (pair) PUT(e, 48, void *, t->stream);
  else PUT(e, 48, int, t->peer), PUT(e, 56, void *, t->stream);
  t->api = start(t->c, e);
  table->stop(t->api);
}

static void tell_issue(Task *t) {
  if (!table) return;
  void *plan = start(t->c, event(1, NULL, 0));
  int pair = t->func == 6 || t->func == 7, bytes = t->func == 2 || t->func == 0;
  size_t count = bytes ? t->count * SIZE[t->type] : t->count;
  const char *type = bytes ? TYPE[0] : TYPE[t->type];
  Event e = event(pair ? 4 : 2, abi() >= 5 ? t->api : plan, t->c->rank);
  if (abi() <= 1) {
    PUT(e, 32, uint64_t, t->c->hash);
    if (pair) {
      PUT(e, 40, uint8_t, t->func), PUT(e, 56, uint8_t, t->type), PUT(e, 64, size_t, count);
      PUT(e, 72, int, t->peer);
    } else {
      PUT(e, 40, uint64_t, t->c->seq[t->func]++);
      PUT(e, 48, uint8_t, t->func), PUT(e, 72, size_t, count), PUT(e, 80, int, t->peer);
      PUT(e, 84, uint8_t, bytes ? 0 : t->type);
    }
  } else if (pair) {
    PUT(e, 24, const char *, FUNC[t->func]), PUT(e, 40, const char *, type), PUT(e, 48, size_t, count);
    PUT(e, 56, int, t->peer), PUT(e, 60, uint8_t, 1);
    if (abi() >= 5) PUT(e, 64, void *, plan);
  } else {
    PUT(e, 24, uint64_t, t->c->seq[t->func]++), PUT(e, 32, const char *, FUNC[t->func]);
    PUT(e, 56, size_t, count), PUT(e, 64, int, t->peer), PUT(e, 72, const char *, type);
    PUT(e, 80, uint8_t, 1), PUT(e, 88, const char *, "RING"), PUT(e, 96, const char *, "LL");
    if (abi() >= 5) PUT(e, 104, void *, plan);
  }
  void *h = start(t->c, e);
  table->stop(h);
  table->stop(plan);
}

static void issue_all(void) {
  if (!table) n_tasks = 0;
  if (group_api) table->record(group_api, 24, NULL);
  // Collectives first, then pairs by NCCL's own schedule: here, last call first.
  for (int i = 0; i < n_tasks; i++) if (tasks[i].func != 6 && tasks[i].func != 7) tell_issue(&tasks[i]);
  for (int i = n_tasks; i-- > 0;) if (tasks[i].func == 6 || tasks[i].func == 7) tell_issue(&tasks[i]);
  if (group_api) table->stop(group_api);
  group_api = NULL;
  n_tasks = 0;
}

// Asks the tuner for one all-reduce.
static int tuner_version(void) { return abi() == 1 ? 3 : abi() <= 4 ? 4 : 5; }
static void ask_tuner(Comm *c, const char *what) {
  float costs[21];
  int channels = 0;
  for (int i = 0; i < 21; i++) costs[i] = 10 + i;
  if (tuner_version() == 3)
    ((int (*)(void *, int, size_t, int, float *, int, int, int *))c->tuner[2])(
        c->tuner_ctx, 4, 1024, 1, costs, 7, 3, &channels);
  else
    ((int (*)(void *, int, size_t, int, float *, int, int, int, int *))c->tuner[2])(
        c->tuner_ctx, 4, 1024, 1, costs, 7, 3, 0, &channels);
  printf("%s, channels %d, cost %g\n", what, channels, costs[0]);
  fflush(stdout);
}

// What a rank brings to the operation of this number.
static void bring(Comm *c, int number, const void *data, size_t bytes) {
  char path[2][600];
  for (int i = 0; i < 2; i++)
    snprintf(path[i], 600, "%s/%s%016lx-%d-%d", getenv("FAKE_MEET"), i ? "" : ".", c->hash, number, c->rank);
  FILE *f = fopen(path[0], "w");
  fwrite(data, 1, bytes, f), fclose(f), rename(path[0], path[1]);
}
typedef struct { Comm *c; char *to; size_t bytes; int number, *stream; } Gather;
static void *gather(void *arg) {
  Gather g = *(Gather *)arg;
  for (int rank = 0; rank < g.c->ranks; rank++) {
    char path[600];
    snprintf(path, 600, "%s/%016lx-%d-%d", getenv("FAKE_MEET"), g.c->hash, g.number, rank);
    FILE *f;
    while (!(f = fopen(path, "r"))) {
      if (__atomic_load_n(&g.c->aborted, __ATOMIC_ACQUIRE)) return NULL;
      usleep(500);
    }
    fread(g.to + rank * g.bytes, 1, g.bytes, f), fclose(f);
  }
  __atomic_sub_fetch(g.stream, 1, __ATOMIC_ACQ_REL);
  return NULL;
}
static __thread Gather gathers[64];
static __thread int n_gathers;
static void gather_all(void) {
  pthread_t t[64];
  for (int i = 0; i < n_gathers; i++) {
    Gather *g = malloc(sizeof *g);
    *g = gathers[i];
    g->number = g->c->gathered++;
    bring(g->c, g->number, g->to + g->c->rank * g->bytes, g->bytes);
    __atomic_add_fetch(g->stream, 1, __ATOMIC_ACQ_REL);
    pthread_create(&t[i], NULL, gather, g);
  }
  for (int i = 0; i < n_gathers; i++) getenv("FAKE_CONNECT") ? pthread_join(t[i], NULL) : pthread_detach(t[i]);
  n_gathers = 0;
}

static int call(int func, size_t count, int type, int peer, Comm *c, void *stream) {
  if (!c || c->state != OK || count == 666) return BAD_ARGUMENT;
  if (count == 777) for (;;) pause();
  if (count == 0 || c->ranks == 1) return OK;
  if (func == 4 && c->tuner && getenv("FAKE_ASK")) ask_tuner(c, "asked");
  // It meets what other ranks do first.
  if (func == 4 && getenv("FAKE_MEET") && c->gathered == 0) bring(c, c->gathered++, FUNC, 64);
  Task *t = &tasks[n_tasks++ % 4096];
  *t = (Task){c, func, type, peer, count, NULL, stream};
  tell_call(t);
  if (depth == 0) issue_all();
  return OK;
}

#define STREAM Comm *c, void *stream
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, STREAM) { return call(4, n, t, 0, c, stream); }
__attribute__((weak)) int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, STREAM) {
  return call(0, n, t, root, c, stream);
}
// As in NCCL, by way of the public function.
int ncclBcast(void *b, size_t n, int t, int root, STREAM) { return ncclBroadcast(b, b, n, t, root, c, stream); }
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, STREAM) { return call(1, n, t, root, c, stream); }
int ncclAllGather(const void *s, void *r, size_t n, int t, STREAM) {
  if (getenv("FAKE_MEET") && (uintptr_t)stream > 0x10000) {
    if ((char *)s != (char *)r + c->rank * n * SIZE[t]) return BAD_ARGUMENT;
    gathers[n_gathers++] = (Gather){c, r, n * SIZE[t], 0, stream};
    if (depth == 0) gather_all();
  }
  return call(2, n, t, 0, c, stream);
}
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, STREAM) { return call(3, n, t, 0, c, stream); }
int ncclSend(const void *s, size_t n, int t, int peer, STREAM) { return call(6, n, t, peer, c, stream); }
int ncclRecv(void *r, size_t n, int t, int peer, STREAM) { return call(7, n, t, peer, c, stream); }
#ifndef OLD
int ncclAlltoAll(const void *s, void *r, size_t n, int t, STREAM) {
  depth++;
  int result = OK;
  for (int p = 0; p < c->ranks && result == OK; p++) {
    result = call(6, n, t, p, c, stream);
    if (result == OK) result = call(7, n, t, p, c, stream);
  }
  if (--depth == 0) issue_all();
  return result;
}
#endif

#ifndef OLD
// The job passes this very configuration.
#define CONFIG STREAM, const void *config
#define WITH(call) (config == (void *)0xc0f1 ? (call) : BAD_ARGUMENT)
int ncclAllReduceConfig(const void *s, void *r, size_t n, int t, int op, CONFIG) {
  return WITH(ncclAllReduce(s, r, n, t, op, c, stream));
}
int ncclBroadcastConfig(const void *s, void *r, size_t n, int t, int root, CONFIG) {
  return WITH(ncclBroadcast(s, r, n, t, root, c, stream));
}
int ncclReduceConfig(const void *s, void *r, size_t n, int t, int op, int root, CONFIG) {
  return WITH(ncclReduce(s, r, n, t, op, root, c, stream));
}
int ncclAllGatherConfig(const void *s, void *r, size_t n, int t, CONFIG) {
  return WITH(ncclAllGather(s, r, n, t, c, stream));
}
int ncclReduceScatterConfig(const void *s, void *r, size_t n, int t, int op, CONFIG) {
  return WITH(ncclReduceScatter(s, r, n, t, op, c, stream));
}
int ncclAlltoAllConfig(const void *s, void *r, size_t n, int t, CONFIG) {
  return WITH(ncclAlltoAll(s, r, n, t, c, stream));
}
int ncclGatherConfig(const void *s, void *r, size_t n, int t, int root, CONFIG) {
  return WITH(call(6, n, t, root, c, stream));
}
int ncclScatterConfig(const void *s, void *r, size_t n, int t, int root, CONFIG) {
  return WITH(call(7, n, t, root, c, stream));
}
#endif

#ifndef OLD
// They return what the job passed, so that it sees whether all of it came through.
int ncclPutSignal(const void *local, size_t n, int t, int peer, void *window, size_t at, int index, int context,
                  unsigned flags, STREAM) {
  return n == 100 && t == 7 && window == (void *)0x31 && at == 32 && index == 3 && context == 4 && flags == 0x80000005
             ? OK : BAD_ARGUMENT;
}
int ncclSignal(int peer, int index, int context, unsigned flags, STREAM) {
  return index == 3 && context == 4 && flags == 0x80000005 ? OK : BAD_ARGUMENT;
}
typedef struct { int signals, peer, index, context; } WaitDesc;
int ncclWaitSignal(int n, WaitDesc *of, STREAM) {
  return n > 0 && of[n - 1].signals == n + 1 && of[n - 1].context == 4 ? OK : BAD_ARGUMENT;
}
int ncclDevCommCreate(Comm *c, const void *requirements, void *made) {
  *(const void **)made = requirements;
  return c->ranks == 2 ? OK : BAD_ARGUMENT;
}
#endif

int ncclGetVersion(int *v) {
  static const int version[] = {21903, 22304, 22403, 22603, 22703, 22809, 22907, 23102};
  *v = version[abi()];
  return OK;
}
int ncclGetUniqueId(Id *id) {
  const char *given = getenv("FAKE_ID");
  for (int i = 0; i < 128; i++) id->bytes[i] = (char)(i * 37 + (given ? atoi(given) : getpid()));
  return OK;
}
static uint64_t hash(const char *s, int n) {
  uint64_t h = 5381;
  for (int i = 0; i < n; i++) h = ((h << 5) + h) ^ s[i];
  return h;
}

static Comm *make(uint64_t h, int ranks, int rank) {
  Comm *c = calloc(1, sizeof *c);
  *c = (Comm){.hash = h, .rank = rank, .ranks = ranks, .state = IN_PROGRESS};
  return c;
}
// The tuner of the version that this NCCL has: its init, and what it makes of one all-reduce.
static void tuner_init(Comm *c) {
  const char *name = getenv("NCCL_TUNER_PLUGIN");
  void *lib = name && abi() ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
  int version = tuner_version(), result;
  char symbol[] = "ncclTunerPlugin_v0", what[60];
  symbol[17] += version;
  void **tuner = lib ? dlsym(lib, symbol) : NULL;
  if (!tuner) return;
  if (version >= 5)
    result = ((int (*)(void **, uint64_t, size_t, size_t, Log, void *, void *))tuner[1])(
        &c->tuner_ctx, c->hash, c->ranks, nodes(), quiet, NULL, NULL);
  else
    result = ((int (*)(size_t, size_t, Log, void **))tuner[1])(c->ranks, nodes(), quiet, &c->tuner_ctx);
  c->tuner = tuner;
  snprintf(what, sizeof what, "tuner v%d: result %d", version, result);
  ask_tuner(c, what);
}

static void *connect_(void *arg) {
  Comm *c = arg;
  if (getenv("FAKE_HANG")) for (;;) pause();
  profiler_init(c);
  tuner_init(c);
  __atomic_store_n(&c->state, OK, __ATOMIC_RELEASE);
  return NULL;
}
static void *later(void *arg) {
  usleep(30000);
  return connect_(arg);
}

static int begin(Comm **place, Comm *c, int blocking) {
  if (depth > 0) {
    inits[n_inits].c = c, inits[n_inits++].place = place;
    return OK;
  }
  pthread_t t;
  if (!blocking) {
    *place = c;
    pthread_create(&t, NULL, later, c);
    pthread_detach(t);
    return IN_PROGRESS;
  }
  connect_(c);
  *place = c;
  return OK;
}

static int init_rank(Comm **place, int ranks, Id id, int rank, Config *config) {
  if (rank < 0 || rank >= ranks) {
    *place = NULL;
    return BAD_ARGUMENT;
  }
  return begin(place, make(hash(id.bytes, 128), ranks, rank), !config || config->blocking != 0);
}
int ncclCommInitRank(Comm **place, int ranks, Id id, int rank) { return init_rank(place, ranks, id, rank, NULL); }
int ncclCommInitRankConfig(Comm **place, int ranks, Id id, int rank, Config *config) {
  return init_rank(place, ranks, id, rank, config);
}

__attribute__((weak)) int ncclGroupStart(void) { return depth++, OK; }
__attribute__((weak)) int ncclGroupEnd(void) {
  if (depth == 0) return BAD_USAGE;
  if (--depth > 0) return OK;
  pthread_t t[64];
  // All at once, each on a thread of its own, the last first.
  for (int i = n_inits; i-- > 0;) pthread_create(&t[i], NULL, connect_, inits[i].c);
  for (int i = 0; i < n_inits; i++) pthread_join(t[i], NULL), *inits[i].place = inits[i].c;
  n_inits = 0;
  gather_all();
  issue_all();
  return OK;
}
int ncclGroupSimulateEnd(void *info) {
  if (depth == 0) return BAD_USAGE;
  if (--depth == 0) n_tasks = 0;
  return OK;
}

int ncclCommInitAll(Comm **comms, int n, const int *devices) {
  Id id;
  ncclGetUniqueId(&id);
  ncclGroupStart();
  for (int i = 0; i < n; i++) init_rank(&comms[i], n, id, i, NULL);
  return ncclGroupEnd();
}
int ncclCommSplit(Comm *c, int color, int key, Comm **place, Config *config) {
  struct { uint64_t h; int n, color; } seed = {c->hash, c->splits++, color};
  *place = NULL;
  if (color < 0) return OK;
  return begin(place, make(hash((char *)&seed, sizeof seed), c->ranks / 2, c->rank / 2), 1);
}
int ncclCommGetAsyncError(Comm *c, int *result) { return *result = __atomic_load_n(&c->state, __ATOMIC_ACQUIRE), OK; }
// As NCCL 2.19 does: by the public function, which a preloaded library stands in the place of.
static int ready(Comm *c) {
  int state = BAD_ARGUMENT;
  return ncclCommGetAsyncError(c, &state) == OK && state == OK;
}
int ncclCommUserRank(Comm *c, int *rank) { return ready(c) ? (*rank = c->rank, OK) : BAD_ARGUMENT; }
int ncclCommCount(Comm *c, int *n) { return ready(c) ? (*n = c->ranks, OK) : BAD_ARGUMENT; }
int ncclCommCuDevice(Comm *c, int *d) { return ready(c) ? (*d = c->rank, OK) : BAD_ARGUMENT; }
int ncclCommDestroy(Comm *c) {
  if (table) table->finalize(c->ctx);
  free(c);
  return OK;
}
int ncclCommAbort(Comm *c) {
  // A gather that waits for other ranks still looks at it.
  __atomic_store_n(&c->aborted, 1, __ATOMIC_RELEASE);
  if (getenv("FAKE_MEET")) return printf("aborted\n"), fflush(stdout), OK;
  return ncclCommDestroy(c);
}
uint64_t fake_hash(Comm *c) { return c->hash; }
int fake_mask(void) { return mask; }
