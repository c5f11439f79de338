/* A profiler plugin that counts: a plugin under test for `ringwatch bench --cost`. -DVERSION=N is its ABI (5), -DTABLE its symbol.
 *
 *   COUNT_FILE=FILE    at each finalize a line: inits, starts, stops, handles and parents that are not its own
 *   COUNT_MASK=N       the events that it asks for (2, collectives)
 *   COUNT_SWITCH=1     it switches kernel events (0x40) on and off with every third event, and asks for them at first
 *   COUNT_FAIL=1       its init fails
 *   COUNT_ARGUMENTS=1  its init fails unless NCCL's arguments are those of shim_driver.c
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef VERSION
#define VERSION 5
#endif

/* A handle is its number above this. */
#define OWN 0x7700000000000000ull

static atomic_ullong inits, starts, stops, foreign;
static int *mask_at;

static int is_own(const void *handle) { return (uint64_t)handle >> 56 == OWN >> 56; }

static int open_context(void **context, int *mask) {
    const char *events = getenv("COUNT_MASK");
    if (getenv("COUNT_FAIL")) return 3;
    *context = (void *)(OWN + atomic_fetch_add(&inits, 1) + 1);
    *mask = (events ? atoi(events) : 2) | (getenv("COUNT_SWITCH") ? 0x40 : 0);
    mask_at = mask;
    return 0;
}

#if VERSION < 4
static int init(void **context, int *mask) { return open_context(context, mask); }
#else
#if VERSION == 4
static int init(void **context, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, void *log) {
#else
static int init(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, void *log) {
#endif
    /* What the driver of the shim passes (shim_driver.c). */
    if (getenv("COUNT_ARGUMENTS") && (id != 77 || !name || name[0] != 'n' || nodes != 2 || ranks != 8 || rank != 3 || log)) return 4;
    return open_context(context, mask);
}
#endif

static int start(void *context, void **handle, void *descriptor) {
    void *parent = ((void **)descriptor)[1];
    uint64_t number = atomic_fetch_add(&starts, 1) + 1;
    if (!is_own(context) || (parent && !is_own(parent))) atomic_fetch_add(&foreign, 1);
    if (getenv("COUNT_SWITCH") && number % 3 == 0) __atomic_xor_fetch(mask_at, 0x40, __ATOMIC_RELAXED);
    *handle = (void *)(OWN + number);
    return 0;
}

static int stop(void *handle) {
    atomic_fetch_add(is_own(handle) ? &stops : &foreign, 1);
    return 0;
}

static int record(void *handle, int state, void *args) { return (void)handle, (void)state, (void)args, 0; }

static int finalize(void *context) {
    const char *name = getenv("COUNT_FILE");
    FILE *f = name ? fopen(name, "a") : 0;
    if (!is_own(context)) atomic_fetch_add(&foreign, 1);
    if (f) {
        fprintf(f, "%llu %llu %llu %llu\n", (unsigned long long)atomic_load(&inits), (unsigned long long)atomic_load(&starts),
                (unsigned long long)atomic_load(&stops), (unsigned long long)atomic_load(&foreign));
        fclose(f);
    }
    return 0;
}

const struct {
    const char *name;
    __typeof__(init) *init;
    int (*start)(void *, void **, void *);
    int (*stop)(void *);
    int (*record)(void *, int, void *);
    int (*finalize)(void *);
} TABLE = {"Count", init, start, stop, record, finalize};
