/* LD_PRELOAD: the n-th call of one kind on files below a path fails, once or from then on.
 *
 * A kind is the name of a call, or `ring read` and `ring write`: transfers that io_uring completes with the error, which a
 * request that does nothing but return it stands for (Linux 6.10; before that it is EINVAL).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define NOP_INJECT_RESULT 1u
#define RINGS 64

static char kind[64], below[PATH_MAX];
static int error, for_ever;
static long nth;
static atomic_long seen;

/* `n` 0 fails none, and counts. */
void fail_calls(const char *of, long n, int with, int sticky, const char *under) {
    strncpy(kind, of, sizeof kind - 1);
    strncpy(below, under, sizeof below - 1);
    nth = n, error = with, for_ever = sticky;
    atomic_store(&seen, 0);
}

long calls_seen(void) { return atomic_load(&seen); }

static int counts(const char *name) {
    if (strcmp(name, kind)) return 0;
    long now = atomic_fetch_add(&seen, 1) + 1;
    return nth && (for_ever ? now >= nth : now == nth);
}

static int fails_at(const char *name, const char *path) {
    if (strcmp(name, kind) || !strstr(path, below) || !counts(name)) return 0;
    errno = error;
    return 1;
}

static int fails_on(const char *name, int file) {
    char link[64], path[PATH_MAX];
    if (strcmp(name, kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return fails_at(name, path);
}

#define ON_FILE(type, name, arguments, passed) \
    type name arguments { return fails_on(#name, file) ? (type)-1 : REAL(name) passed; }

ON_FILE(ssize_t, pwritev2, (int file, const struct iovec *parts, int count, off_t at, int flags), (file, parts, count, at, flags))
ON_FILE(ssize_t, preadv2, (int file, const struct iovec *parts, int count, off_t at, int flags), (file, parts, count, at, flags))
ON_FILE(ssize_t, pwrite64, (int file, const void *from, size_t bytes, off_t at), (file, from, bytes, at))
ON_FILE(ssize_t, pread64, (int file, void *to, size_t bytes, off_t at), (file, to, bytes, at))
ON_FILE(ssize_t, write, (int file, const void *from, size_t bytes), (file, from, bytes))
ON_FILE(int, fsync, (int file), (file))
ON_FILE(int, fdatasync, (int file), (file))
ON_FILE(int, ftruncate64, (int file, off_t bytes), (file, bytes))
ON_FILE(int, fallocate, (int file, int mode, off_t at, off_t bytes), (file, mode, at, bytes))
ON_FILE(int, fstatvfs, (int file, void *to), (file, to))
ON_FILE(int, flock, (int file, int how), (file, how))
ON_FILE(int, renameat, (int file, const char *from, int other, const char *to), (file, from, other, to))
ON_FILE(int, unlinkat, (int file, const char *name, int flags), (file, name, flags))

int mkdir(const char *path, mode_t mode) { return fails_at("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }

#define MODE(last) \
    va_list more; \
    va_start(more, last); \
    mode_t mode = va_arg(more, mode_t); \
    va_end(more)

int open64(const char *path, int flags, ...) {
    MODE(flags);
    return fails_at("open64", path) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int file, const char *path, int flags, ...) {
    MODE(flags);
    return fails_on("openat", file) ? -1 : REAL(openat)(file, path, flags, mode);
}

static struct {
    int file;
    struct io_sqring_offsets offsets;
    char *ring;
    struct io_uring_sqe *entries;
} rings[RINGS];

/* The rings that a thread has given numbers, by which it enters them. */
static __thread int registered[RINGS];

static int ring_of(int file) {
    for (int index = 0; index < RINGS; index++)
        if (rings[index].file == file && rings[index].offsets.array) return index;
    return -1;
}

static void *mapped(int file, off_t at, void *where) {
    int index = ring_of(file);
    if (index >= 0 && where != MAP_FAILED) {
        if (at == IORING_OFF_SQ_RING) rings[index].ring = where;
        if (at == IORING_OFF_SQES) rings[index].entries = where;
    }
    return where;
}

void *mmap(void *near, size_t bytes, int protection, int flags, int file, off_t at) {
    void *where = (void *)syscall(SYS_mmap, near, bytes, protection, flags, file, at);
    return file < 0 ? where : mapped(file, at, where);
}

void *mmap64(void *near, size_t bytes, int protection, int flags, int file, off_t at) {
    return mmap(near, bytes, protection, flags, file, at);
}

static void fail_entries(int index) {
    char *ring = rings[index].ring;
    struct io_sqring_offsets *offsets = &rings[index].offsets;
    if (!ring || !rings[index].entries) return;
    unsigned head = *(volatile unsigned *)(ring + offsets->head), tail = *(volatile unsigned *)(ring + offsets->tail);
    unsigned mask = *(unsigned *)(ring + offsets->ring_mask), *array = (unsigned *)(ring + offsets->array);
    for (; head != tail; head++) {
        struct io_uring_sqe *entry = &rings[index].entries[array[head & mask]];
        int reads = entry->opcode == IORING_OP_READ || entry->opcode == IORING_OP_READ_FIXED;
        int writes = entry->opcode == IORING_OP_WRITE || entry->opcode == IORING_OP_WRITE_FIXED;
        /* The read that wakes the ring's thread is no transfer. */
        if (entry->user_data == ~0ull || (!reads && !writes) || !counts(reads ? "ring read" : "ring write")) continue;
        struct io_uring_sqe failing = {.opcode = IORING_OP_NOP, .fd = -1, .user_data = entry->user_data};
        failing.len = (unsigned)-error, failing.rw_flags = NOP_INJECT_RESULT;
        *entry = failing;
    }
}


long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    long words[6];
    va_list more;
    va_start(more, number);
    for (int index = 0; index < 6; index++) words[index] = va_arg(more, long);
    va_end(more);
    if (number == SYS_renameat2 && fails_on("renameat2", words[0])) return -1;
    if (number == SYS_io_uring_enter) {
        int by_number = words[3] & IORING_ENTER_REGISTERED_RING;
        int index = ring_of(by_number ? registered[words[0] % RINGS] : (int)words[0]);
        if (!strcmp(kind, "io_uring_enter") && counts(kind)) return errno = error, -1;
        if (index >= 0 && !strncmp(kind, "ring ", 5)) fail_entries(index);
    }
    long result = real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
    if (number == SYS_io_uring_register && words[1] == IORING_REGISTER_RING_FDS && result > 0) {
        struct io_uring_rsrc_update *given = (struct io_uring_rsrc_update *)words[2];
        registered[given->offset % RINGS] = (int)given->data;
    }
    if (number == SYS_io_uring_setup && result >= 0 && result < INT_MAX)
        for (int index = 0; index < RINGS; index++)
            if (!rings[index].offsets.array || rings[index].file == result) {
                rings[index].file = result, rings[index].offsets = ((struct io_uring_params *)words[1])->sq_off;
                rings[index].ring = NULL, rings[index].entries = NULL;
                break;
            }
    return result;
}
