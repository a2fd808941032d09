/*
 * The CUDA runtime that PyTorch finds instead of CUDA's, by LD_PRELOAD: the one of the tests (fake_cudart.c: pinned
 * memory, streams, events, copies, the order of all accesses), and here the rest of what PyTorch calls. The device's
 * memory is memory of the process. Kernels do nothing: operators.cpp computes in their place.
 *
 * PyTorch's streams were not made by fake_cudart.c, which takes them all for its computing stream: it computes at once.
 * The streams that memascend makes run as late as CUDA allows (lazy), so that a wait that is missing gives wrong values.
 *
 *   REHEARSAL_MIB           MiB of the device, 8192 by default
 *   CUDA_VISIBLE_DEVICES    empty: there is no device
 */
#include "fake_cudart.c"

/* CUDA cuts small requests for pinned memory out of larger ones (seen with driver 580 on an H200). */
__attribute__((constructor)) static void cut_small_requests(void) {
    misalignment = 1024;
    misaligned_bytes = 1 << 20;
}

#include "driver_types.h"

enum { BLOCKS = 65536, NO_DEVICE = 100, SEGMENT = 2 << 20, RUBBISH_MAX = 64 << 20 };

/* ---- the process ---- */

__attribute__((constructor)) static void begin(void) {
    const char *mib = getenv("REHEARSAL_MIB"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    device_memory = (mib ? strtoull(mib, NULL, 10) : 8192) << 20;
    lazy = 1;
    if (visible && !*visible)
        count_error = NO_DEVICE;
}

/* A process that went wrong and did not notice must not pass for one that went well. */
__attribute__((destructor)) static void end(void) {
    if (!races.count && !misuses.count)
        return;
    fprintf(stderr, "stand-in device: %zu races, %zu misuses\n%s%s", races.count, misuses.count, races.text,
            misuses.text);
    if (getenv("REHEARSAL_STRICT"))
        _exit(86);
}

/* ---- memory of the device ---- */

static struct {
    uintptr_t low, high;
} blocks[BLOCKS];
static int blocks_used;

/* The block that holds an address, or the first free one for 0; -1 if there is none. Under the lock. */
static int block_of(uintptr_t address) {
    for (int i = 0; i < (address ? blocks_used : BLOCKS); i++)
        if (address ? blocks[i].low <= address && address < blocks[i].high : !blocks[i].low)
            return i;
    return -1;
}

int cudaMalloc(void **result, size_t bytes) {
    int code = enter(__func__);
    /* As a device does, in whole segments. */
    bytes = (bytes + SEGMENT - 1) & ~(size_t)(SEGMENT - 1);
    if (!code && device_used + bytes > device_memory)
        code = OUT_OF_MEMORY;
    if (code)
        return leave(code);
    /* Shared, since a process that forks has no copy of a device's memory. */
    char *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int free_block = block_of(0);
    if (address == MAP_FAILED || free_block < 0)
        abort();
    /* NaN in every dtype, for what is read before it is written. A large block would take real memory. */
    if (bytes <= RUBBISH_MAX)
        memset(address, 0xFF, bytes);
    blocks[free_block].low = (uintptr_t)address;
    blocks[free_block].high = (uintptr_t)address + bytes;
    if (free_block >= blocks_used)
        blocks_used = free_block + 1;
    device_used += bytes;
    *result = address;
    return leave(0);
}

/* The host waits until all streams are done, and knows it. */
static void wait_for_all(void) {
    run_all();
    wake(sleeps);
    for (int i = 0; i < STREAMS; i++)
        join(&host, &streams[i].clock);
}

int cudaFree(void *address) {
    int code = enter(__func__);
    if (code || !address)
        return leave(code);
    wait_for_all(); /* As CUDA's does. */
    int block = block_of((uintptr_t)address);
    if (block < 0 || blocks[block].low != (uintptr_t)address) {
        note(&misuses, "cudaFree: %p is not allocated\n", address);
        return leave(INVALID_VALUE);
    }
    munmap(address, blocks[block].high - blocks[block].low);
    device_used -= blocks[block].high - blocks[block].low;
    blocks[block].low = blocks[block].high = 0;
    return leave(0);
}

int cudaMallocAsync(void **result, size_t bytes, void *stream) {
    (void)stream;
    return cudaMalloc(result, bytes);
}

int cudaFreeAsync(void *address, void *stream) {
    (void)stream;
    return cudaFree(address);
}

/* What the host asks for and waits for, and what the computing stream does at once. */
int cudaMemcpy(void *target, const void *source, size_t bytes, int kind) {
    (void)kind;
    int code = enter(__func__);
    if (code)
        return leave(code);
    wait_for_all();
    memmove(target, source, bytes);
    return leave(0);
}

int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes, void *stream) {
    (void)to, (void)from, (void)stream;
    memmove(target, source, bytes);
    return 0;
}

int cudaMemset(void *target, int value, size_t bytes) {
    memset(target, value, bytes);
    return 0;
}

