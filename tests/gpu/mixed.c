// Every kind of NCCL operation, a known number of times, on all GPUs of one process: one thread a GPU. It is linked
// against libnccl.so.2 as other programs are, so that any release can be put under it, and a preloaded library before
// it. Prints what it issued on each rank. Written for `versions.py`, which compares that with what was recorded.
//
//   cc -O1 -o mixed mixed.c libnccl.so.2 -ldl -lpthread      (any libnccl.so.2, or a stub of that name)
//   ./mixed GPUS ROUNDS
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[128]; } UniqueId;
extern int ncclGetVersion(int *version);
extern int ncclGetUniqueId(UniqueId *id);
extern int ncclCommInitRank(void **comm, int ranks, UniqueId id, int rank);
extern int ncclCommSplit(void *comm, int color, int key, void **new_comm, void *config);
extern int ncclCommDestroy(void *comm);
extern const char *ncclGetErrorString(int result);
extern int ncclGroupStart(void);
extern int ncclGroupEnd(void);
extern int ncclAllReduce(const void *, void *, size_t, int type, int op, void *comm, void *stream);
extern int ncclBroadcast(const void *, void *, size_t, int type, int root, void *comm, void *stream);
extern int ncclReduce(const void *, void *, size_t, int type, int op, int root, void *comm, void *stream);
extern int ncclAllGather(const void *, void *, size_t, int type, void *comm, void *stream);
extern int ncclReduceScatter(const void *, void *, size_t, int type, int op, void *comm, void *stream);
extern int ncclSend(const void *, size_t, int type, int peer, void *comm, void *stream);
extern int ncclRecv(void *, size_t, int type, int peer, void *comm, void *stream);

enum { FLOAT = 7, SUM = 0, MAX = 2, COUNT = 1 << 16 };

static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *), (*cuMemAlloc)(unsigned long long *, size_t);
static int (*cuStreamCreate)(void **, unsigned), (*cuStreamSynchronize)(void *);
static int gpus, rounds;
static UniqueId id;

static void check(int result, const char *what, int rank) {
    if (result == 0) return;
    fprintf(stderr, "rank %d: %s: %d\n", rank, what, result);
    _Exit(3);
}
#define NCCL(call) check(call, #call ": NCCL", rank)
#define CUDA(call) check(call, #call ": CUDA", rank)

static void *rank_of(void *argument) {
    int rank = (int)(size_t)argument;
    void *context, *comm, *half, *stream;
    unsigned long long in, out;
    int device;
    CUDA(cuDeviceGet(&device, rank));
    CUDA(cuDevicePrimaryCtxRetain(&context, device));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuMemAlloc(&in, COUNT * 4ull * (unsigned)gpus));
    CUDA(cuMemAlloc(&out, COUNT * 4ull * (unsigned)gpus));
    CUDA(cuStreamCreate(&stream, 1));
    void *from = (void *)in, *to = (void *)out;
    NCCL(ncclCommInitRank(&comm, gpus, id, rank));
    NCCL(ncclCommSplit(comm, rank % 2, rank, &half, NULL));
    int collectives = 0, sends = 0;
    for (int r = 0; r < rounds; r++) {
        size_t n = (size_t)64 << (r % 10);
        NCCL(ncclAllReduce(from, to, n, FLOAT, SUM, comm, stream));
        NCCL(ncclBroadcast(from, to, n, FLOAT, r % gpus, comm, stream));
        NCCL(ncclReduce(from, to, n, FLOAT, MAX, r % gpus, comm, stream));
        NCCL(ncclAllGather(from, to, n, FLOAT, comm, stream));
        NCCL(ncclReduceScatter(from, to, n, FLOAT, SUM, comm, stream));
        NCCL(ncclAllReduce(from, to, n, FLOAT, MAX, half, stream));
        NCCL(ncclGroupStart());
        NCCL(ncclAllReduce(from, to, n, FLOAT, SUM, comm, stream));
        NCCL(ncclAllReduce(from, to, n, FLOAT, SUM, comm, stream));
        NCCL(ncclGroupEnd());
        collectives += 8;
        NCCL(ncclGroupStart());
        NCCL(ncclSend(from, n, FLOAT, (rank + 1) % gpus, comm, stream));
        NCCL(ncclRecv(to, n, FLOAT, (rank + gpus - 1) % gpus, comm, stream));
        NCCL(ncclGroupEnd());
        sends++;
        if (r % 50 == 49) CUDA(cuStreamSynchronize(stream));
    }
    CUDA(cuStreamSynchronize(stream));
    NCCL(ncclCommDestroy(half));
    NCCL(ncclCommDestroy(comm));
    printf("rank %d: %d collectives, %d sends, %d receives\n", rank, collectives, sends, sends);
    return NULL;
}

int main(int count, char **arguments) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int version = 0, rank = 0;
    gpus = count > 1 ? atoi(arguments[1]) : 2;
    rounds = count > 2 ? atoi(arguments[2]) : 100;
    if (cuda == NULL || gpus < 2 || gpus > 64) {
        fprintf(stderr, "no CUDA driver, or a bad number of GPUs\n");
        return 2;
    }
    *(void **)&cuInit = dlsym(cuda, "cuInit");
    *(void **)&cuDeviceGet = dlsym(cuda, "cuDeviceGet");
    *(void **)&cuDevicePrimaryCtxRetain = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    *(void **)&cuCtxSetCurrent = dlsym(cuda, "cuCtxSetCurrent");
    *(void **)&cuMemAlloc = dlsym(cuda, "cuMemAlloc_v2");
    *(void **)&cuStreamCreate = dlsym(cuda, "cuStreamCreate");
    *(void **)&cuStreamSynchronize = dlsym(cuda, "cuStreamSynchronize");
    CUDA(cuInit(0));
    NCCL(ncclGetVersion(&version));
    NCCL(ncclGetUniqueId(&id));
    printf("nccl %d\n", version);
    pthread_t threads[64];
    for (size_t i = 0; i < (size_t)gpus; i++) pthread_create(&threads[i], NULL, rank_of, (void *)i);
    for (int i = 0; i < gpus; i++) pthread_join(threads[i], NULL);
    return 0;
}
