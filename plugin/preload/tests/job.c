// A job for the fake NCCL: each scenario by its name. Every result is checked to be what the fake returns, so
// that a preloaded library which changes one is found out.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;
typedef struct Comm Comm;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;
int ncclGetUniqueId(Id *), ncclCommInitRank(Comm **, int, Id, int);
int ncclCommInitRankConfig(Comm **, int, Id, int, Config *), ncclCommInitAll(Comm **, int, const int *);
int ncclCommSplit(Comm *, int, int, Comm **, Config *), ncclCommGetAsyncError(Comm *, int *);
int ncclCommDestroy(Comm *), ncclCommAbort(Comm *), ncclGroupStart(void), ncclGroupEnd(void);
int ncclGroupSimulateEnd(void *);
int ncclAllReduce(const void *, void *, size_t, int, int, Comm *, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, Comm *, void *);
int ncclBcast(void *, size_t, int, int, Comm *, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, Comm *, void *);
int ncclAllGather(const void *, void *, size_t, int, Comm *, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, Comm *, void *);
int ncclSend(const void *, size_t, int, int, Comm *, void *), ncclRecv(void *, size_t, int, int, Comm *, void *);
int ncclAlltoAll(const void *, void *, size_t, int, Comm *, void *) __attribute__((weak));
int ncclScatter(const void *, void *, size_t, int, int, Comm *, void *) __attribute__((weak));
#define WEAK __attribute__((weak))
int ncclAllReduceConfig(const void *, void *, size_t, int, int, Comm *, void *, const void *) WEAK;
int ncclBroadcastConfig(const void *, void *, size_t, int, int, Comm *, void *, const void *) WEAK;
int ncclReduceConfig(const void *, void *, size_t, int, int, int, Comm *, void *, const void *) WEAK;
int ncclAllGatherConfig(const void *, void *, size_t, int, Comm *, void *, const void *) WEAK;
int ncclReduceScatterConfig(const void *, void *, size_t, int, int, Comm *, void *, const void *) WEAK;
int ncclAlltoAllConfig(const void *, void *, size_t, int, Comm *, void *, const void *) WEAK;
int ncclGatherConfig(const void *, void *, size_t, int, int, Comm *, void *, const void *) WEAK;
int ncclScatterConfig(const void *, void *, size_t, int, int, Comm *, void *, const void *) WEAK;
typedef struct { int signals, peer, index, context; } WaitDesc;
int ncclPutSignal(const void *, size_t, int, int, void *, size_t, int, int, unsigned, Comm *, void *) WEAK;
int ncclSignal(int, int, int, unsigned, Comm *, void *) WEAK, ncclWaitSignal(int, WaitDesc *, Comm *, void *) WEAK;
int ncclDevCommCreate(Comm *, const void *, void *) WEAK;
uint64_t fake_hash(Comm *);
int fake_mask(void);

enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16 };
static char a[8], b[8];
#define S ((void *)0x5150)
#define WANT(call, result) do { int r = (call); if (r != (result)) { \
  fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #call, r); exit(9); } } while (0)

static Comm *init(int ranks, int rank) {
  Id id;
  Comm *c = NULL;
  ncclGetUniqueId(&id);
  id.bytes[5] += ranks * 3;
  WANT(ncclCommInitRank(&c, ranks, id, rank), 0);
  return c;
}

