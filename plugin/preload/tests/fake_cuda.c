// Stands for libcuda.so.1: events that happen at once, one device a stream's number names, and one stream that is
// always being captured. OLD: a driver that does not number its contexts.

#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define CAPTURED ((void *)0xca9)

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static int device;
// As many as the tests' communicators make, with some to spare.
static double events[1 << 20];
static int made;
// Events made up to here went with the context that fake_reset has ended; the next one has the same address.
static int dead;
static uint64_t generation;
void fake_reset(void) { dead = made, generation++; }
int fake_events_made(void) { return made; }
static void check(intptr_t e) { if (e <= dead) abort(); }

#ifndef OLD
int cuCtxGetId(void *c, unsigned long long *id) { return *id = 1 + generation * 256 + ((intptr_t)c & 0xff), 0; }
#endif
int cuCtxGetCurrent(void **c) { return *c = (void *)(intptr_t)(0xc000 + device), 0; }
int cuCtxGetDevice(int *d) { return *d = device, 0; }
int cuDeviceGetPCIBusId(char *text, int n, int d) { return snprintf(text, n, "0000:%02x:00.0", d), 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { return *c = (void *)(intptr_t)(0xc000 + d), 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxPushCurrent_v2(void *c) { return device = (intptr_t)c & 0xff, 0; }
int cuCtxPopCurrent_v2(void **c) { return device = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, 0; }
int cuStreamIsCapturing(void *s, int *status) { return *status = s == CAPTURED, 0; }
int cuEventCreate(intptr_t *e, unsigned flags) {
  if (made + 1 >= sizeof events / sizeof *events) abort();
  return *e = ++made, 0;
}
int cuEventRecord(intptr_t e, void *stream) {
  // NCCL itself must not be asked to wait for an event on a stream that is being captured.
  if (stream == CAPTURED) abort();
  check(e);
  return events[e] = now_ms(), 0;
}
int cuEventQuery(intptr_t e) { return check(e), 0; }
int cuEventElapsedTime(float *ms, intptr_t from, intptr_t to) { return *ms = events[to] - events[from], 0; }

// Memory of the device is memory of the host. A stream is a number of operations that are under way (fake_nccl.c counts).
int cuMemAlloc_v2(void **at, size_t bytes) {
  if (getenv("FAKE_NO_MEMORY")) return 2;
  return *at = malloc(bytes), 0;
}
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, int *stream) { return memcpy(to, from, bytes), 0; }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, int *stream) { return memcpy(to, from, bytes), 0; }
int cuStreamCreate(int **stream, unsigned flags) { return *stream = calloc(1, 64), flags == 1 ? 0 : 1; }
int cuStreamQuery(int *stream) { return __atomic_load_n(stream, __ATOMIC_ACQUIRE) ? 600 : 0; }
