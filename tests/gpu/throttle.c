// Loaded before NCCL (LD_PRELOAD): once the file THROTTLE_FILE exists, whatever the process sends by TCP takes longer,
// by THROTTLE_US a call. A slow network for machines whose kernel has none to offer.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static int throttled(void) {
    static int on;
    const char *file = getenv("THROTTLE_FILE");
    if (!on && file && access(file, F_OK) == 0) on = 1;
    return on;
}

static void wait_a_little(size_t bytes) {
    const char *us = getenv("THROTTLE_US");
    // Control messages are small; what counts is data.
    if (bytes > 4096 && us && throttled()) usleep((useconds_t)atoi(us));
}

ssize_t send(int fd, const void *data, size_t bytes, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (!real) real = (ssize_t(*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
    wait_a_little(bytes);
    return real(fd, data, bytes, flags);
}
