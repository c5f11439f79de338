/* A libnvidia-ml.so.1 of two GPUs, for tests without a driver. What it can do is chosen when it is built:
 *
 *   (nothing)     counters of NVLink by field values, 2 GPUs, 3 links each; link 1 of GPU 1 is down
 *   -DMONITOR     the performance monitor as well, as Hopper has it
 *   -DDENIED      this user may ask for names and addresses only
 *   -DOLD         a driver without the functions that free what newer ones make
 *   -DNO_GPU      a driver without a GPU
 *
 * GPU g sends (g + 1) * 1000 MiB and receives (g + 1) * 500 MiB a second over all links, a third over each that is up.
 */
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, TIMEOUT = 10 };
enum { GPUS = 2, LINKS = 3 };
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { int number; } Device;
typedef Device *device;
typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { u32 field, scope; long long timestamp, latency; u32 type; int ret; u64 value; } Field;
typedef struct { device d; u64 type, data; u32 gpu_instance, compute_instance; } Event;
typedef struct { u32 id; int ret; double value; char *names[3]; } Metric;
typedef struct { u32 version, count; void *first, *second; Metric metrics[210]; } Metrics;

static Device devices[GPUS] = {{0}, {1}};
static struct timespec begun;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)(t.tv_sec - begun.tv_sec) + (double)(t.tv_nsec - begun.tv_nsec) / 1e9;
}

#ifdef DENIED
#define ASK return NO_PERMISSION
#else
#define ASK (void)0
#endif

int nvmlInit_v2(void) { clock_gettime(CLOCK_MONOTONIC, &begun); return SUCCESS; }
int nvmlSystemGetDriverVersion(char *to, u32 n) { snprintf(to, n, "580.95.05"); return SUCCESS; }
#ifndef OLD
int nvmlShutdown(void) { return SUCCESS; }
#endif