int cudaMemsetAsync(void *target, int value, size_t bytes, void *stream) {
    (void)stream;
    return cudaMemset(target, value, bytes);
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    int code = enter(__func__);
    memset(found, 0, sizeof *found);
    if (block_of((uintptr_t)address) >= 0 && address) {
        found->type = cudaMemoryTypeDevice;
        found->devicePointer = (void *)address;
    } else if (is_pinned(address, 1)) {
        found->type = cudaMemoryTypeHost;
        found->hostPointer = found->devicePointer = (void *)address;
    } else {
        found->type = cudaMemoryTypeUnregistered;
        found->hostPointer = (void *)address;
    }
    return leave(code);
}

/* ---- streams and events ---- */

int cudaDeviceSynchronize(void) {
    int code = enter(__func__);
    if (!code)
        wait_for_all();
    return leave(code);
}

int cudaStreamSynchronize(void *handle) {
    int code = enter(__func__);
    struct stream *stream = stream_of(handle);
    if (!code && !stream)
        code = INVALID_HANDLE;
    if (code)
        return leave(code);
    while (stream->first)
        run_next(stream);
    wake(stream->sleep);
    join(&host, &stream->clock);
    return leave(0);
}

int cudaStreamQuery(void *handle) {
    int code = enter(__func__);
    struct stream *stream = stream_of(handle);
    if (!code && !stream)
        code = INVALID_HANDLE;
    if (!code && (stream->first || stream->sleep > slept)) {
        queries++;
        progress();
        code = NOT_READY;
    }
    if (!code)
        join(&host, &stream->clock);
    return leave(code);
}

/* A handle that fake_cudart.c does not know, different for each of PyTorch's streams. */
int cudaStreamCreateWithPriority(void **result, unsigned flags, int priority) {
    static uintptr_t handles = 0x1000;
    (void)flags, (void)priority;
    *result = (void *)__atomic_add_fetch(&handles, 16, __ATOMIC_RELAXED);
    return 0;
}

int cudaStreamCreate(void **result) { return cudaStreamCreateWithPriority(result, 0, 0); }

int cudaStreamGetPriority(void *stream, int *priority) {
    (void)stream;
    *priority = 0;
    return 0;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

int cudaStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return 0;
}

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
    if (id)
        *id = 0;
    return cudaStreamIsCapturing(stream, status);
}

int cudaThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return 0;
}

int cudaEventCreate(void **result) { return cudaEventCreateWithFlags(result, 0); }

int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}

int cudaEventElapsedTime(float *milliseconds, void *first, void *second) {
    int code = enter(__func__);
    const struct event *events[2] = {first, second};
    uint64_t at[2] = {0, 0};
    for (int i = 0; i < 2 && !code; i++) {
        if (!find(EVENT, (uintptr_t)events[i]) || !events[i]->mark)
            code = INVALID_HANDLE;
        else
            at[i] = events[i]->mark->made;
    }
    *milliseconds = at[1] > at[0] ? (float)(at[1] - at[0]) / 1e6f : 0;
    return leave(code);
}

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return 0;
}

int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
    (void)flags;
    function(stream, 0, data);
    return 0;
}

/* ---- the device ---- */

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    (void)device;
    memset(found, 0, sizeof *found);
    strcpy(found->name, "stand-in device");
    memcpy(found->uuid.bytes, "stand-in device", sizeof found->uuid.bytes);
    found->totalGlobalMem = device_memory;
    found->major = 9;
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    found->l2CacheSize = 50 << 20;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = INT32_MAX;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = properties.major;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = properties.multiProcessorCount;
        break;
    case cudaDevAttrWarpSize:
        *value = properties.warpSize;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = properties.maxThreadsPerBlock;
        break;
    default:
        *value = 0;
    }
    return 0;
}

int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    (void)device;
    snprintf(text, (size_t)length, "0000:00:00.0");
    return 0;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return 0;
}

int cudaPeekAtLastError(void) { return last_error; }

/* The driver's functions are not there: PyTorch does without what it asks them for. */
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *result) {
    (void)name, (void)version, (void)flags;
    *function = NULL;
    if (result)
        *result = 1;
    return 0;
}

/* ---- kernels ---- */

/* Constants and tables that PyTorch writes for its kernels. */
int cudaGetSymbolAddress(void **result, const void *symbol) {
    static char memory[1 << 16];
    (void)symbol;
    *result = memory;
    return 0;
}

int cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, int kind) {
    (void)symbol, (void)source, (void)bytes, (void)offset, (void)kind;
    return 0;
}

int __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return 0;
}

/* A kernel that is launched all the same is one whose operator is not computed by the CPU: its result would be rubbish. */
static int launch(const char *name) {
    int code = enter(name);
    note(&misuses, "%s: a kernel of PyTorch was launched, which no operator of the stand-in replaces\n", name);
    return leave(code);
}

int __cudaLaunchKernel(void) { return launch(__func__); }
int cudaLaunchKernel(void) { return launch(__func__); }
int cudaLaunchKernelExC(void) { return launch(__func__); }

int cudaFuncGetAttributes(void *attributes, const void *function) {
    (void)attributes, (void)function;
    return 0;
}

int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_at_once, const void *function, int threads,
                                                           size_t shared, unsigned flags) {
    (void)function, (void)threads, (void)shared, (void)flags;
    *blocks_at_once = 4;
    return 0;
}

int cudaProfilerStart(void) { return 0; }
int cudaProfilerStop(void) { return 0; }
