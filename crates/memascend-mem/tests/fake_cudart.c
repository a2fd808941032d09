/*
 * A CUDA runtime for tests, without a device. It really allocates and keeps a table of what is live, so that a
 * wrong address, a second free or a leak shows. Definitions on the command line make its variants:
 *   FAKE_VERSION, FAKE_DRIVER    what the version functions answer
 *   FAKE_DEVICES                 how many devices there are
 *   FAKE_WITHOUT_DRIVER          the driver cannot be asked which devices have contexts
 *   FAKE_COUNT_ERROR             the error of cudaGetDeviceCount
 *   FAKE_WITHOUT_EVENT_QUERY     leaves one function out
 *   FAKE_TABLE                   how many allocations, registrations or events can be live
 * What can change while it runs is set through the fake_ functions at the end.
 *
 * The memory of the device is memory of the process, and copies really copy. What a stream does, it does when it is
 * told; after fake_set_lazy(1) the streams made here keep it in queues, and run it as late as CUDA allows. A handle
 * that was not made here is the computing stream: the test computes by itself, at once, and what that stream is to wait
 * for is run before the wait returns.
 *
 * Races do not depend on what ran when. Vector clocks (Mattern 1989) give the order that waits and events make: for
 * each stream, the number of its last access that came before. Two accesses to the same bytes are a race if one of
 * them writes and neither is before the other; it is found when the second is put into its stream. What all threads of
 * the host know is one clock. Of what the host itself does to memory, only what fake_access is told is seen; the rest
 * shows as wrong values where a copy is late.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
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
#ifndef FAKE_TABLE
#define FAKE_TABLE 4096
#endif

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { TABLE = FAKE_TABLE, PAGE = 4096, WINDOW = 32 << 20 };
/* Streams that can be told apart: the computing one, and those made here. */
enum { COMPUTE = 0, STREAMS = 64 };
enum { NON_BLOCKING = 1, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };

enum kind { ALLOCATION, REGISTRATION, EVENT, KINDS };

struct entry {
    uintptr_t address;
    size_t bytes;
};

struct call {
    const char *name;
    size_t count, failures;
};

/* What went wrong, and the first few times in words. */
struct report {
    size_t count;
    char text[4096];
};

/* By stream, the number of the last operation that is before. */
struct clock {
    uint64_t before[STREAMS];
};

/* What one cudaEventRecord marked. An event refers to its latest one, a wait to the one that was the latest then. */
struct mark {
    size_t references;
    struct stream *stream;
    struct clock clock;
    uint64_t since;
    /* The last sleep before it, see fake_sleep, and nanoseconds of the clock when it was made. */
    uint64_t sleep, made;
    int done;
};

struct event {
    struct mark *mark;
    int device;
};

enum operation { COPY, RECORD, WAIT };

struct task {
    struct task *next;
    enum operation operation;
    struct mark *mark;
    char *target;
    const char *source;
    size_t bytes;
    uint64_t since;
};

/* Bytes from low to below high, and the last access of one stream to them. */
struct span {
    uintptr_t low, high;
    uint64_t number;
    const char *name;
};

/* Spans that do not overlap, ascending. */
struct spans {
    struct span *items;
    size_t count, room;
};

/* What raised one number of a stream's clock to `upto`: a wait, by its number, for a mark of `from`; or the host. */
struct step {
    uint64_t upto;
    size_t wait;
    struct stream *from;
};

struct steps {
    struct step *items;
    size_t count, room;
};