int nvmlDeviceGetCount_v2(u32 *n) {
#ifdef NO_GPU
    *n = 0;
#else
    *n = GPUS;
#endif
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(u32 i, device *d) {
    if (i >= GPUS) return INVALID;
    *d = &devices[i];
    return SUCCESS;
}
static void address(int n, Pci *p) {
    memset(p, 0, sizeof *p);
    p->bus = 0x1a + (u32)n;
    snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", p->bus);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
}
int nvmlDeviceGetPciInfo_v3(device d, Pci *p) { address(d->number, p); return SUCCESS; }
int nvmlDeviceGetUUID(device d, char *to, u32 n) { snprintf(to, n, "GPU-%d", d->number); return SUCCESS; }
int nvmlDeviceGetName(device d, char *to, u32 n) { (void)d; snprintf(to, n, "Fake H200"); return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(device d, u32 type, u32 *mhz) { ASK; (void)d; (void)type; *mhz = 1980; return SUCCESS; }
int nvmlDeviceGetClockInfo(device d, u32 type, u32 *mhz) {
    ASK;
    *mhz = type == 2 ? 3201 : d->number ? 1215 : 1980;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(device d, u64 *m) { ASK; (void)d; m[1] = 1000; m[2] = 0; m[3] = 400; m[4] = 600; return SUCCESS; }
int nvmlDeviceGetPowerUsage(device d, u32 *mw) { ASK; (void)d; *mw = 651500; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(device d, u32 *mw) { ASK; (void)d; *mw = 700000; return SUCCESS; }
int nvmlDeviceGetTemperature(device d, u32 sensor, u32 *c) { ASK; (void)sensor; *c = d->number ? 87 : 54; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, u64 *r) { ASK; *r = d->number ? 0x40 | 0x8 | 1 : 1; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(device d, u32 *u) { ASK; (void)d; u[0] = 97; u[1] = 40; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(device d, u32 what, u32 since, u64 *n) {
    ASK;
    if (since != 0) return NOT_SUPPORTED;
    *n = d->number ? (what == 0 ? 7 : 1) : 0;
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(device d, u32 *c, u32 *u, u32 *pending, u32 *failed) {
    ASK;
    *c = 1, *u = (u32)d->number, *pending = (u32)d->number, *failed = 0;
    return SUCCESS;
}
int nvmlDeviceGetCurrPcieLinkGeneration(device d, u32 *n) { ASK; (void)d; *n = 5; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkGeneration(device d, u32 *n) { ASK; (void)d; *n = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(device d, u32 *n) { ASK; *n = d->number ? 8 : 16; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(device d, u32 *n) { ASK; (void)d; *n = 16; return SUCCESS; }
int nvmlDeviceGetPcieReplayCounter(device d, u32 *n) { ASK; (void)d; *n = 3; return SUCCESS; }
int nvmlDeviceGetTopologyCommonAncestor(device a, device b, u32 *level) { ASK; (void)a; (void)b; *level = 50; return SUCCESS; }
int nvmlDeviceGetP2PStatus(device a, device b, u32 how, u32 *status) { ASK; (void)a; (void)b; *status = how == 2 ? 0 : 5; return SUCCESS; }

typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(device d, u32 *n, Process *to) {
    ASK;
    u32 room = *n;
    *n = 1;
    if (!room || !to) return 7; /* too small */
    to[0] = (Process){4000 + (u32)d->number, 1 << 20, ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(device d, u32 link, u32 *active) {
    if (link >= LINKS) return INVALID;
    ASK;
    *active = !(d->number == 1 && link == 1);
    return SUCCESS;
}
int nvmlDeviceGetNvLinkVersion(device d, u32 link, u32 *v) { ASK; (void)d; (void)link; *v = 6; return SUCCESS; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device d, u32 link, Pci *p) { ASK; (void)link; address(0x40 + d->number, p); return SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(device d, u32 link, u32 *t) { ASK; (void)d; (void)link; *t = 2; return SUCCESS; }

int nvmlDeviceGetFieldValues(device d, int n, Field *f) {
    ASK;
    double mib = seconds() * (d->number + 1);
    for (int i = 0; i < n; i++, f++) {
        double part = f->scope == ~0u ? 1.0 : 1.0 / 3;
        if (d->number == 1 && f->scope == 1) part = 0;
        f->ret = SUCCESS;
        f->type = 3;
        switch (f->field) {
        case 138: f->value = (u64)(mib * 1000 * 1024 * part); break;
        case 139: f->value = (u64)(mib * 500 * 1024 * part); break;
        case 161: f->type = 1; f->value = 5 + f->scope; break;
        case 162: f->type = 1; f->value = (u64)d->number; break;
        case 163: f->type = 1; f->value = 9; break;
        case 164: f->type = 1; f->value = 26562; break;
        default: f->ret = NOT_SUPPORTED;
        }
    }
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(device d, u32 *support) {
    (void)d;
#if defined MONITOR && !defined DENIED
    support[1] = 1;
#else
    support[1] = 0;
#endif
    return SUCCESS;
}
int nvmlGpmSampleAlloc(void **s) { *s = calloc(1, sizeof(int)); return SUCCESS; }
#ifndef OLD
int nvmlGpmSampleFree(void *s) { free(s); return SUCCESS; }
#endif
int nvmlGpmSampleGet(device d, void *s) { *(int *)s = d->number; return SUCCESS; }
int nvmlGpmMetricsGet(Metrics *m) {
    if (m->version != 1 || !m->first || !m->second) return INVALID;
    int gpu = *(int *)m->second;
    for (u32 i = 0; i < m->count; i++) {
        Metric *x = &m->metrics[i];
        x->ret = SUCCESS;
        double down = gpu == 1 && (x->id == 64 || x->id == 65) ? 0 : 1;
        switch (x->id) {
        case 2: x->value = 80; break;
        case 5: x->value = 25; break;
        case 10: x->value = 50; break;
        case 20: x->value = 10; break;
        case 21: x->value = 20; break;
        case 60: x->value = 500.0 * (gpu + 1); break;
        case 61: x->value = 1000.0 * (gpu + 1); break;
        case 62: case 64: case 66: x->value = 500.0 * (gpu + 1) / 3 * down; break;
        case 63: case 65: case 67: x->value = 1000.0 * (gpu + 1) / 3 * down; break;
        default: x->ret = NOT_SUPPORTED;
        }
    }
    return SUCCESS;
}

static int left;
int nvmlEventSetCreate(void **set) { *set = &left; left = 3; return SUCCESS; }
#ifndef OLD
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
#endif
int nvmlDeviceGetSupportedEventTypes(device d, u64 *types) { (void)d; *types = 0xffff; return SUCCESS; }
int nvmlDeviceRegisterEvents(device d, u64 types, void *set) { ASK; (void)d; (void)set; return types & 8 ? SUCCESS : INVALID; }
int nvmlEventSetWait_v2(void *set, Event *e, u32 ms) {
    if (!left) return TIMEOUT;
    (void)set; (void)ms;
    memset(e, 0, sizeof *e);
    e->d = &devices[1];
    switch (left--) {
    case 3: e->type = 8; e->data = 79; break;
    case 2: e->type = 0x8000; break;
    case 1: e->type = 16; break; /* a clock's change, which nobody asked for */
    }
    return SUCCESS;
}
