/* A libcuda.so.1 (-DFAKE_CUDA) and a libnccl.so.2 (-DFAKE_NCCL) over the host's memory, for tests without a GPU.
 *
 * Memory, streams and communicators lie in one arena, which several processes share where FAKE_ARENA names a file.
 * An operation is posted by each rank; the last one to come does the arithmetic for all. Streams are busy until
 * then. It is real work on real data: what a test checks is what a GPU would have to give.
 *
 *   FAKE_GPUS=N              devices (4)
 *   FAKE_FAIL=CALL[:N]       that function fails, from its Nth call on (1)
 *   FAKE_HANG=FUNC[:RANK]    allreduce, ...: this rank (0) posts none, its stream stays busy
 *   FAKE_BLOCK=CALL[:RANK]   that NCCL function does not come back on this rank (0) before an abort
 *   FAKE_ASYNC=1             a communicator reports an error while its stream is busy
 *   FAKE_LOG=FILE            a line with the plugin's variables, and whether it loads, for each id
 *   FAKE_WRONG=RANK          one element of this rank's every result is wrong
 *   FAKE_TUNING=1            operations take a time that depends on algorithm, protocol and channels, and a tuner
 *                            (NCCL_TUNER_PLUGIN) is asked about each: see tuned(); "slow": any tuner costs small ones time
 *   FAKE_PROFILER=1          a profiler plugin (NCCL_PROFILER_PLUGIN, ABI v5) gets the events of collectives: see report()
 *   FAKE_EVENTS=FILE         a line for each freed communicator with the events that this process has started
 *   FAKE_VERSION=N           NCCL's version code (22809)
 *
 * A process that ends with a module still loaded says so on stderr.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ARENA ((char *)0x200000000000)
#define ARENA_BYTES (1ull << 30)
#define RANKS 16
#define DEPTH 64 /* operations that a rank may be ahead of the slowest */

typedef struct Node {
    void (*run)(struct Node *);
    struct Node *next;
    void *comm, *stream;
    uint64_t send, recv;
    size_t count;
    int kind, type, op, peer;
} Node;

typedef struct {
    atomic_int busy;
    int capturing;
    Node *first, **last;
} Stream;

typedef struct {
    atomic_int ready, lock;
    atomic_ullong top;
    atomic_ullong worlds;
} Arena;

static int named(const char *variable, const char *name, int *number) {
    const char *v = getenv(variable);
    size_t n = strlen(name);
    if (!v || strncmp(v, name, n) || (v[n] && v[n] != ':')) return 0;
    if (v[n]) *number = atoi(v + n + 1);
    return 1;
}

static int fails(const char *name) {
    static atomic_int calls;
    int from = 1;
    return named("FAKE_FAIL", name, &from) && atomic_fetch_add(&calls, 1) + 1 >= from;
}

#ifdef FAKE_CUDA

static Arena *arena;

Arena *fake_arena(void) { return arena; }

void *fake_alloc(size_t bytes) {
    unsigned long long at = atomic_load(&arena->top), size = (bytes + 511) / 512 * 512;
    do {
        if (at + size > ARENA_BYTES) return 0;
    } while (!atomic_compare_exchange_weak(&arena->top, &at, at + size));
    return ARENA + at;
}

static void open_arena(void) {
    const char *file = getenv("FAKE_ARENA");
    int fd = file ? open(file, O_RDWR | O_CREAT, 0600) : -1;
    if (fd >= 0 && ftruncate(fd, ARENA_BYTES)) abort();
    arena = mmap(ARENA, ARENA_BYTES, PROT_READ | PROT_WRITE,
                 MAP_FIXED_NOREPLACE | MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), fd, 0);
    if (arena != (void *)ARENA) abort();
    unsigned long long zero = 0;
    atomic_compare_exchange_strong(&arena->top, &zero, 4096);
}