static void every(Comm *c) {
  WANT(ncclAllReduce(a, b, 1024, F32, 0, c, S), 0);
  WANT(ncclAllReduce(a, a, 1024, F32, 3, c, S), 0);
  WANT(ncclAllReduce(a, b, 1024, BF16, 7, c, S), 0);
  WANT(ncclBroadcast(a, b, 100, F32, 1, c, S), 0);
  WANT(ncclBcast(a, 200, F64, 0, c, S), 0);
  WANT(ncclReduce(a, b, 300, F16, 2, 1, c, S), 0);
  WANT(ncclAllGather(a, b, 400, U8, c, S), 0);
  WANT(ncclReduceScatter(a, b, 500, F32, 4, c, S), 0);
  WANT(ncclAllReduce(a, b, 666, F32, 0, c, S), 4);
  WANT(ncclAllReduce(a, b, 0, F32, 0, c, S), 0);
  WANT(ncclGroupStart(), 0);
  for (int i = 0; i < 3; i++) WANT(ncclAllReduce(a, b, 64, F32, i, c, S), 0);
  WANT(ncclGroupStart(), 0);
  WANT(ncclSend(a, 10, F32, 1, c, S), 0);
  WANT(ncclSend(a, 11, F32, 1, c, S), 0);
  WANT(ncclRecv(b, 12, F32, 1, c, S), 0);
  WANT(ncclGroupEnd(), 0);
  WANT(ncclGroupEnd(), 0);
  WANT(ncclGroupEnd(), 5);
  WANT(ncclGroupStart(), 0);
  WANT(ncclAllReduce(a, b, 9999, F32, 0, c, S), 0);
  WANT(ncclGroupSimulateEnd(NULL), 0);
  WANT(ncclAllReduce(a, b, 2048, F32, 0, c, S), 0);
}

static void *thread(void *rank) {
  Comm *c = init(4, (int)(intptr_t)rank);
  for (int i = 0; i < 300; i++) {
    WANT(ncclGroupStart(), 0);
    WANT(ncclAllReduce(a, b, i + 1, F32, 0, c, S), 0);
    WANT(ncclReduce(a, b, i + 1, F32, 0, 0, c, S), 0);
    WANT(ncclGroupEnd(), 0);
    WANT(ncclBroadcast(a, b, i + 1, F32, 0, c, S), 0);
  }
  return NULL;
}

static int enough;
static void *asks(void *c) {
  int state;
  while (!__atomic_load_n(&enough, __ATOMIC_SEQ_CST)) WANT(ncclCommGetAsyncError(c, &state), 0);
  return NULL;
}

