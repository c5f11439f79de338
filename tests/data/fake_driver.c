/* A libcuda.so.1 that says which GPU a rank has, and nothing else: preloaded into players of recordings, whose own GPUs
 * were not written down. Rank 0 has 0000:00:09.0, rank 1 has 0000:00:0a.0, and so on. And a thread with a name that NCCL
 * gives its own, which the players' recordings do not have: it wakes up now and then. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *progress(void *unused) {
    const struct timespec pause = {0, 1000000};
    for (;;) nanosleep(&pause, NULL);
    return unused;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    if (getenv("RANK") && pthread_create(&thread, NULL, progress, NULL) == 0)
        pthread_setname_np(thread, "NCCL Progress 0");
}

int cuCtxGetDevice(int *device) {
    const char *rank = getenv("RANK");
    if (!rank) return 201;
    *device = atoi(rank);
    return 0;
}

int cuDeviceGetPCIBusId(char *text, int room, int device) {
    snprintf(text, room, "0000:00:%02X.0", 9 + device);
    return 0;
}