#define FAILS(name) \
    if (fails(#name)) return 719

int cuInit(unsigned flags) {
    FAILS(cuInit);
    if (!arena) open_arena();
    return flags ? 1 : 0;
}
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) {
    const char *v = getenv("FAKE_GPUS");
    *n = v ? atoi(v) : 4;
    return 0;
}
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetName(char *t, int room, int d) { snprintf(t, room, "Fake GPU"); return d < 0; }
int cuDeviceGetPCIBusId(char *t, int room, int d) { snprintf(t, room, "0000:%02X:00.0", 0x1a + d); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) {
    FAILS(cuDevicePrimaryCtxRetain);
    *c = (void *)(uintptr_t)(d + 1);
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int d) { return d < 0; }
static _Thread_local void *current;
int cuCtxSetCurrent(void *c) { current = c; return c ? 0 : 201; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 1 << 20; *t = ARENA_BYTES; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
    FAILS(cuMemAlloc);
    if (!current) return 201;
    *p = (uint64_t)fake_alloc(n);
    return *p ? 0 : 2;
}
int cuMemFree_v2(uint64_t p) { return !p; }
int cuMemAllocHost_v2(void **p, size_t n) { *p = malloc(n); return *p ? 0 : 2; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t d, const void *s, size_t n, void *st) { memcpy((void *)d, s, n); return !st; }
int cuMemcpyDtoHAsync_v2(void *d, uint64_t s, size_t n, void *st) { memcpy(d, (void *)s, n); return !st; }
int cuMemcpyDtoDAsync_v2(uint64_t d, uint64_t s, size_t n, void *st) { memcpy((void *)d, (void *)s, n); return !st; }
int cuMemsetD8Async(uint64_t d, unsigned char v, size_t n, void *st) { memset((void *)d, v, n); return !st; }
int cuStreamCreate(void **s, unsigned flags) {
    Stream *made = fake_alloc(sizeof(Stream));
    if (!made) return 2;
    memset(made, 0, sizeof *made);
    *s = made;
    return flags != 1;
}
int cuStreamDestroy_v2(Stream *s) { return !s; }
int cuStreamQuery(Stream *s) {
    FAILS(cuStreamQuery);
    return atomic_load(&s->busy) > 0 ? 600 : 0;
}
int cuStreamSynchronize(Stream *s) {
    while (atomic_load(&s->busy) > 0) sched_yield();
    return 0;
}
int cuEventCreate(void **e, unsigned flags) { *e = calloc(1, sizeof(struct timespec)); return flags != 0; }
int cuEventRecord(struct timespec *e, Stream *s) { clock_gettime(CLOCK_MONOTONIC, e); return !s; }
int cuEventElapsedTime(float *ms, struct timespec *a, struct timespec *b) {
    *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6;
    return 0;
}
int cuEventDestroy_v2(void *e) { free(e); return 0; }
int cuStreamBeginCapture_v2(Stream *s, int mode) {
    s->capturing = 1;
    s->first = 0;
    s->last = &s->first;
    return mode != 1;
}
int cuStreamEndCapture(Stream *s, Node **graph) {
    if (!s->capturing) return 401;
    s->capturing = 0;
    *graph = s->first;
    return 0;
}
int cuGraphInstantiateWithFlags(Node **exec, Node *graph, unsigned long long flags) {
    *exec = graph;
    return flags != 0 || !graph;
}
int cuGraphLaunch(Node *exec, Stream *s) {
    FAILS(cuGraphLaunch);
    for (Node *n = exec; n; n = n->next) n->run(n);
    return !s;
}
int cuGraphExecDestroy(Node *g) { return !g; }
int cuGraphDestroy(Node *g) {
    while (g) {
        Node *next = g->next;
        free(g);
        g = next;
    }
    return 0;
}
/* What is recorded is told as one kernel, as NCCL 2.28 launches them for large sizes, between a wait and a record; where
 * FAKE_NODES says "two", as two kernels, where it says "host" as one with a host function, else as one with a memset. */
static int node_types[] = {6, 0, 7, -1};
int cuGraphGetNodes(Node *g, int **nodes, size_t *count) {
    FAILS(cuGraphGetNodes);
    const char *v = getenv("FAKE_NODES");
    node_types[3] = !v ? -1 : !strcmp(v, "two") ? 0 : !strcmp(v, "host") ? 3 : 2;
    size_t all = v ? 4 : 3;
    if (nodes && *count < all) return 1;
    for (size_t i = 0; nodes && i < all; i++) nodes[i] = &node_types[i];
    *count = all;
    return !g;
}
int cuGraphNodeGetType(int *node, int *type) {
    FAILS(cuGraphNodeGetType);
    *type = *node;
    return 0;
}
typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
} NodeParams;
static int nccl_kernel(void) { return 0; }
int cuGraphKernelNodeGetParams(int *node, NodeParams *p) {
    FAILS(cuGraphKernelNodeGetParams);
    *p = (NodeParams){nccl_kernel, {24, 1, 1}, {544, 1, 1}, 82240, 0, 0};
    return *node != 0;
}
int cuGraphKernelNodeGetAttribute(int *node, int id, unsigned value[16]) {
    FAILS(cuGraphKernelNodeGetAttribute);
    value[0] = 4;
    value[1] = value[2] = 1;
    return *node != 0 || id != 4;
}
int cuFuncGetAttribute(int *value, int id, int (*f)(void)) {
    FAILS(cuFuncGetAttribute);
    *value = 21568;
    return id != 1 || f != nccl_kernel;
}
int cuStreamWaitEvent(Stream *s, struct timespec *e, unsigned flags) {
    FAILS(cuStreamWaitEvent);
    return !s || !e || flags;
}
/* A module is PTX text; its one kernel takes NCCL's arguments and does nothing. */
typedef struct { char entry[32]; } Module;
static atomic_int modules;
static int no_kernel(void) { return 0; }
int cuModuleLoadData(Module **m, const char *ptx) {
    FAILS(cuModuleLoadData);
    const char *at = strstr(ptx, ".entry ");
    if (!current) return 201;
    if (strncmp(ptx, ".version ", 9) || !strstr(ptx, "\n.target sm_") || !at) return 218;
    *m = calloc(1, sizeof **m);
    if (!*m || sscanf(at, ".entry %31[a-z_](.param .align 8 .b8 arguments[4096])", (*m)->entry) != 1) return 218;
    atomic_fetch_add(&modules, 1);
    return 0;
}
int cuModuleGetFunction(int (**f)(void), Module *m, const char *name) {
    FAILS(cuModuleGetFunction);
    *f = no_kernel;
    return strcmp(m->entry, name) ? 500 : 0;
}
static int most_shared;
int cuFuncSetAttribute(int (*f)(void), int id, int value) {
    FAILS(cuFuncSetAttribute);
    most_shared = value;
    return f != no_kernel || id != 8;
}
typedef struct {
    unsigned grid[3], block[3], shared;
    Stream *stream;
    struct { int id, pad; unsigned value[16]; } *attributes;
    unsigned count;
} LaunchConfig;
int cuLaunchKernelEx(const LaunchConfig *c, int (*f)(void), void **parameters, void **extra) {
    FAILS(cuLaunchKernelEx);
    if (f != no_kernel || !parameters || !parameters[0] || extra || !c->stream) return 1;
    /* As the node of the graph said. */
    if (c->grid[0] != 24 || c->block[0] != 544 || c->shared != 82240 + 21568 || (int)c->shared > most_shared) return 1;
    return c->count != 1 || c->attributes->id != 4 || c->attributes->value[0] != 4;
}
int cuModuleUnload(Module *m) {
    if (!current) return 201;
    free(m);
    atomic_fetch_sub(&modules, 1);
    return 0;
}
__attribute__((destructor)) static void left_over(void) {
    if (atomic_load(&modules)) fprintf(stderr, "fake driver: %d modules are left\n", atomic_load(&modules));
}
int cuGetErrorName(int code, const char **t) {
    *t = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return 0;
}
int cuGetErrorString(int code, const char **t) {
    *t = code == 719 ? "unspecified launch failure" : "a made-up error";
    return 0;
}

