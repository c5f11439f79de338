/* A profiler plugin that writes down every callback, with numbers of its own in place of addresses.
 *
 * RECORDER_LOG: the file. RECORDER_MASK: its mask, hexadecimal. RECORDER_FAIL: its init fails for the communicators
 * whose number (from 0) is in this comma-free list of digits. RECORDER_STRICT: it aborts where a handle, a context or
 * a parent is not its own and not of another process. RECORDER_NULL: types, hexadecimal, for which it gives NULL.
 * RECORDER_VERSIONS at compile time: the versions it exports, a bit each. recorder_ask() changes its mask later on, as
 * NVIDIA's example does.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>

#ifndef RECORDER_VERSIONS
#define RECORDER_VERSIONS 0xfe
#endif

enum { EVENTS = 1 << 20, COMMS = 1 << 12 };
static char events[EVENTS], comms[COMMS];
static long next_event, next_comm;
static FILE *out;
static int strict;
static uint64_t nulls;
static int *volatile mask_at;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void begin(void) {
  pthread_mutex_lock(&lock);
  if (!out) {
    const char *path = getenv("RECORDER_LOG");
    out = fopen(path ? path : "/dev/null", "w");
    strict = getenv("RECORDER_STRICT") != NULL;
    if (getenv("RECORDER_NULL")) nulls = strtoull(getenv("RECORDER_NULL"), NULL, 16);
  }
}

static void end(void) {
  fputc('\n', out);
  fflush(out);
  pthread_mutex_unlock(&lock);
}

static void bad(const char *what, const void *p) {
  if (strict) {
    fprintf(stderr, "recorder: %s %p is not mine\n", what, p);
    abort();
  }
}

/* What a pointer is to this plugin. */
static void name(const char *what, const void *p, int may_be_foreign) {
  const char *c = p;
  if (!p) fprintf(out, " %s=0", what);
  else if (c >= events && c < events + EVENTS) fprintf(out, " %s=e%ld", what, (long)(c - events));
  else if (c >= comms && c < comms + COMMS) fprintf(out, " %s=c%ld", what, (long)(c - comms));
  else {
    if (!may_be_foreign) bad(what, p);
    fprintf(out, " %s=%p", what, p);
  }
}

static uint64_t u64(const char *d, int at) { uint64_t v; memcpy(&v, d + at, 8); return v; }
static int32_t i32(const char *d, int at) { int32_t v; memcpy(&v, d + at, 4); return v; }
static const char *text(const char *d, int at) { const char *s; memcpy(&s, d + at, 8); return s ? s : "-"; }
static void *ptr(const char *d, int at) { void *p; memcpy(&p, d + at, 8); return p; }

static int opened(int v, void **context, int *mask, const char *comm, uint64_t id, int nodes, int ranks, int rank) {
  const char *wanted = getenv("RECORDER_MASK"), *fail = getenv("RECORDER_FAIL");
  long n;
  int failed;
  begin();
  n = next_comm++ % COMMS;
  failed = fail && strchr(fail, '0' + (int)(n % 10)) != NULL;
  fprintf(out, "v%d init", v);
  if (v >= 4) fprintf(out, " name=%s id=%lx nodes=%d ranks=%d rank=%d", comm ? comm : "-", (long)id, nodes, ranks, rank);
  fprintf(out, " -> c%ld%s", n, failed ? " failed" : "");
  if (!failed) *context = comms + n;
  *mask = wanted ? (int)strtol(wanted, NULL, 16) : 0xffff;
  if (!failed) mask_at = mask;
  end();
  return failed ? 3 : 0;
}

void recorder_ask(int mask) { __atomic_store_n(mask_at, mask, __ATOMIC_RELAXED); }

static void coll(int v, const char *d) {
  if (v == 1) {
    fprintf(out, " hash=%lx seq=%lu func=%d count=%lu root=%d type=%d channels=%d warps=%d algo=%d proto=%d", (long)u64(d, 32),
            (long)u64(d, 40), d[48], (long)u64(d, 72), i32(d, 80), d[84], d[104], d[105], d[106], d[107]);
  } else if (v <= 3) {
    int k = v == 2 ? 8 : 0;
    fprintf(out, " hash=%lx seq=%lu func=%s count=%lu root=%d type=%s channels=%d warps=%d algo=%s proto=%s", (long)u64(d, 32),
            (long)u64(d, 40), text(d, 48), (long)u64(d, 72), i32(d, 80), text(d, 88), d[96 + k], d[97 + k], text(d, 104 + k),
            text(d, 112 + k));
  } else {
    fprintf(out, " seq=%lu func=%s from=%lx to=%lx count=%lu root=%d type=%s channels=%d warps=%d algo=%s proto=%s",
            (long)u64(d, 24), text(d, 32), (long)u64(d, 40), (long)u64(d, 48), (long)u64(d, 56), i32(d, 64), text(d, 72), d[80],
            d[81], text(d, 88), text(d, 96));
    if (v >= 5) name("plan", ptr(d, 104), 1);
    if (v >= 7) fprintf(out, " tag=%lu", (long)u64(d, 128));
  }
}

