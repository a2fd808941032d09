/*
 * A CUDA runtime for tests, without a device. It really allocates and keeps a table of what is live, so that a
 * wrong address, a second free or a leak shows. Definitions on the command line make its variants:
 *   FAKE_VERSION, FAKE_DRIVER    what the version functions answer
 *   FAKE_DEVICES                 how many devices there are
 *   FAKE_COUNT_ERROR             the error of cudaGetDeviceCount
 *   FAKE_WITHOUT_EVENT_QUERY     leaves one function out
 * What can change while it runs is set through the fake_ functions at the end.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 12080
#endif
#ifndef FAKE_DRIVER
#define FAKE_DRIVER 13000
#endif
#ifndef FAKE_DEVICES
#define FAKE_DEVICES 1
#endif
#ifndef FAKE_COUNT_ERROR
#define FAKE_COUNT_ERROR 0
#endif

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { TABLE = 4096, PAGE = 4096, WINDOW = 32 << 20 };

enum kind { ALLOCATION, REGISTRATION, EVENT, KINDS };

struct entry {
    uintptr_t address;
    size_t bytes;
};

struct call {
    const char *name;
    size_t count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct entry tables[KINDS][TABLE];
static struct call calls[32];
static const char *failing_call;
static int failing_code;
static size_t limit = SIZE_MAX;
static size_t misalignment;
static int busy, shared_pages;
static size_t misuses, cold_pages;
static size_t last_bytes, last_flags, last_address, last_stream;
static _Thread_local int last_error;

/* Counts a call and says whether it is to fail. The lock is held from here until leave(). */
static int enter(const char *name) {
    pthread_mutex_lock(&lock);
    struct call *call = calls;
    while (call->name && strcmp(call->name, name))
        call++;
    call->name = name;
    call->count++;
    return failing_call && !strcmp(failing_call, name) ? failing_code : 0;
}

static int leave(int code) {
    if (code)
        last_error = code;
    pthread_mutex_unlock(&lock);
    return code;
}

/* The entry of a live address, or for 0 a free entry. */
static struct entry *find(enum kind kind, uintptr_t address) {
    for (int i = 0; i < TABLE; i++)
        if (tables[kind][i].address == address)
            return &tables[kind][i];
    return NULL;
}

static void add(enum kind kind, void *address, size_t bytes) {
    struct entry *entry = find(kind, 0);
    if (!entry)
        abort();
    *entry = (struct entry){(uintptr_t)address, bytes};
}

static size_t live(enum kind kind) {
    size_t total = 0;
    for (int i = 0; i < TABLE; i++)
        total += tables[kind][i].address != 0;
    return total;
}

static size_t live_bytes(enum kind kind) {
    size_t total = 0;
    for (int i = 0; i < TABLE; i++)
        total += tables[kind][i].bytes;
    return total;
}

