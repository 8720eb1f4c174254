/* Preloaded into a store: its wall clock is ahead of the machine's by the microseconds in a file that is mapped, so that
 * the clock of a running server can be set. STORE_CLOCK_AHEAD names the file, of one 64-bit integer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long long none;
static const volatile long long *ahead_us = &none;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("STORE_CLOCK_AHEAD");
    int file = path ? open(path, O_RDONLY) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        ahead_us = mapped;
    close(file);
}

static long long now_us(void)
{
    struct timespec real;
    real_clock_gettime(CLOCK_REALTIME, &real);
    return real.tv_sec * 1000000LL + real.tv_nsec / 1000 + *ahead_us;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    long long us = now_us();
    (void)zone;
    at->tv_sec = us / 1000000;
    at->tv_usec = us % 1000000;
    return 0;
}

time_t time(time_t *at)
{
    time_t now = now_us() / 1000000;
    if (at)
        *at = now;
    return now;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    if (clock != CLOCK_REALTIME)
        return real_clock_gettime(clock, at);
    long long us = now_us();
    at->tv_sec = us / 1000000;
    at->tv_nsec = us % 1000000 * 1000;
    return 0;
}