#else /* FAKE_NCCL */

extern Arena *fake_arena(void);
extern void *fake_alloc(size_t bytes);

enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
static const char *const NAMES[] = {"allreduce", "broadcast", "reduce", "allgather", "reducescatter", "send", "recv"};

typedef struct {
    Stream *stream;
    uint64_t send, recv;
    size_t count;
    int kind, type, op, root, us;
} Post;

typedef struct {
    uint64_t done, posted[RANKS];
    Post at[RANKS][DEPTH];
} Lane;

typedef struct World {
    unsigned long long id;
    int ranks;
    atomic_int joined, aborted, lock;
    Lane coll;
    struct { uint64_t done, sent, received; Post send[DEPTH], recv[DEPTH]; } pair[RANKS][RANKS];
} World;

typedef struct {
    World *world;
    int rank;
    atomic_int busy; /* posted on a stream and not done */
    Stream *stream;
    const struct Tuner *tuner;
    void *tuner_context;
    const struct Profiler *profiler;
    void *profiler_context;
} Comm;

typedef struct Tuner {
    const char *name;
    int (*init)(void **, uint64_t, size_t, size_t, void *, void *, void *);
    int (*get_coll_info)(void *, int, size_t, int, float *, int, int, int, int *);
    int (*finalize)(void *);
} Tuner;