/* Memory that holds rubbish, as memory that CUDA used before does. */
static void *allocate(size_t bytes) {
    char *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return NULL;
    if (!shared_pages) {
        memset(address, 0xA5, bytes);
        return address;
    }
    /* The same few pages everywhere: a large block costs next to nothing. */
    int file = memfd_create("fake_cudart", 0);
    if (file < 0 || ftruncate(file, WINDOW))
        abort();
    for (size_t offset = 0; offset < bytes; offset += WINDOW) {
        size_t length = bytes - offset < WINDOW ? bytes - offset : WINDOW;
        if (mmap(address + offset, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
            abort();
    }
    close(file);
    return address;
}

int cudaRuntimeGetVersion(int *version) {
    int code = enter(__func__);
    *version = FAKE_VERSION;
    return leave(code);
}

int cudaDriverGetVersion(int *version) {
    int code = enter(__func__);
    *version = FAKE_DRIVER;
    return leave(code);
}

int cudaGetDeviceCount(int *count) {
    int code = enter(__func__);
    *count = FAKE_DEVICES;
    return leave(code ? code : FAKE_COUNT_ERROR);
}

int cudaHostAlloc(void **result, size_t bytes, unsigned flags) {
    int code = enter(__func__);
    last_flags = flags;
    last_bytes = bytes;
    if (!code && live_bytes(ALLOCATION) + bytes > limit)
        code = OUT_OF_MEMORY;
    if (code)
        return leave(code);
    char *address = allocate(bytes + misalignment);
    if (!address)
        return leave(OUT_OF_MEMORY);
    address += misalignment;
    add(ALLOCATION, address, bytes);
    last_address = (uintptr_t)address;
    *result = address;
    return leave(0);
}

int cudaFreeHost(void *address) {
    int code = enter(__func__);
    struct entry *entry = address ? find(ALLOCATION, (uintptr_t)address) : NULL;
    if (!entry) {
        misuses++;
        return leave(INVALID_VALUE);
    }
    if (code)
        return leave(code);
    size_t within = (uintptr_t)address % PAGE;
    munmap((char *)address - within, entry->bytes + within);
    *entry = (struct entry){0, 0};
    return leave(0);
}

int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    int code = enter(__func__);
    last_flags = flags;
    last_bytes = bytes;
    last_address = (uintptr_t)address;
    if (!address || (uintptr_t)address % PAGE || !bytes || bytes % PAGE) {
        misuses++;
        code = INVALID_VALUE;
    }
    if (!code && live_bytes(REGISTRATION) + bytes > limit)
        code = OUT_OF_MEMORY;
    for (int i = 0; i < TABLE && !code; i++) {
        struct entry *entry = &tables[REGISTRATION][i];
        if (entry->address < (uintptr_t)address + bytes && (uintptr_t)address < entry->address + entry->bytes)
            code = ALREADY_REGISTERED;
    }
    if (code)
        return leave(code);
    for (size_t page = 0; page < bytes / PAGE; page++) {
        unsigned char resident;
        if (mincore((char *)address + page * PAGE, PAGE, &resident)) {
            misuses++;
            break;
        }
        cold_pages += !(resident & 1);
    }
    add(REGISTRATION, address, bytes);
    return leave(0);
}

int cudaHostUnregister(void *address) {
    int code = enter(__func__);
    if (code)
        return leave(code);
    struct entry *entry = address ? find(REGISTRATION, (uintptr_t)address) : NULL;
    if (!entry) {
        misuses++;
        return leave(NOT_REGISTERED);
    }
    /* It has to be mapped still. */
    unsigned char resident;
    if (mincore(address, PAGE, &resident))
        misuses++;
    *entry = (struct entry){0, 0};
    return leave(0);
}

const char *cudaGetErrorName(int code) {
    enter(__func__);
    leave(0);
    return code == 719 ? "cudaErrorLaunchFailure" : "cudaErrorUnknown";
}

const char *cudaGetErrorString(int code) {
    enter(__func__);
    leave(0);
    return code == 719 ? "unspecified launch failure" : "unknown error";
}

int cudaGetLastError(void) {
    enter(__func__);
    leave(0);
    int code = last_error;
    last_error = 0;
    return code;
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    int code = enter(__func__);
    last_flags = flags;
    if (code)
        return leave(code);
    *event = malloc(1);
    add(EVENT, *event, 1);
    return leave(0);
}

int cudaEventRecord(void *event, void *stream) {
    int code = enter(__func__);
    last_stream = (uintptr_t)stream;
    return leave(code ? code : find(EVENT, (uintptr_t)event) ? 0 : INVALID_HANDLE);
}

#ifndef FAKE_WITHOUT_EVENT_QUERY
int cudaEventQuery(void *event) {
    int code = enter(__func__);
    if (!code && !find(EVENT, (uintptr_t)event))
        code = INVALID_HANDLE;
    return leave(code ? code : busy ? NOT_READY : 0);
}
#endif

int cudaEventSynchronize(void *event) {
    int code = enter(__func__);
    while (!code && busy)
        pthread_cond_wait(&changed, &lock);
    return leave(code ? code : find(EVENT, (uintptr_t)event) ? 0 : INVALID_HANDLE);
}

int cudaEventDestroy(void *event) {
    int code = enter(__func__);
    struct entry *entry = event ? find(EVENT, (uintptr_t)event) : NULL;
    if (!entry) {
        misuses++;
        return leave(INVALID_HANDLE);
    }
    free(event);
    *entry = (struct entry){0, 0};
    return leave(code);
}

/* Makes one function fail with a code; 0 ends it. The name has to live on. */
void fake_fail(const char *name, int code) {
    pthread_mutex_lock(&lock);
    failing_call = code ? name : NULL;
    failing_code = code;
    pthread_mutex_unlock(&lock);
}

/* Bytes that may be allocated, and as many that may be registered. */
void fake_set_limit(size_t bytes) { limit = bytes; }
/* Bytes between a page's beginning and the addresses of cudaHostAlloc. */
void fake_set_misalignment(size_t bytes) { misalignment = bytes; }
/* Whether allocations are made of the same few pages over and over. */
void fake_set_shared_pages(size_t yes) { shared_pages = yes != 0; }

/* Whether the work before every event is still going on. */
void fake_set_busy(size_t yes) {
    pthread_mutex_lock(&lock);
    busy = yes != 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* How often a function was called. */
size_t fake_calls(const char *name) {
    for (struct call *call = calls; call->name; call++)
        if (!strcmp(call->name, name))
            return call->count;
    return 0;
}

/* How often any function was called. */
size_t fake_all_calls(void) {
    size_t total = 0;
    for (struct call *call = calls; call->name; call++)
        total += call->count;
    return total;
}

size_t fake_busy(void) {
    pthread_mutex_lock(&lock);
    int now = busy;
    pthread_mutex_unlock(&lock);
    return now;
}

size_t fake_live_allocations(void) { return live(ALLOCATION); }
size_t fake_live_registrations(void) { return live(REGISTRATION); }
size_t fake_live_events(void) { return live(EVENT); }
size_t fake_last_bytes(void) { return last_bytes; }
size_t fake_last_address(void) { return last_address; }
size_t fake_last_flags(void) { return last_flags; }
size_t fake_last_stream(void) { return last_stream; }
/* Calls with an address that is not live, or not what CUDA needs. */
size_t fake_misuses(void) { return misuses; }
/* Pages that were registered before they were faulted in. */
size_t fake_cold_pages(void) { return cold_pages; }
/* The error that the calling thread's next cudaGetLastError would give. */
size_t fake_pending_error(void) { return last_error; }