static void forbid_system_calls(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, getenv("TEST_CLOCK") ? SYS_clock_gettime : SYS_exit_group, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  WANT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  WANT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// A rank that is a thread: communicator after communicator.
static void *rank_of_nodes(void *rank) {
  Id id;
  ncclGetUniqueId(&id);
  for (int i = 0; i < 20; i++) {
    Comm *c = NULL;
    id.bytes[7]++;
    WANT(ncclCommInitRank(&c, 4, id, (int)(intptr_t)rank), 0);
    WANT(ncclAllReduce(a, b, 256, F32, 0, c, S), 0);
  }
  return NULL;
}

// One rank of a job over several nodes: makes communicators as HOW says, and reduces once on each.
static void on_nodes(void) {
  int rank = atoi(getenv("RANK")), ranks = atoi(getenv("RANKS")), result;
  const char *how = getenv("HOW");
  Comm *made[3] = {0};
  Id id, other;
  Config waits = {sizeof waits, 0, 0, 1}, returns = {sizeof returns, 0, 0, 0};
  ncclGetUniqueId(&id);
  other = id;
  other.bytes[7]++;
  if (strcmp(how, "threads") == 0) {
    pthread_t t[4];
    for (intptr_t i = 0; i < 4; i++) pthread_create(&t[i], NULL, rank_of_nodes, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    return;
  }
  if (strcmp(how, "group") == 0) {
    // Some ranks make the second communicator first.
    WANT(ncclGroupStart(), 0);
    WANT(ncclCommInitRank(&made[rank % 2], ranks, rank % 2 ? other : id, rank), 0);
    WANT(ncclGroupStart(), 0);
    WANT(ncclCommInitRankConfig(&made[1 - rank % 2], ranks, rank % 2 ? id : other, rank, &waits), 0);
    WANT(ncclGroupEnd(), 0);
    result = ncclGroupEnd();
  } else if (strcmp(how, "nonblocking") == 0) {
    result = ncclCommInitRankConfig(&made[0], ranks, id, rank, &returns);
    for (int state = result; state == 7; usleep(1000)) WANT(ncclCommGetAsyncError(made[0], &state), 0);
    if (result == 7) result = 0;
  } else if (strcmp(how, "all") == 0) {
    result = ncclCommInitAll(made, 3, NULL);
  } else {
    result = ncclCommInitRank(&made[0], ranks, id, rank);
    if (strcmp(how, "split") == 0 && result == 0) {
      WANT(ncclCommSplit(made[0], -1, 0, &made[1], NULL), 0);
      result = ncclCommSplit(made[0], rank % 2, 0, &made[1], NULL);
    }
  }
  printf("init %d%s%s%s\n", result, made[0] ? " A" : "", made[1] ? " B" : "", made[2] ? " C" : "");
  fflush(stdout);
  if (result != 0) return;
  for (int i = 0; i < 3; i++) if (made[i]) WANT(ncclAllReduce(a, b, 256, F32, 0, made[i], S), 0);
}

// Counted where the program itself is what defines malloc (see main.c).
long allocations(void) __attribute__((weak));

int job(const char *what) {
  Comm *c = NULL, *all[4] = {0};
  Id id;
  Config config = {sizeof config, 0, 0, 0};
  ncclGetUniqueId(&id);
#define IS(name) (strcmp(what, name) == 0)
  if (IS("nothing")) {
    WANT(ncclGroupStart(), 0);
    WANT(ncclGroupEnd(), 0);
    return system("ls /proc/$PPID/task | wc -l; grep -c . /proc/$PPID/maps") != 0;
  }
  if (IS("every")) {
    c = init(2, 0);
    printf("%016lx\n", fake_hash(c));
    every(c);
    WANT(ncclCommDestroy(c), 0);
  }
  if (IS("nodes")) on_nodes();
  if (IS("mask")) {
    c = init(2, 0);
    printf("%x ", fake_mask());
    // A rate beyond any budget.
    for (int i = 0; i < 100000; i++) WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    printf("%x\n", fake_mask() & ~0x40);
  }
  if (IS("alltoall")) {
    c = init(2, 0);
    WANT(ncclAlltoAll(a, b, 32, F32, c, S), 0);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
  }
  if (IS("config")) {
    const void *config = (void *)0xc0f1;
    c = init(2, 0);
    WANT(ncclAllReduceConfig(a, b, 10, F32, 3, c, S, config), 0);
    WANT(ncclBroadcastConfig(a, a, 20, F32, 1, c, S, config), 0);
    WANT(ncclReduceConfig(a, b, 30, F64, 2, 1, c, S, config), 0);
    WANT(ncclAllGatherConfig(a, b, 40, U8, c, S, config), 0);
    WANT(ncclReduceScatterConfig(a, b, 50, F32, 4, c, S, config), 0);
    WANT(ncclAlltoAllConfig(a, b, 60, F32, c, S, config), 0);
    WANT(ncclGatherConfig(a, b, 70, F32, 1, c, S, config), 0);
    WANT(ncclScatterConfig(a, b, 80, F32, 0, c, S, config), 0);
    WANT(ncclAllReduceConfig(a, b, 90, F32, 0, c, S, NULL), 4);
  }
  if (IS("unordered")) {
    WaitDesc descs[2] = {{2, 1, 0, 4}, {3, 1, 0, 4}};
    void *made = NULL;
    c = init(2, 0);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    WANT(ncclDevCommCreate(c, a, &made), 0);
    if (made != a) return 9;
    WANT(ncclPutSignal(a, 100, F32, 1, (void *)0x31, 32, 3, 4, 0x80000005, c, S), 0);
    WANT(ncclPutSignal(a, 101, F32, 1, (void *)0x31, 32, 3, 4, 0x80000005, c, S), 4);
    WANT(ncclGroupStart(), 0);
    WANT(ncclSignal(1, 3, 4, 0x80000005, c, S), 0);
    WANT(ncclWaitSignal(1, descs, c, S), 0);
    WANT(ncclGroupEnd(), 0);
    WANT(ncclWaitSignal(2, descs, c, S), 0);
    WANT(ncclAllReduce(a, b, 2, F32, 0, c, S), 0);
  }
  if (IS("missing")) {
    // Newer than this NCCL.
    c = init(2, 0);
    WANT(ncclScatter(a, b, 1, F32, 0, c, S), 5);
    WANT(ncclSignal(1, 0, 0, 0, c, S), 5);
    WANT(ncclDevCommCreate(c, a, b), 5);
  }
  if (IS("hang-init")) c = init(8, 5);
  if (IS("hang-call")) {
    c = init(2, 0);
    ncclAllReduce(a, b, 1, F32, 0, c, S);
    ncclAllReduce(a, b, 777, F32, 2, c, S);
  }
  if (IS("fail-init")) WANT(ncclCommInitRank(&c, 2, id, 7), 4);
  if (IS("abort")) {
    c = init(2, 1);
    WANT(ncclCommAbort(c), 0);
  }
  if (IS("all")) {
    WANT(ncclCommInitAll(all, 4, NULL), 0);
    for (int k = 0; k < 2; k++) {
      WANT(ncclGroupStart(), 0);
      for (int i = 0; i < 4; i++) WANT(ncclAllReduce(a, b, 100 + k, F32, 0, all[i], S), 0);
      for (int i = 0; i < 4; i++) WANT(ncclBroadcast(a, b, 200 + k, F32, 0, all[i], S), 0);
      WANT(ncclGroupEnd(), 0);
    }
    for (int i = 0; i < 4; i++) printf("%016lx\n", fake_hash(all[i])), ncclCommDestroy(all[i]);
  }
  if (IS("group-init")) {
    WANT(ncclGroupStart(), 0);
    for (int i = 0; i < 4; i++) WANT(ncclCommInitRank(&all[i], 4, id, i), 0);
    WANT(ncclGroupEnd(), 0);
    for (int i = 0; i < 4; i++) WANT(ncclAllReduce(a, b, 100 + i, F32, 0, all[i], S), 0);
  }
  if (IS("split")) {
    c = init(8, 3);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    WANT(ncclCommSplit(c, -1, 0, &all[0], NULL), 0);
    WANT(ncclCommSplit(c, 1, 0, &all[1], NULL), 0);
    WANT(ncclCommSplit(c, 1, 0, &all[2], NULL), 0);
    for (int i = 1; i < 3; i++) WANT(ncclAllReduce(a, b, 10 * i, F32, 0, all[i], S), 0);
    printf("%016lx\n%016lx\n%016lx\n", fake_hash(c), fake_hash(all[1]), fake_hash(all[2]));
  }
  if (IS("nonblocking")) {
    WANT(ncclCommInitRankConfig(&c, 2, id, 1, &config), 7);
    int state = 7;
    while (state == 7) {
      WANT(ncclCommGetAsyncError(c, &state), 0);
      usleep(1000);
    }
    WANT(ncclAllReduce(a, b, 5, F32, 1, c, S), 0);
  }
  if (IS("threads")) {
    pthread_t t[4];
    for (intptr_t i = 0; i < 4; i++) pthread_create(&t[i], NULL, thread, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
  }
  if (IS("fork")) {
    c = init(2, 0);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    pid_t child = fork();
    if (child == 0) {
      // Its parent's communicator, which only passes through, and one of its own.
      WANT(ncclAllReduce(a, b, 2, F32, 0, c, S), 0);
      if (getenv("OWN")) {
        c = init(3, 2);
        WANT(ncclAllReduce(a, b, 3, F32, 0, c, S), 0);
      }
      _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    WANT(status, 0);
    WANT(ncclAllReduce(a, b, 4, F32, 0, c, S), 0);
  }
  if (IS("seccomp")) {
    c = init(2, 0);
    forbid_system_calls();
    every(c);
    syscall(SYS_exit_group, 0);
  }
  if (IS("allocations")) {
    c = init(2, 0);
    long before = allocations();
    for (int i = 0; i < 10; i++) every(c);
    WANT((int)(allocations() - before), 0);
    void *volatile some = malloc(1);
    free(some);
    WANT((int)(allocations() - before), 1);
  }
  if (IS("crowd")) {
    // More communicators than a small segment has room for, more calls in a group than slots, and a second thread
    // that asks for states all the while.
    Comm *many[12];
    for (int i = 0; i < 12; i++) many[i] = init(13, i);
    WANT(ncclGroupStart(), 0);
    for (int i = 0; i < 3000; i++) WANT(ncclAllReduce(a, b, i + 1000, F32, 0, many[i % 12], S), 0);
    WANT(ncclGroupEnd(), 0);
    pthread_t t;
    pthread_create(&t, NULL, asks, many[0]);
    for (int i = 0; i < 20000; i++) WANT(ncclSend(a, 1, F32, i % 13, many[0], S), 0);
    __atomic_store_n(&enough, 1, __ATOMIC_SEQ_CST);
    pthread_join(t, NULL);
    for (int i = 0; i < 12; i++) WANT(ncclCommDestroy(many[i]), 0);
    for (int i = 0; i < 1000; i++) {
      c = init(14, i % 14);
      WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
      WANT(ncclCommDestroy(c), 0);
    }
  }
  if (IS("redop")) {
    // Rank 1 wants the maximum where the others sum up.
    int rank = atoi(getenv("RANK"));
    c = init(3, rank);
    for (int i = 0; i < 5; i++) WANT(ncclAllReduce(a, b, 1024, F32, rank == 1 && i == 3 ? 2 : 0, c, S), 0);
    sleep(2);
  }
  if (IS("timed")) {
    WANT(ncclCommInitAll(all, 2, NULL), 0);
    for (int i = 0; i < 20; i++) {
      WANT(ncclAllReduce(a, b, 100, F32, 0, all[0], S), 0);
      WANT(ncclGroupStart(), 0);
      WANT(ncclAllReduce(a, b, 200, F32, 0, all[0], S), 0);
      WANT(ncclReduce(a, b, 300, F32, 0, 0, all[1], S), 0);
      WANT(ncclAllReduce(a, b, 400, F32, 0, all[0], S), 0);
      WANT(ncclAllReduce(a, b, 666, F32, 0, all[0], S), 4);
      WANT(ncclGroupEnd(), 0);
      usleep(3000);
    }
    for (int i = 0; i < 2; i++) ncclCommDestroy(all[i]);
  }
  if (IS("lapped")) {
    // Groups of more calls than the segment has slots; what is simulated has no order.
    c = init(2, 0), all[0] = init(2, 1);
    WANT(ncclGroupStart(), 0);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    WANT(ncclSend(a, 1, F32, 1, c, S), 0);
    for (int i = 0; i < 9000; i++) WANT(ncclAllReduce(a, b, i + 1000, F32, 0, all[0], S), 0);
    WANT(ncclGroupEnd(), 0);
    WANT(ncclGroupStart(), 0);
    WANT(ncclAllReduce(a, b, 50000, F32, 0, c, S), 0);
    WANT(ncclSend(a, 50000, F32, 1, c, S), 0);
    WANT(ncclGroupSimulateEnd(NULL), 0);
    WANT(ncclAllReduce(a, b, 2, F32, 0, c, S), 0);
    WANT(ncclSend(a, 2, F32, 1, c, S), 0);
    WANT(ncclAllReduce(a, b, 10000, F32, 0, all[0], S), 0);
  }
  if (IS("again")) {
    // Communicators one after the other, on the slot and the pool of the first; then the device is reset.
    int (*made)(void) = dlsym(RTLD_DEFAULT, "fake_events_made");
    void (*reset)(void) = dlsym(RTLD_DEFAULT, "fake_reset");
    for (int i = 0; i < 600; i++) {
      c = init(2, 0);
      usleep(1000);
      for (int k = 0; k < 2; k++) WANT(ncclAllReduce(a, b, 100, F32, 0, c, S), 0);
      WANT(ncclCommDestroy(c), 0);
      if (i == 299) printf("%d ", made()), reset();
    }
    printf("%d\n", made());
  }
  if (IS("captured")) {
    c = init(2, 0);
    WANT(ncclAllReduce(a, b, 1, F32, 0, c, S), 0);
    WANT(ncclAllReduce(a, b, 2, F32, 0, c, (void *)0xca9), 0);
    WANT(ncclGroupStart(), 0);
    WANT(ncclAllReduce(a, b, 3, F32, 0, c, (void *)0xca9), 0);
    WANT(ncclGroupEnd(), 0);
    WANT(ncclAllReduce(a, b, 4, F32, 0, c, S), 0);
  }
  if (IS("fast")) {
    // Time of a call, ours and the fake's, in ns.
    c = init(2, 0);
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < 1000000; i++) ncclAllReduce(a, b, 1024, F32, 0, c, S);
    clock_gettime(CLOCK_MONOTONIC, &to);
    printf("%.1f\n", ((to.tv_sec - from.tv_sec) * 1e9 + to.tv_nsec - from.tv_nsec) / 1e6);
  }
  return 0;
}