static void p2p(int v, const char *d) {
  if (v == 1) fprintf(out, " func=%d type=%d count=%lu peer=%d", d[40], d[56], (long)u64(d, 64), i32(d, 72));
  else if (v <= 3) fprintf(out, " func=%s type=%s count=%lu peer=%d", text(d, 40), text(d, 56), (long)u64(d, 64), i32(d, 72));
  else {
    fprintf(out, " func=%s type=%s count=%lu peer=%d channels=%d", text(d, 24), text(d, 40), (long)u64(d, 48), i32(d, 56), d[60]);
    if (v >= 5) name("plan", ptr(d, 64), 1);
    if (v >= 7) fprintf(out, " tag=%lu", (long)u64(d, 72));
  }
}

static int started(int v, void *context, void **handle, const char *d) {
  uint64_t kind = v < 5 ? (unsigned char)d[0] : u64(d, 0);
  long n;
  begin();
  n = next_event++ % EVENTS;
  fprintf(out, "v%d start %lx -> e%ld", v, (long)kind, n);
  name("context", context, 0);
  name("parent", ptr(d, 8), 1);
  fprintf(out, " rank=%d", i32(d, 16));
  switch (kind) {
    case 0x2: coll(v, d); break;
    case 0x4: p2p(v, d); break;
    case 0x8: fprintf(out, " channel=%d peer=%d steps=%d chunk=%d send=%d", d[28], i32(d, 32), i32(d, 36), i32(d, 40), i32(d, 44)); break;
    case 0x10: fprintf(out, " step=%d", i32(d, 24)); break;
    case 0x40:
      fprintf(out, " channel=%d", d[24]);
      if (v >= 4) fprintf(out, " stamp=%lu", (long)u64(d, 32));
      break;
    case 0x100: fprintf(out, " captured=%d depth=%d", d[24], i32(d, 28)); break;
    case 0x200:
      fprintf(out, " func=%s count=%lu type=%s root=%d stream=%lx captured=%d", text(d, 24), (long)u64(d, 32), text(d, 40),
              i32(d, 48), (long)u64(d, 56), d[64]);
      if (v >= 7) fprintf(out, " tag=%lu", (long)u64(d, 72));
      break;
    case 0x400:
      fprintf(out, " func=%s count=%lu type=%s stream=%lx captured=%d", text(d, 24), (long)u64(d, 32), text(d, 40),
              (long)u64(d, 48), d[56]);
      if (v >= 7) fprintf(out, " tag=%lu", (long)u64(d, 64));
      break;
    case 0x800: fprintf(out, " stream=%lx", (long)u64(d, 24)); break;
    case 0x1000: fprintf(out, " func=%s count=%lu sync=%s stream=%lx", text(d, 32), (long)u64(d, 56), text(d, 80), (long)u64(d, 104)); break;
    default: break;
  }
  *handle = kind & nulls ? NULL : events + n;
  end();
  return 0;
}

static int stopped(int v, void *handle) {
  begin();
  fprintf(out, "v%d stop", v);
  name("event", handle, 0);
  end();
  return 0;
}

static int recorded(int v, void *handle, int state, const char *args) {
  begin();
  fprintf(out, "v%d state %d", v, state);
  name("event", handle, 0);
  if (!args) fprintf(out, " bare");
  else if (v <= 3) fprintf(out, " size=%lu steps=%d", (long)u64(args, 0), i32(args, 8));
  else fprintf(out, " value=%lu", (long)u64(args, 0));
  end();
  return 0;
}

static int finalized(int v, void *context) {
  begin();
  fprintf(out, "v%d finalize", v);
  name("context", context, 0);
  end();
  return 0;
}

struct table { const char *name; void *init, *start, *stop, *record, *finalize, *spare[8]; };

#define CALLS(v)                                                                                       \
  static int start_##v(void *c, void **h, void *d) { return started(v, c, h, d); }                     \
  static int stop_##v(void *h) { return stopped(v, h); }                                               \
  static int record_##v(void *h, int s, void *a) { return recorded(v, h, s, a); }                      \
  static int finalize_##v(void *c) { return finalized(v, c); }                                         \
  struct table ncclProfiler_v##v = {"recorder", init_##v, start_##v, stop_##v, record_##v, finalize_##v, {0}};
#define OLD(v)                                                                                         \
  static int init_##v(void **c, int *m) { return opened(v, c, m, 0, 0, 0, 0, 0); }                     \
  CALLS(v)
#define NEW(v)                                                                                         \
  static int init_##v(void **c, uint64_t id, int *m, const char *n, int nodes, int ranks, int rank, void *log) { \
    (void)log;                                                                                         \
    return opened(v, c, m, n, id, nodes, ranks, rank);                                                 \
  }                                                                                                    \
  CALLS(v)

#if RECORDER_VERSIONS & 0x2
OLD(1)
#endif
#if RECORDER_VERSIONS & 0x4
OLD(2)
#endif
#if RECORDER_VERSIONS & 0x8
OLD(3)
#endif
#if RECORDER_VERSIONS & 0x10
static int init_4(void **c, int *m, const char *n, uint64_t id, int nodes, int ranks, int rank, void *log) {
  (void)log;
  return opened(4, c, m, n, id, nodes, ranks, rank);
}
CALLS(4)
#endif
#if RECORDER_VERSIONS & 0x20
NEW(5)
#endif
#if RECORDER_VERSIONS & 0x40
NEW(6)
#endif
#if RECORDER_VERSIONS & 0x80
NEW(7)
#endif