struct stream {
    int live, device;
    struct clock clock;
    uint64_t sleep;
    struct steps steps[STREAMS];
    struct task *first, **last;
    struct spans reads, writes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct entry tables[KINDS][TABLE];
static int used[KINDS];
static struct call calls[64];
static const char *failing_call;
static int failing_code;
static int count_error = FAKE_COUNT_ERROR;
static size_t spared_calls;
static size_t limit = SIZE_MAX;
static size_t misalignment;
/* The largest request whose address is not a page's. */
static size_t misaligned_bytes = SIZE_MAX;
static int busy, shared_pages;
static size_t cold_pages;
static size_t last_bytes, last_flags, last_address, last_stream;
static _Thread_local int last_error, current_device;
static _Thread_local const char *access_name = "an access";

static struct report misuses, races;
static struct stream streams[STREAMS];
static struct clock host;
static int lazy;
static uint64_t lateness, queries, seed = 1;
/* How often streams were put to sleep, and the last of these sleeps that is over. */
static uint64_t sleeps, slept;
static size_t pending, contexts, computing_stream, device_memory = (size_t)24 << 30, device_used;
static size_t waits, waits_room, skipped_wait, syncs, skipped_sync, all_copies, skipped_copy;
/* In the place of a number: all of them. */
static const size_t EVERY = SIZE_MAX;
static struct {
    char redundant, used;
} *wait_books;
static size_t copies[3], copied_bytes[3], pageable_copies, early_reuses;

static void note(struct report *report, const char *format, ...) {
    report->count++;
    size_t length = strlen(report->text);
    va_list values;
    va_start(values, format);
    vsnprintf(report->text + length, sizeof report->text - length, format, values);
    va_end(values);
}

/* Counts a call and says whether it is to fail. The lock is held from here until leave(). */
static int enter(const char *name) {
    pthread_mutex_lock(&lock);
    struct call *call = calls;
    while (call->name && strcmp(call->name, name))
        call++;
    call->name = name;
    call->count++;
    if (!failing_call || strcmp(failing_call, name) || (spared_calls && spared_calls--))
        return 0;
    call->failures++;
    return failing_code;
}

static int leave(int code) {
    if (code)
        last_error = code;
    pthread_mutex_unlock(&lock);
    return code;
}

/* The entry of a live address, or for 0 a free entry. */
static struct entry *find(enum kind kind, uintptr_t address) {
    for (int i = 0; i < (address ? used[kind] : TABLE); i++)
        if (tables[kind][i].address == address)
            return &tables[kind][i];
    return NULL;
}

static void add(enum kind kind, void *address, size_t bytes) {
    struct entry *entry = find(kind, 0);
    if (!entry)
        abort();
    *entry = (struct entry){(uintptr_t)address, bytes};
    int place = (int)(entry - tables[kind]);
    if (place >= used[kind])
        used[kind] = place + 1;
}

static size_t live(enum kind kind) {
    size_t total = 0;
    for (int i = 0; i < used[kind]; i++)
        total += tables[kind][i].address != 0;
    return total;
}

static size_t live_bytes(enum kind kind) {
    size_t total = 0;
    for (int i = 0; i < used[kind]; i++)
        total += tables[kind][i].bytes;
    return total;
}

static size_t whole_pages(size_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* Memory that holds rubbish, as memory that CUDA used before does. An inaccessible page follows it: adjacent blocks would
   be one mapping, and tests find by their mappings what blocks cost. */
static void *allocate(size_t bytes) {
    size_t length = whole_pages(bytes) + PAGE;
    char *address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return NULL;
    if (mprotect(address + length - PAGE, PAGE, PROT_NONE))
        abort();
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

/* ---- order ---- */

static void join(struct clock *clock, const struct clock *other) {
    for (int i = 0; i < STREAMS; i++)
        if (clock->before[i] < other->before[i])
            clock->before[i] = other->before[i];
}

static int contains(const struct clock *clock, const struct clock *other) {
    for (int i = 0; i < STREAMS; i++)
        if (clock->before[i] < other->before[i])
            return 0;
    return 1;
}

static int number_of(const struct stream *stream) { return (int)(stream - streams); }

/* Orders what a stream does from now on after `clock`, for a wait; or for the host, with neither wait nor `from`. */
static void follow(struct stream *stream, const struct clock *clock, size_t wait, struct stream *from) {
    for (int i = 0; i < STREAMS; i++) {
        if (stream->clock.before[i] >= clock->before[i])
            continue;
        struct steps *steps = &stream->steps[i];
        if (steps->count == steps->room) {
            steps->room = 2 * steps->room + 64;
            steps->items = realloc(steps->items, steps->room * sizeof *steps->items);
            if (!steps->items)
                abort();
        }
        steps->items[steps->count++] = (struct step){clock->before[i], wait, from};
        stream->clock.before[i] = clock->before[i];
    }
}

static void follow_host(struct stream *stream) { follow(stream, &host, 0, NULL); }

/* Marks the waits as used that put the access `number` of stream `other` before what a stream is at. */
static void credit(const struct stream *stream, int other, uint64_t number) {
    while (stream != &streams[other]) {
        const struct steps *steps = &stream->steps[other];
        size_t low = 0, high = steps->count;
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (steps->items[middle].upto >= number)
                high = middle;
            else
                low = middle + 1;
        }
        if (!steps->items[low].wait)
            return; /* It was the host that knew. */
        wait_books[steps->items[low].wait - 1].used = 1;
        stream = steps->items[low].from;
    }
}

/* Begins the next operation of a stream that accesses memory: it comes after what the host knows. */
static void advance(struct stream *stream) {
    follow_host(stream);
    stream->clock.before[number_of(stream)]++;
}

/* Index of the first span that ends beyond an address. */
static size_t beyond(const struct spans *spans, uintptr_t address) {
    size_t low = 0, high = spans->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (spans->items[middle].high > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The first access of another stream to the bytes, in `spans`, that is not before `clock`. */
static const struct span *unordered(const struct spans *spans, int number, const struct clock *clock, uintptr_t low,
                                    uintptr_t high) {
    for (size_t i = beyond(spans, low); i < spans->count && spans->items[i].low < high; i++)
        if (spans->items[i].number > clock->before[number])
            return &spans->items[i];
    return NULL;
}

/* Puts an access in, in place of the same stream's earlier ones to the same bytes. */
static void insert(struct stream *stream, struct spans *spans, struct span span) {
    if (spans->count + 2 > spans->room) {
        /* What the host knows to be over is before all that is still to come. */
        size_t kept = 0;
        for (size_t i = 0; i < spans->count; i++)
            if (spans->items[i].number > host.before[number_of(stream)])
                spans->items[kept++] = spans->items[i];
        spans->count = kept;
        if (kept + 2 > spans->room / 2) {
            spans->room = 2 * spans->room + 64;
            spans->items = realloc(spans->items, spans->room * sizeof *spans->items);
            if (!spans->items)
                abort();
        }
    }
    size_t first = beyond(spans, span.low), end = first;
    while (end < spans->count && spans->items[end].low < span.high)
        end++;
    struct span parts[3];
    size_t count = 0;
    if (first < end && spans->items[first].low < span.low) {
        parts[count] = spans->items[first];
        parts[count++].high = span.low;
    }
    parts[count++] = span;
    if (first < end && spans->items[end - 1].high > span.high) {
        parts[count] = spans->items[end - 1];
        parts[count++].low = span.high;
    }
    memmove(spans->items + first + count, spans->items + end, (spans->count - end) * sizeof *spans->items);
    memcpy(spans->items + first, parts, count * sizeof *parts);
    spans->count = spans->count - (end - first) + count;
}

static void credit_all(const struct stream *stream, int other, const struct spans *spans, uintptr_t low,
                       uintptr_t high) {
    for (size_t i = beyond(spans, low); i < spans->count && spans->items[i].low < high; i++)
        if (spans->items[i].number <= stream->clock.before[other])
            credit(stream, other, spans->items[i].number);
}

/* Registers an access of the operation that a stream is at. */
static void touch(struct stream *stream, const void *address, size_t bytes, int write, const char *name) {
    uintptr_t low = (uintptr_t)address, high = low + bytes;
    if (!bytes)
        return;
    uint64_t number = stream->clock.before[number_of(stream)];
    for (int i = 0; i < STREAMS; i++) {
        if (&streams[i] == stream)
            continue;
        credit_all(stream, i, &streams[i].writes, low, high);
        if (write)
            credit_all(stream, i, &streams[i].reads, low, high);
        const struct span *other = unordered(&streams[i].writes, i, &stream->clock, low, high);
        const char *did = "writes";
        if (!other && write) {
            other = unordered(&streams[i].reads, i, &stream->clock, low, high);
            did = "reads";
        }
        if (other)
            note(&races,
                 "%s (stream %d, operation %llu) %s %#zx to %#zx, %s (stream %d, operation %llu) %s %#zx to %#zx: "
                 "nothing orders them\n",
                 name, number_of(stream), (unsigned long long)number, write ? "writes" : "reads", (size_t)low,
                 (size_t)high, other->name, i, (unsigned long long)other->number, did, (size_t)other->low,
                 (size_t)other->high);
    }
    insert(stream, write ? &stream->writes : &stream->reads, (struct span){low, high, number, name});
}

static void drop(struct mark *mark) {
    if (mark && !--mark->references)
        free(mark);
}

static void finish(struct mark *mark);

/* Ends a sleep, because the host waits for what comes after it. */
static void wake(uint64_t sleep) {
    if (slept < sleep)
        slept = sleep;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Runs the next operation of a stream, and before it what it waits for. */
static void run_next(struct stream *stream) {
    struct task *task = stream->first;
    if (task->operation == WAIT)
        finish(task->mark);
    else if (task->operation == COPY)
        memmove(task->target, task->source, task->bytes);
    else
        task->mark->done = 1;
    stream->first = task->next;
    if (!stream->first)
        stream->last = &stream->first;
    pending--;
    drop(task->mark);
    free(task);
}

/* Runs what a mark needs, in whatever streams. It ends: a wait refers to a mark that was made before it. */
static void finish(struct mark *mark) {
    while (!mark->done)
        run_next(mark->stream);
}

static void run_all(void) {
    for (int i = 0; i < STREAMS; i++)
        while (streams[i].first)
            run_next(&streams[i]);
}

/* The stream of a handle, NULL if it is one that was destroyed. What was not made here is the computing stream. */
static struct stream *stream_of(void *handle) {
    uintptr_t address = (uintptr_t)handle;
    if (address < (uintptr_t)streams || address >= (uintptr_t)(streams + STREAMS))
        return &streams[COMPUTE];
    struct stream *stream = handle;
    return stream->live ? stream : NULL;
}

/* The stream that fake_access is of: the default stream, or another one that a program computes on. */
static struct stream *computing(void) { return stream_of((void *)computing_stream); }

/* Puts a task into a stream. A computing stream never keeps one. */
static void enqueue(struct stream *stream, struct task task) {
    if (task.mark)
        task.mark->references++;
    task.since = queries;
    struct task *kept = malloc(sizeof *kept);
    *kept = task;
    if (!stream->first)
        stream->last = &stream->first;
    *stream->last = kept;
    stream->last = &kept->next;
    pending++;
    while ((!lazy || stream == &streams[COMPUTE] || stream == computing()) && stream->first)
        run_next(stream);
}

/* Whether all of a range is page-locked by this runtime. */
static int is_pinned(const void *address, size_t bytes) {
    for (int kind = ALLOCATION; kind <= REGISTRATION; kind++)
        for (int i = 0; i < used[kind]; i++) {
            struct entry *entry = &tables[kind][i];
            if (entry->address && entry->address <= (uintptr_t)address &&
                (uintptr_t)address + bytes <= entry->address + entry->bytes)
                return 1;
        }
    return 0;
}

/* An access of a copy that the host's use of the bytes, for writing or reading, does not come after for certain. */
static const struct span *unknown_to_host(const struct entry *bytes, int write, int *number) {
    uintptr_t low = bytes->address, high = low + bytes->bytes;
    for (*number = COMPUTE + 1; *number < STREAMS; ++*number) {
        const struct span *found = unordered(&streams[*number].writes, *number, &host, low, high);
        if (!found && write)
            found = unordered(&streams[*number].reads, *number, &host, low, high);
        if (found)
            return found;
    }
    return NULL;
}

/* Counts host memory that is given up before the host knows that the copies from and to it are done. */
static void check_unused(const struct entry *entry, const char *call) {
    int number;
    const struct span *found = unknown_to_host(entry, 1, &number);
    if (!found)
        return;
    note(&misuses, "%s: the host does not know that %s (stream %d, operation %llu) at %#zx is done\n", call,
         found->name, number, (unsigned long long)found->number, (size_t)found->low);
    run_all();
}

/* What makes a context on the calling thread's device, where there is none. */
static void use_device(void) { contexts |= (size_t)1 << current_device; }

/* ---- CUDA's functions ---- */

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
    return leave(code ? code : count_error);
}

int cudaHostAlloc(void **result, size_t bytes, unsigned flags) {
    int code = enter(__func__);
    use_device();
    last_flags = flags;
    last_bytes = bytes;
    if (!code && live_bytes(ALLOCATION) + bytes > limit)
        code = OUT_OF_MEMORY;
    if (code)
        return leave(code);
    size_t shift = bytes <= misaligned_bytes ? misalignment : 0;
    char *address = allocate(bytes + shift);
    if (!address)
        return leave(OUT_OF_MEMORY);
    address += shift;
    add(ALLOCATION, address, bytes);
    last_address = (uintptr_t)address;
    *result = address;
    return leave(0);
}

int cudaFreeHost(void *address) {
    int code = enter(__func__);
    struct entry *entry = address ? find(ALLOCATION, (uintptr_t)address) : NULL;
    if (!entry) {
        note(&misuses, "cudaFreeHost: %p is not allocated\n", address);
        return leave(INVALID_VALUE);
    }
    if (code)
        return leave(code);
    check_unused(entry, "cudaFreeHost");
    size_t within = (uintptr_t)address % PAGE;
    munmap((char *)address - within, whole_pages(entry->bytes + within) + PAGE);
    *entry = (struct entry){0, 0};
    return leave(0);
}

int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    int code = enter(__func__);
    use_device();
    last_flags = flags;
    last_bytes = bytes;
    last_address = (uintptr_t)address;
    if (!address || (uintptr_t)address % PAGE || !bytes || bytes % PAGE) {
        note(&misuses, "cudaHostRegister: %p and %zu bytes are not pages\n", address, bytes);
        code = INVALID_VALUE;
    }
    if (!code && live_bytes(REGISTRATION) + bytes > limit)
        code = OUT_OF_MEMORY;
    for (int i = 0; i < used[REGISTRATION] && !code; i++) {
        struct entry *entry = &tables[REGISTRATION][i];
        if (entry->address < (uintptr_t)address + bytes && (uintptr_t)address < entry->address + entry->bytes)
            code = ALREADY_REGISTERED;
    }
    if (code)
        return leave(code);
    for (size_t page = 0; page < bytes / PAGE; page++) {
        unsigned char resident;
        if (mincore((char *)address + page * PAGE, PAGE, &resident)) {
            note(&misuses, "cudaHostRegister: %p is not mapped\n", address);
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
        note(&misuses, "cudaHostUnregister: %p is not registered\n", address);
        return leave(NOT_REGISTERED);
    }
    check_unused(entry, "cudaHostUnregister");
    /* It has to be mapped still. */
    unsigned char resident;
    if (mincore(address, PAGE, &resident))
        note(&misuses, "cudaHostUnregister: %p is mapped no more\n", address);
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

/* As the runtime does since CUDA 12, it makes a context on the device. */
int cudaSetDevice(int device) {
    int code = enter(__func__);
    if (!code && (device < 0 || device >= FAKE_DEVICES))
        code = INVALID_DEVICE;
    if (!code) {
        current_device = device;
        contexts |= (size_t)1 << device;
    }
    return leave(code);
}

#ifndef FAKE_WITHOUT_DRIVER
/* The driver's, which programs ask without making a context. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    enter(__func__);
    *flags = 0;
    *active = contexts >> device & 1;
    leave(0);
    return 0;
}
#endif

int cudaGetDevice(int *device) {
    int code = enter(__func__);
    *device = current_device;
    return leave(code);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    int code = enter(__func__);
    use_device();
    *total_bytes = device_memory;
    *free_bytes = device_memory > device_used ? device_memory - device_used : 0;
    return leave(code);
}

int cudaStreamCreateWithFlags(void **result, unsigned flags) {
    int code = enter(__func__);
    use_device();
    last_flags = flags;
    if (flags != NON_BLOCKING)
        note(&misuses, "cudaStreamCreateWithFlags: waits of the default stream hide that others are left out\n");
    if (code)
        return leave(code);
    for (int i = COMPUTE + 1; i < STREAMS; i++) {
        struct stream *stream = &streams[i];
        /* The place of a destroyed stream is free when the host knows that all it did is over: no order is made up. */
        if (stream->live || stream->clock.before[i] > host.before[i])
            continue;
        stream->live = 1;
        stream->sleep = 0;
        stream->device = current_device;
        *result = stream;
        return leave(0);
    }
    return leave(OUT_OF_MEMORY);
}

int cudaStreamDestroy(void *handle) {
    int code = enter(__func__);
    struct stream *stream = stream_of(handle);
    if (!stream || stream == &streams[COMPUTE]) {
        note(&misuses, "cudaStreamDestroy: %p is no stream\n", handle);
        return leave(INVALID_HANDLE);
    }
    if (code)
        return leave(code);
    while (stream->first)
        run_next(stream);
    stream->live = 0;
    return leave(0);
}

int cudaStreamWaitEvent(void *handle, void *address, unsigned flags) {
    int code = enter(__func__);
    use_device();
    struct stream *stream = stream_of(handle);
    if (!code && flags) {
        note(&misuses, "cudaStreamWaitEvent: unknown flags %u\n", flags);
        code = INVALID_VALUE;
    }
    if (!code && (!stream || !address || !find(EVENT, (uintptr_t)address))) {
        note(&misuses, "cudaStreamWaitEvent: stream %p or event %p is not live\n", handle, address);
        code = INVALID_HANDLE;
    }
    if (code)
        return leave(code);
    struct mark *mark = ((struct event *)address)->mark;
    follow_host(stream);
    if (waits == waits_room) {
        waits_room = 2 * waits_room + 64;
        wait_books = realloc(wait_books, waits_room * sizeof *wait_books);
        if (!wait_books)
            abort();
    }
    wait_books[waits].used = 0;
    wait_books[waits++].redundant = !mark || contains(&stream->clock, &mark->clock);
    /* An event that was never recorded has nothing to wait for. */
    if (mark && waits != skipped_wait && skipped_wait != EVERY) {
        follow(stream, &mark->clock, waits, mark->stream);
        if (stream->sleep < mark->sleep)
            stream->sleep = mark->sleep;
        enqueue(stream, (struct task){.operation = WAIT, .mark = mark});
    }
    return leave(0);
}

int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, void *handle) {
    int code = enter(__func__);
    use_device();
    struct stream *stream = stream_of(handle);
    if (!code && !stream) {
        note(&misuses, "cudaMemcpyAsync: stream %p is not live\n", handle);
        code = INVALID_HANDLE;
    }
    if (!code && (!target || !source || (kind != HOST_TO_DEVICE && kind != DEVICE_TO_HOST))) {
        note(&misuses, "cudaMemcpyAsync: from %p to %p, kind %d\n", source, target, kind);
        code = INVALID_VALUE;
    }
    if (code)
        return leave(code);
    all_copies++;
    if (all_copies == skipped_copy || skipped_copy == EVERY)
        return leave(0);
    copies[kind]++;
    copied_bytes[kind] += bytes;
    pageable_copies += !is_pinned(kind == HOST_TO_DEVICE ? source : target, bytes);
    const char *name = kind == HOST_TO_DEVICE ? "a copy to the device" : "a copy to the host";
    advance(stream);
    touch(stream, source, bytes, 0, name);
    touch(stream, target, bytes, 1, name);
    enqueue(stream, (struct task){.operation = COPY, .target = target, .source = source, .bytes = bytes});
    return leave(0);
}

int cudaEventCreateWithFlags(void **result, unsigned flags) {
    int code = enter(__func__);
    use_device();
    last_flags = flags;
    if (code)
        return leave(code);
    struct event *event = malloc(sizeof *event);
    *event = (struct event){NULL, current_device};
    add(EVENT, event, sizeof *event);
    *result = event;
    return leave(0);
}

int cudaEventRecord(void *address, void *handle) {
    int code = enter(__func__);
    use_device();
    last_stream = (uintptr_t)handle;
    if (code)
        return leave(code);
    struct event *event = address;
    struct stream *stream = stream_of(handle);
    if (!event || !find(EVENT, (uintptr_t)event) || !stream)
        return leave(INVALID_HANDLE);
    if (stream != &streams[COMPUTE] && stream->device != event->device) {
        note(&misuses, "cudaEventRecord: an event of device %d in a stream of device %d: cudaSetDevice was left out\n",
             event->device, stream->device);
        return leave(INVALID_HANDLE);
    }
    early_reuses += event->mark && !contains(&host, &event->mark->clock);
    drop(event->mark);
    follow_host(stream);
    event->mark = malloc(sizeof *event->mark);
    *event->mark = (struct mark){.references = 1, .stream = stream, .clock = stream->clock, .since = queries};
    event->mark->sleep = stream->sleep;
    event->mark->made = now_ns();
    enqueue(stream, (struct task){.operation = RECORD, .mark = event->mark});
    return leave(0);
}

/* Whether the host is told that a mark was reached. What it knows already stays so. */
static int is_reached(const struct mark *mark) {
    if (!mark)
        return 1;
    int late = queries - mark->since < lateness && !contains(&host, &mark->clock);
    return mark->done && !late && mark->sleep <= slept;
}

#ifndef FAKE_WITHOUT_EVENT_QUERY
/* A number below `below`, by xorshift64 (Marsaglia 2003). */
static uint64_t draw(uint64_t below) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

/* Runs one operation of some stream, if one can run by now. */
static void progress(void) {
    struct stream *able[STREAMS];
    size_t count = 0;
    for (int i = 0; i < STREAMS; i++) {
        struct task *task = streams[i].first;
        if (task && queries - task->since >= lateness && (task->operation != WAIT || task->mark->done))
            able[count++] = &streams[i];
    }
    if (count)
        run_next(able[draw(count)]);
}

int cudaEventQuery(void *address) {
    int code = enter(__func__);
    if (!code && !find(EVENT, (uintptr_t)address))
        code = INVALID_HANDLE;
    if (code || busy)
        return leave(code ? code : NOT_READY);
    struct mark *mark = ((struct event *)address)->mark;
    if (!is_reached(mark)) {
        queries++;
        progress();
        return leave(NOT_READY);
    }
    if (mark)
        join(&host, &mark->clock);
    return leave(0);
}
#endif

int cudaEventSynchronize(void *address) {
    int code = enter(__func__);
    int waited = !code && busy;
    while (!code && busy)
        pthread_cond_wait(&changed, &lock);
    if (!code && !find(EVENT, (uintptr_t)address))
        code = INVALID_HANDLE;
    if (code)
        return leave(code);
    struct mark *mark = ((struct event *)address)->mark;
    waited |= !is_reached(mark);
    syncs += waited;
    if (!mark || (waited && syncs == skipped_sync))
        return leave(0);
    finish(mark);
    wake(mark->sleep);
    join(&host, &mark->clock);
    return leave(0);
}

int cudaEventDestroy(void *address) {
    int code = enter(__func__);
    struct event *event = address;
    struct entry *entry = event ? find(EVENT, (uintptr_t)event) : NULL;
    if (!entry) {
        note(&misuses, "cudaEventDestroy: %p is no event\n", address);
        return leave(INVALID_HANDLE);
    }
    drop(event->mark);
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

/* How many calls of a function that is made to fail succeed before. */
void fake_set_spared_calls(size_t count) { spared_calls = count; }
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

/* How often a function failed by fake_fail. */
size_t fake_failures(const char *name) {
    for (struct call *call = calls; call->name; call++)
        if (!strcmp(call->name, name))
            return call->failures;
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
size_t fake_misuses(void) { return misuses.count; }
const char *fake_misuse_text(void) { return misuses.text; }
/* Pages that were registered before they were faulted in. */
size_t fake_cold_pages(void) { return cold_pages; }
/* The error that the calling thread's next cudaGetLastError would give. */
size_t fake_pending_error(void) { return last_error; }

/* ---- streams ---- */

/* Whether streams made here keep what they are told to do until a wait needs it. Ending it runs all that is left. */
void fake_set_lazy(size_t yes) {
    pthread_mutex_lock(&lock);
    lazy = yes != 0;
    if (!lazy)
        run_all();
    pthread_mutex_unlock(&lock);
}

/* Where the random choice begins of the stream that goes on when an event is asked for in vain. */
void fake_set_seed(size_t value) { seed = value * 0x9E3779B97F4A7C15 | 1; }
/*
 * How many questions in vain an operation outlasts, or seems to where it runs at once: the host is told late all the
 * same. A thread that waits for it does not have to ask.
 */
void fake_set_lateness(size_t count) { lateness = count; }
/* Bytes of the device that cudaMemGetInfo gives as its memory, all free. */
/* By device, whether it has a context: a bit each. */
size_t fake_contexts(void) { return contexts; }

void fake_set_device_memory(size_t bytes) { device_memory = bytes; }

/* Makes the n-th cudaStreamWaitEvent from now, counted from 1, do nothing; SIZE_MAX: every one; 0 ends it. */
void fake_set_skip_wait(size_t n) {
    pthread_mutex_lock(&lock);
    skipped_wait = n == EVERY ? EVERY : n ? waits + n : 0;
    pthread_mutex_unlock(&lock);
}

/* Makes the n-th cudaMemcpyAsync from now, counted from 1, do nothing; SIZE_MAX: every one; 0 ends it. */
void fake_set_skip_copy(size_t n) {
    pthread_mutex_lock(&lock);
    skipped_copy = n == EVERY ? EVERY : n ? all_copies + n : 0;
    pthread_mutex_unlock(&lock);
}

/* Makes the n-th cudaEventSynchronize from now that finds its event not done, counted from 1, return at once. */
void fake_set_skip_sync(size_t n) {
    pthread_mutex_lock(&lock);
    skipped_sync = n ? syncs + n : 0;
    pthread_mutex_unlock(&lock);
}

/*
 * Has a stream be at work, as far as the host is told, until the host waits for what is put into it from now on. So it
 * does not matter how long the host takes until it asks.
 */
void fake_sleep(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    if (stream)
        stream->sleep = ++sleeps;
    pthread_mutex_unlock(&lock);
}

/* What the calling thread's next accesses belong to, for the text of a race. It has to live on. */
void fake_name(const char *name) { access_name = name; }

/* Registers an access of the computing stream, or of the host to page-locked memory: both are done at once. */
void fake_access(size_t address, size_t bytes, size_t write) {
    pthread_mutex_lock(&lock);
    const void *memory = (const void *)address;
    if (is_pinned(memory, bytes)) {
        /* Whatever is put into a stream later comes after the host's access: it does not have to be remembered. */
        int number;
        const struct span *other = unknown_to_host(&(struct entry){address, bytes}, write != 0, &number);
        if (other)
            note(&races, "%s (host) %s %#zx to %#zx, and does not know that %s (stream %d, operation %llu) is done\n",
                 access_name, write ? "writes" : "reads", address, address + bytes, other->name, number,
                 (unsigned long long)other->number);
    } else {
        advance(computing());
        touch(computing(), memory, bytes, write != 0, access_name);
    }
    pthread_mutex_unlock(&lock);
}

/* Computes in another stream from now on, 0 for the default one. */
void fake_set_computing(size_t stream) { computing_stream = stream; }
size_t fake_computing(void) { return computing_stream; }

/* Accesses of two streams to the same bytes, of which one writes, that nothing orders; or of one and the host. */
size_t fake_races(void) { return races.count; }
/* A line for each of the first. */
const char *fake_race_text(void) { return races.text; }
/* Calls of cudaStreamWaitEvent. */
size_t fake_waits(void) { return waits; }
/* Whether the n-th of them, counted from 1, ordered nothing that was not ordered before. */
size_t fake_wait_was_redundant(size_t n) { return n && n <= waits ? (size_t)wait_books[n - 1].redundant : 0; }
/* Whether it was the first to order two accesses that would have been a race, alone or with waits of other streams. */
size_t fake_wait_was_used(size_t n) { return n && n <= waits ? (size_t)wait_books[n - 1].used : 0; }
/* Calls of cudaEventSynchronize that found their event not done. */
size_t fake_syncs(void) { return syncs; }
/* Operations that were put into streams and have not run. */
size_t fake_pending(void) { return pending; }
size_t fake_h2d_copies(void) { return copies[HOST_TO_DEVICE]; }
size_t fake_h2d_bytes(void) { return copied_bytes[HOST_TO_DEVICE]; }
size_t fake_d2h_copies(void) { return copies[DEVICE_TO_HOST]; }
size_t fake_d2h_bytes(void) { return copied_bytes[DEVICE_TO_HOST]; }
/* Copies from or to host memory that is not page-locked, which no device makes beside other work. */
size_t fake_pageable_copies(void) { return pageable_copies; }
/* Events that were recorded again before the host knew that they were done. CUDA allows that; who waits sees the later. */
size_t fake_early_reuses(void) { return early_reuses; }

/* Streams that were made and not destroyed. */
size_t fake_streams(void) {
    size_t total = 0;
    for (int i = 0; i < STREAMS; i++)
        total += streams[i].live != 0;
    return total;
}
