/* Drives the shim of `ringwatch bench --cost` as NCCL and the benchmark do: shim_driver SHIM VERSION. Exit code 1, with the line on
 * stderr, where it does something else than is expected. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPECT(what) \
    if (!(what)) return fprintf(stderr, "line %d: %s\n", __LINE__, #what), 1

typedef struct {
    const char *name;
    void *init;
    int (*start)(void *, void **, void *);
    int (*stop)(void *);
    int (*record)(void *, int, void *);
    int (*finalize)(void *);
    void *spare[8];
} Table;
typedef struct { unsigned abi; int status, mask, empty_mask; unsigned long long changes, strays; } Facts;
typedef int (*InitBare)(void **, int *);
typedef int (*Init4)(void **, int *, const char *, uint64_t, int, int, int, void *);
typedef int (*Init5)(void **, uint64_t, int *, const char *, int, int, int, void *);
enum { OFF, EMPTY, FORWARD, DROP_LATE };

static int mask = 0x55;
static uint64_t descriptor[17];

int main(int count, char **arguments) {
    int version = count == 3 ? atoi(arguments[2]) : 0;
    char symbol[32];
    void *context = 0, *empty = 0, *own = 0, *other = 0;
    Facts facts;
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    EXPECT(library);
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
    Table *t = dlsym(library, symbol);
    int (*shim)(unsigned, Facts *) = dlsym(library, "ringwatch_shim");
    EXPECT(t && shim && !t->spare[0] && !t->spare[7]);
    EXPECT(shim(OFF, &facts) != 0 && facts.abi == 0);

    if (version < 4) EXPECT(!((InitBare)t->init)(&context, &mask));
    if (version == 4) EXPECT(!((Init4)t->init)(&context, &mask, "name", 77, 2, 8, 3, 0));
    if (version > 4) EXPECT(!((Init5)t->init)(&context, 77, &mask, "name", 2, 8, 3, 0));
    /* Events are off until they are switched on. */
    EXPECT(context && mask == 0);
    EXPECT(shim(OFF, &facts) == 0 && facts.abi == (unsigned)version && facts.status == 0 && facts.mask == 2 && mask == 0);

    EXPECT(shim(EMPTY, &facts) == 0 && mask == 2);
    EXPECT(!t->start(context, &empty, descriptor) && empty && !t->record(empty, 1, 0) && !t->stop(empty));

    EXPECT(shim(FORWARD, &facts) == 0 && mask == 2);
    descriptor[1] = (uint64_t)empty;
    EXPECT(!t->start(context, &own, descriptor) && own && own != empty && !descriptor[1]);
    /* A late stop of an empty callback's event. */
    EXPECT(!t->stop(empty) && !t->record(own, 1, 0) && !t->stop(own));

    /* What comes late goes to the plugin, until it is dropped. */
    EXPECT(shim(OFF, &facts) == 0 && mask == 0 && !t->stop(own));
    EXPECT(shim(DROP_LATE, &facts) == 0 && mask == 0 && !t->stop(own) && !t->stop(empty));
    other = own;
    EXPECT(!t->start(context, &other, descriptor) && !other);
    EXPECT(shim(OFF, &facts) == 0 && facts.strays == 1);
    EXPECT(shim(9, &facts) != 0 && mask == 0);
    return t->finalize(context);
}