typedef struct Profiler {
    const char *name;
    int (*init)(void **, uint64_t, int *, const char *, int, int, int, void *);
    int (*start)(void *, void **, void *);
    int (*stop)(void *);
    int (*record)(void *, int, void *);
    int (*finalize)(void *);
} Profiler;

/* The descriptor of ABI v5: an event's type, parent and rank, and the arms of a call and of a collective. */
typedef struct {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct { const char *func; size_t count; const char *datatype; int root; void *stream; char captured; } call;
        struct {
            uint64_t seq;
            const char *func;
            const void *send;
            void *recv;
            size_t count;
            int root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algo, *proto;
            void *group;
        } coll;
    } arm;
} Descriptor;

typedef struct { unsigned long long number; char rest[120]; } Id;

static _Thread_local int depth;
static _Thread_local World *entering;

static void take(atomic_int *l) { while (atomic_exchange(l, 1)) sched_yield(); }
static void give(atomic_int *l) { atomic_store(l, 0); }

static int blocks(const char *name, Comm *c) {
    int rank = 0;
    if (!named("FAKE_BLOCK", name, &rank) || c->rank != rank) return 0;
    while (!atomic_load(&c->world->aborted)) usleep(1000);
    return 1;
}

static size_t width(int type) { return (const size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }

/* Opens the tuner for a communicator whose ranks are all there, as NCCL 2.28 does. Those of one thread's group have none:
 * the plugin waits for the other ranks, which NCCL opens on threads of their own. */
static int open_tuner(Comm *c, unsigned long long id) {
    const char *name = getenv("NCCL_TUNER_PLUGIN");
    static int domains[3] = {1, 8, 8};
    static double constants[144];
    void *library = name && !depth ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : 0;
    c->tuner = library ? dlsym(library, "ncclTunerPlugin_v5") : 0;
    if (!c->tuner) return 0;
    return c->tuner->init(&c->tuner_context, id, c->world->ranks, 1, 0, domains, constants);
}

enum { COLL = 2, COLL_API = 0x200, CALLS_WITH = 0x72da, COLLS_WITH = 0xda };

/* One for all communicators, as NCCL has it: plugins get its address. */
static int event_mask;
static atomic_ullong events_started;

/* Opens the profiler as NCCL 2.28 does, at each communicator. */
static int open_profiler(Comm *c, unsigned long long id) {
    const char *name = getenv("NCCL_PROFILER_PLUGIN");
    void *library = name && getenv("FAKE_PROFILER") ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : 0;
    c->profiler = library ? dlsym(library, "ncclProfiler_v5") : 0;
    if (!c->profiler) return 0;
    return c->profiler->init(&c->profiler_context, id, &event_mask, 0, 1, c->world->ranks, c->rank, 0);
}

static void close_profiler(Comm *c) {
    const char *log = getenv("FAKE_EVENTS");
    if (c->profiler) c->profiler->finalize(c->profiler_context);
    FILE *f = log ? fopen(log, "a") : 0;
    if (f) fprintf(f, "%llu\n", (unsigned long long)atomic_load(&events_started)), fclose(f);
}

static void *start(Comm *c, Descriptor *d) {
    void *handle = (void *)-1;
    atomic_fetch_add(&events_started, 1);
    c->profiler->start(c->profiler_context, &handle, d);
    return handle;
}

/* Reports a collective: its call and, below it, the collective. The mask is that of the call's begin. As NCCL 2.28 does,
 * it stops the last call's handle again where the mask has become 0, and passes it as a parent. */
static void report(Comm *c, int kind, uint64_t send, uint64_t recv, size_t count, int root, Stream *s) {
    static _Thread_local void *call;
    static const char *const funcs[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter"};
    int mask = __atomic_load_n(&event_mask, __ATOMIC_RELAXED);
    void *coll = 0;
    if (!c->profiler || kind >= SEND) return;
    Descriptor d = {COLL, call, c->rank, {.coll = {0, funcs[kind], (void *)send, (void *)recv, count, root, "ncclFloat32", 1, 1, "RING", "LL", 0}}};
    if (mask & CALLS_WITH) {
        Descriptor api = {COLL_API, 0, c->rank, {.call = {funcs[kind], count, "ncclFloat32", root, s, 0}}};
        d.parent = call = start(c, &api);
    }
    if (mask & COLLS_WITH) coll = start(c, &d);
    if (coll) c->profiler->stop(coll);
    if (call) c->profiler->stop(call);
}

/* How long an operation takes, in us. NCCL's own choice is TREE/LL. From 32 KiB on RING/LL128 is faster, and RING/SIMPLE
 * with 16 channels still more; a communicator has 8, and more where NCCL_MIN_NCHANNELS says so. */
static int tuned(Comm *c, int kind, size_t bytes) {
    static const int numbers[] = {4, 0, 1, 2, 3};
    const char *raised = getenv("NCCL_MIN_NCHANNELS");
    int most = raised && atoi(raised) > 8 ? atoi(raised) : 8, channels = 0, best = -1;
    float costs[21];
    if (!getenv("FAKE_TUNING")) return 0;
    for (int i = 0; i < 21; i++) costs[i] = i == 0 ? 10 : i == 4 ? 11 : i == 5 ? 12 : -1;
    if (c->tuner) c->tuner->get_coll_info(c->tuner_context, numbers[kind], bytes, 1, costs, 7, 3, 0, &channels);
    for (int i = 0; i < 21; i++)
        if (costs[i] >= 0 && (best < 0 || costs[i] < costs[best])) best = i;
    if (channels <= 0 || channels > most) channels = most;
    if (bytes < 32 << 10 && c->tuner && !strcmp(getenv("FAKE_TUNING"), "slow")) return 3000;
    if (bytes >= 32 << 10 && best == 5 && channels >= 16) return 400;
    if (bytes >= 32 << 10 && best == 4) return 1200;
    return 2000;
}

static double get(const void *p, int type, size_t i) {
    switch (type) {
    case 0: return ((const int8_t *)p)[i];
    case 1: return ((const uint8_t *)p)[i];
    case 2: return ((const int32_t *)p)[i];
    case 3: return ((const uint32_t *)p)[i];
    case 4: return ((const int64_t *)p)[i];
    case 5: return ((const uint64_t *)p)[i];
    case 6: return ((const _Float16 *)p)[i];
    case 7: return ((const float *)p)[i];
    case 8: return ((const double *)p)[i];
    default: {
        uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
    }
}

static void put(void *p, int type, size_t i, double v) {
    switch (type) {
    case 0: ((int8_t *)p)[i] = v; break;
    case 1: ((uint8_t *)p)[i] = v; break;
    case 2: ((int32_t *)p)[i] = v; break;
    case 3: ((uint32_t *)p)[i] = v; break;
    case 4: ((int64_t *)p)[i] = v; break;
    case 5: ((uint64_t *)p)[i] = v; break;
    case 6: ((_Float16 *)p)[i] = v; break;
    case 7: ((float *)p)[i] = v; break;
    case 8: ((double *)p)[i] = v; break;
    default: {
        float f = v;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        ((uint16_t *)p)[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    }
}

static void spoil(int rank, void *p, size_t bytes) {
    const char *v = getenv("FAKE_WRONG");
    if (v && atoi(v) == rank && bytes) ((char *)p)[bytes / 2] ^= 0x55;
}

/* All ranks have posted: one operation, for all of them. */
static void perform(World *w, Post **p) {
    int n = w->ranks, kind = p[0]->kind, type = p[0]->type;
    size_t each = p[0]->count, bytes = each * width(type), total = bytes * (kind == ALL_GATHER || kind == REDUCE_SCATTER ? n : 1);
    char *out = malloc(total + 8);
    if (p[0]->us) usleep(p[0]->us);
    if (kind == BROADCAST) {
        memcpy(out, (void *)p[p[0]->root]->send, bytes);
    } else if (kind == ALL_GATHER) {
        for (int r = 0; r < n; r++) memcpy(out + r * bytes, (void *)p[r]->send, bytes);
    } else {
        for (size_t i = 0; i < total / width(type); i++) {
            double v = get((void *)p[0]->send, type, i);
            for (int r = 1; r < n; r++) {
                double x = get((void *)p[r]->send, type, i);
                switch (p[0]->op) {
                case 1: v *= x; break;
                case 2: v = x > v ? x : v; break;
                case 3: v = x < v ? x : v; break;
                default: v += x;
                }
            }
            put(out, type, i, p[0]->op == 4 ? v / n : v);
        }
    }
    for (int r = 0; r < n; r++) {
        if (kind == REDUCE && r != p[0]->root) continue;
        size_t from = kind == REDUCE_SCATTER ? r * bytes : 0, length = kind == REDUCE_SCATTER ? bytes : total;
        memcpy((void *)p[r]->recv, out + from, length);
        spoil(r, (void *)p[r]->recv, length);
    }
    free(out);
}

static void progress(World *w) {
    for (;;) {
        Post *p[RANKS];
        Lane *l = &w->coll;
        int all = 1;
        for (int r = 0; r < w->ranks; r++) {
            all &= l->posted[r] > l->done;
            p[r] = &l->at[r][l->done % DEPTH];
        }
        if (!all) break;
        perform(w, p);
        l->done++;
        for (int r = 0; r < w->ranks; r++) atomic_fetch_sub(&p[r]->stream->busy, 1);
    }
}

static void post(Node *n) {
    Comm *c = n->comm;
    World *w = c->world;
    Stream *s = n->stream;
    int hang = 0;
    atomic_fetch_add(&s->busy, 1);
    c->stream = s;
    if (named("FAKE_HANG", NAMES[n->kind], &hang) && hang == c->rank) return;
    int each = n->kind == ALL_GATHER || n->kind == REDUCE_SCATTER ? w->ranks : 1;
    int us = n->kind < SEND ? tuned(c, n->kind, n->count * width(n->type) * each) : 0;
    Post made = {s, n->send, n->recv, n->count, n->kind, n->type, n->op, n->peer, us};
    for (;;) {
        take(&w->lock);
        if (atomic_load(&w->aborted)) break;
        if (n->kind < SEND) {
            uint64_t *posted = &w->coll.posted[c->rank];
            if (*posted - w->coll.done < DEPTH) {
                w->coll.at[c->rank][(*posted)++ % DEPTH] = made;
                progress(w);
                break;
            }
        } else {
            int from = n->kind == SEND ? c->rank : n->peer, to = n->kind == SEND ? n->peer : c->rank;
            __typeof__(&w->pair[0][0]) pair = &w->pair[from][to];
            uint64_t *mine = n->kind == SEND ? &pair->sent : &pair->received;
            if (*mine - pair->done < DEPTH) {
                (n->kind == SEND ? pair->send : pair->recv)[(*mine)++ % DEPTH] = made;
                while (pair->done < pair->sent && pair->done < pair->received) {
                    Post *a = &pair->send[pair->done % DEPTH], *b = &pair->recv[pair->done % DEPTH];
                    size_t bytes = a->count * width(a->type);
                    memcpy((void *)b->recv, (void *)a->send, bytes);
                    spoil(to, (void *)b->recv, bytes);
                    pair->done++;
                    atomic_fetch_sub(&a->stream->busy, 1);
                    atomic_fetch_sub(&b->stream->busy, 1);
                }
                break;
            }
        }
        give(&w->lock);
        sched_yield();
    }
    give(&w->lock);
}

static int issue(int kind, uint64_t send, uint64_t recv, size_t count, int type, int op, int peer, Comm *c, Stream *s) {
    Node n = {post, 0, c, s, send, recv, count, kind, type, op, peer};
    if (!c || !s || type < 0 || type > 9) return 4;
    report(c, kind, send, recv, count, peer, s);
    if (s->capturing) {
        *s->last = malloc(sizeof n);
        **s->last = n;
        s->last = &(*s->last)->next;
    } else {
        post(&n);
    }
    return 0;
}

#define FAILS(name) \
    if (fails(#name)) return 2

int ncclGetVersion(int *v) {
    const char *version = getenv("FAKE_VERSION");
    *v = version ? atoi(version) : 22809;
    return 0;
}
const char *ncclGetErrorString(int code) { return code == 2 ? "unhandled system error" : code == 6 ? "remote process exited or there was a network error" : "some other result"; }
const char *ncclGetLastError(void *c) { return c || getenv("FAKE_FAIL") ? "the fake was told to fail" : ""; }

int ncclGetUniqueId(Id *id) {
    FAILS(ncclGetUniqueId);
    const char *log = getenv("FAKE_LOG"), *plugin = getenv("NCCL_PROFILER_PLUGIN");
    if (log) {
        const char *detail = getenv("RINGWATCH_DETAIL"), *mask = getenv("RINGWATCH_NULL_MASK"), *dir = getenv("RINGWATCH_DIR");
        void *library = plugin ? dlopen(plugin, RTLD_NOW) : 0;
        struct { const char *name; int (*init)(void **, uint64_t, int *, const char *, int, int, int, void *); } *table =
            library ? dlsym(library, "ncclProfiler_v5") : 0;
        void *context;
        int events;
        if (table) table->init(&context, 1, &events, "fake", 1, 1, 0, 0);
        FILE *f = fopen(log, "a");
        fprintf(f, "%s %s %s %s %s\n", plugin ? plugin : "-", table ? "loads" : "-",
                detail ? detail : "-", mask ? mask : "-", dir ? "dir" : "-");
        fclose(f);
    }
    memset(id, 0, sizeof *id);
    id->number = ((unsigned long long)getpid() << 32) + atomic_fetch_add(&fake_arena()->worlds, 1) + 1;
    return 0;
}

static World *find(unsigned long long id, int ranks) {
    Arena *a = fake_arena();
    /* The list of worlds begins in the arena's first page. */
    World **slots = (World **)(a + 1), *w = 0;
    take(&a->lock);
    for (int i = 0; i < 400; i++) {
        if (slots[i] && slots[i]->id != id) continue;
        if (!slots[i]) {
            World *made = fake_alloc(sizeof *made);
            memset(made, 0, sizeof *made);
            made->id = id;
            made->ranks = ranks;
            slots[i] = made;
        }
        w = slots[i];
        break;
    }
    give(&a->lock);
    return w;
}

static int entered(World *w) {
    while (atomic_load(&w->joined) < w->ranks) usleep(200);
    return 0;
}

int ncclCommInitRank(Comm **out, int ranks, Id id, int rank) {
    FAILS(ncclCommInitRank);
    int missing = 0;
    Comm *c = calloc(1, sizeof *c);
    c->world = find(id.number, ranks);
    c->rank = rank;
    if (!c->world || ranks > RANKS) return 3;
    *out = c;
    if (!(named("FAKE_BLOCK", "ncclCommInitRank", &missing) && missing == rank)) atomic_fetch_add(&c->world->joined, 1);
    if (open_profiler(c, id.number)) return 5;
    if (depth) { entering = c->world; return 0; }
    return entered(c->world) || open_tuner(c, id.number) ? 5 : 0;
}
int ncclGroupStart(void) { FAILS(ncclGroupStart); depth++; return 0; }
int ncclGroupEnd(void) {
    depth--;
    World *w = entering;
    if (!depth && w) {
        entering = 0;
        entered(w);
    }
    FAILS(ncclGroupEnd);
    return 0;
}
int ncclCommDestroy(Comm *c) {
    FAILS(ncclCommDestroy);
    if (c->tuner) c->tuner->finalize(c->tuner_context);
    close_profiler(c);
    free(c);
    return 0;
}
int ncclCommAbort(Comm *c) {
    FAILS(ncclCommAbort);
    take(&c->world->lock);
    atomic_store(&c->world->aborted, 1);
    if (c->stream) atomic_store(&c->stream->busy, 0);
    give(&c->world->lock);
    if (getenv("FAKE_TRACE")) fprintf(stderr, "abort of rank %d\n", c->rank);
    return 0;
}
int ncclCommGetAsyncError(Comm *c, int *e) {
    *e = getenv("FAKE_ASYNC") && c->rank == 1 ? 6 : 0;
    return 0;
}

#define CALL(name, kind, send, recv, type, op, peer) \
    FAILS(name); \
    if (blocks(#name, c)) return 3; \
    return issue(kind, send, recv, n, type, op, peer, c, s)

int ncclAllReduce(uint64_t a, uint64_t b, size_t n, int t, int op, Comm *c, Stream *s) { CALL(ncclAllReduce, ALL_REDUCE, a, b, t, op, 0); }
int ncclBroadcast(uint64_t a, uint64_t b, size_t n, int t, int root, Comm *c, Stream *s) { CALL(ncclBroadcast, BROADCAST, a, b, t, 0, root); }
int ncclReduce(uint64_t a, uint64_t b, size_t n, int t, int op, int root, Comm *c, Stream *s) { CALL(ncclReduce, REDUCE, a, b, t, op, root); }
int ncclAllGather(uint64_t a, uint64_t b, size_t n, int t, Comm *c, Stream *s) { CALL(ncclAllGather, ALL_GATHER, a, b, t, 0, 0); }
int ncclReduceScatter(uint64_t a, uint64_t b, size_t n, int t, int op, Comm *c, Stream *s) { CALL(ncclReduceScatter, REDUCE_SCATTER, a, b, t, op, 0); }
int ncclSend(uint64_t a, size_t n, int t, int peer, Comm *c, Stream *s) { CALL(ncclSend, SEND, a, 0, t, 0, peer); }
int ncclRecv(uint64_t b, size_t n, int t, int peer, Comm *c, Stream *s) { CALL(ncclRecv, RECV, 0, b, t, 0, peer); }

#endif
