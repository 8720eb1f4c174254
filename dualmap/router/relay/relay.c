/* The relay: passes the middle of streamed answers on, from an instance's socket to a client's, on a thread of its own
 * that never needs the interpreter.
 *
 * It has a stream from one of its chunks on, and passes on what it recognises to the byte: whole chunks of HTTP/1.1 which
 * consist of whole events that need no decision. With anything else the stream goes back to Python, with all bytes that
 * were not passed on. So what is here decides nothing; it does what router/http would do with the same bytes:
 *
 *   - takes the ids of tokens, which the router asked for, out of an event (HIDE_IDS; router/answers/kept_stream.py)
 *   - keeps the events, packed, for a stream that may go on elsewhere (KEEP; read by router/relay/event_log.py)
 *   - gives an event back that has, or may end with, a usage (HIDE_USAGE; router/answers/usage_remover.py)
 *   - keeps the last bytes, in which the end of an answer is searched (router/http/exchange.py)
 *   - counts the events that have output (router/answers/output_marks.py)
 *
 * Both sockets stay the transports' own: while a stream is here, Python neither reads the one nor writes to the other,
 * and it takes the stream back before it closes one of them.
 *
 * A lock guards everything that is reached from a Relay. The thread holds it for one stream at a time, and never while
 * it waits; Python holds it while it has the interpreter. With a second lock they have it in turns: else a
 * thread that is busy takes it again and again before Python wakes up.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES (64 << 10)   /* most that is read at once */
#define REST_BYTES (32 << 10)   /* longest part of a chunk that waits for the rest of it */
#define TAIL_BYTES 4096         /* of router/answers/checks.py */
#define MAX_EVENTS 256          /* most events of a chunk */
#define HEADER_BYTES 16         /* room for the size of a chunk */
#define MAX_SIZE_DIGITS 6
#define BATCH 64
#define MARK_BYTES 32           /* longest mark of events with output */
#define USAGE_BYTES 2048        /* longest chunk that may have a usage, if it passes as it is: the tail keeps all of it */

enum { KEEP = 1, HIDE_IDS = 2, HIDE_USAGE = 4, EVENTS = 8, MESSAGES = 16, RESPONSES = 32 };
enum { TAKEN, OTHER, ENDED, BROKEN, SLOW, FULL };
static const uint64_t STOP = UINT64_MAX;
#define NOWHERE UINT32_MAX

typedef struct {
    uint8_t *data;
    size_t len, room;
} Bytes;

typedef struct {
    uint64_t key; /* what it is known by: a count of all streams, and its place */
    int returned;
    int instance, client; /* sockets */
    int flags;
    int reason, error;
    int progressed; /* bytes came since Python asked last */
    uint64_t chunks;
    uint64_t outputs;      /* events with output */
    uint64_t passed_bytes; /* of the body, without its framing */
    uint8_t mark[MARK_BYTES];
    size_t mark_len;
    size_t log_limit;
    Bytes rest;   /* the begin of a chunk whose end has not come; of a stream that was returned: all unread bytes */
    Bytes unsent; /* what the client's socket did not take */
    Bytes log;
    Bytes last;        /* the last event, as it came */
    size_t last_split; /* where its second part begins */
    uint8_t tail[TAIL_BYTES];
} Stream;

typedef struct {
    const uint8_t *data;
    size_t len;
    size_t ids, ids_end; /* of the list, its brackets included; 0: it has none */
    uint32_t outputs;
} Event;

typedef struct {
    Stream *stream; /* NULL: it is free */
    uint32_t next_free;
} Place;

typedef struct {
    PyObject_HEAD
    int epoll, notice, stop; /* file descriptors */
    pid_t process;           /* whose thread it is; 0: it has none */
    int noticed;             /* the notice was sent, and not yet read */
    pthread_t thread;
    pthread_mutex_t lock, next;
    Place *places;
    uint32_t places_count, first_free;
    uint64_t *returned; /* keys; there is room for all places */
    uint32_t returned_count;
    uint32_t streams_count, streams_made;
    uint64_t chunks;
    uint8_t *in, *out;
    Event events[MAX_EVENTS];
} Relay;

/* bytes ---------------------------------------------------------------------------------------------------------- */
static int reserve(Bytes *bytes, size_t room) {
    if (room <= bytes->room)
        return 1;
    size_t larger = bytes->room ? bytes->room : 256;
    while (larger < room)
        larger += larger / 2;
    uint8_t *data = realloc(bytes->data, larger);
    if (data == NULL)
        return 0;
    bytes->data = data;
    bytes->room = larger;
    return 1;
}

static int set(Bytes *bytes, const uint8_t *data, size_t len) {
    if (len == 0) {
        free(bytes->data);
        memset(bytes, 0, sizeof *bytes);
        return 1;
    }
    if (!reserve(bytes, len))
        return 0;
    memmove(bytes->data, data, len);
    bytes->len = len;
    return 1;
}

static void clear(Bytes *bytes) {
    set(bytes, NULL, 0);
}

/* events --------------------------------------------------------------------------------------------------------- */
#define BEGINS(at, end, text) ((size_t)((end) - (at)) >= sizeof(text) - 1 && memcmp((at), (text), sizeof(text) - 1) == 0)
#define BEHIND(at, begin, text)                                                                                       \
    ((size_t)((at) - (begin)) >= sizeof(text) - 1 && memcmp((at) - (sizeof(text) - 1), (text), sizeof(text) - 1) == 0)

/* The begin of a plain event. */
static size_t prefix_of(int flags, const char **prefix) {
    if (flags & MESSAGES)
        *prefix = "event: content_block_delta\ndata: {";
    else if (flags & RESPONSES)
        *prefix = "event: response.output_text.delta\ndata: {";
    else
        *prefix = "data: {";
    return strlen(*prefix);
}

/* Whether an event, without the empty line that ends it, is one of an answer that goes on, and needs no decision. */
static int is_plain(Event *event, int flags) {
    const uint8_t *begin = event->data, *end = begin + event->len;
    int is_delta = (flags & (MESSAGES | RESPONSES)) != 0;
    event->ids = event->ids_end = 0;
    event->outputs = is_delta;
    for (const uint8_t *at = begin; (at = memchr(at, '"', end - at)) != NULL; at++) {
        if (end - at < 2)
            return 0; /* no event ends with a quote */
        switch (at[1]) {
        case ':': /* behind a key */
            if (BEHIND(at, begin, "finish_reason") && BEGINS(at, end, "\":null"))
                event->outputs += !is_delta;
            else if (BEHIND(at, begin, "token_ids")) {
                if (BEGINS(at, end, "\":[")) {
                    const uint8_t *close = memchr(at, ']', end - at);
                    if (event->ids || close == NULL)
                        return 0;
                    event->ids = at + 2 - begin;
                    event->ids_end = close + 1 - begin;
                } else if (BEGINS(at, end, "\": ["))
                    return 0;
            }
            break;
        /* Words by which an event may announce a failure, as in router/answers/kept_stream.py. Escaped they are text. */
        case 'e':
            if (BEGINS(at, end, "\"error") && at > begin && at[-1] != '\\')
                return 0;
            break;
        case 'a':
            if (BEGINS(at, end, "\"abort") && at > begin && at[-1] != '\\')
                return 0;
            break;
        case 'r':
            if ((BEGINS(at, end, "\"recompute") || BEGINS(at, end, "\"response.failed")) && at > begin && at[-1] != '\\')
                return 0;
            break;
        case 'c':
            if (flags & RESPONSES && BEGINS(at, end, "\"cancelled") && at[-1] != '\\')
                return 0;
            break;
        case 'm':
            if (flags & MESSAGES && BEGINS(at, end, "\"message_delta") && at[-1] != '\\')
                return 0;
            break;
        case 'u':
            if (flags & HIDE_USAGE && BEGINS(at, end, "\"usage\""))
                return 0;
            break;
        case 'f':
            if (BEGINS(at, end, "\"finish_reason\":\"") || BEGINS(at, end, "\"finish_reason\": \""))
                return 0;
            break;
        }
    }
    return event->outputs > 0;
}

/* The number of events that the data of a chunk consists of; 0 where it is not of plain events alone. */
static int events_of(Event *events, const uint8_t *data, size_t len, int flags) {
    const char *prefix;
    size_t prefix_len = prefix_of(flags, &prefix);
    if (memchr(data, '\r', len) != NULL)
        return 0;
    int count = 0;
    const uint8_t *end = data + len;
    while (data < end) {
        if (count == MAX_EVENTS || (size_t)(end - data) < prefix_len || memcmp(data, prefix, prefix_len) != 0)
            return 0;
        const uint8_t *line_end = memchr(data + prefix_len, '\n', end - data - prefix_len);
        if (line_end == NULL || end - line_end < 2 || line_end[1] != '\n')
            return 0;
        Event *event = &events[count++];
        event->data = data;
        event->len = line_end - data;
        if (!is_plain(event, flags))
            return 0;
        data = line_end + 2;
    }
    return count;
}

static uint64_t count_of(const uint8_t *data, size_t len, const uint8_t *word, size_t word_len) {
    uint64_t count = 0;
    const uint8_t *end = data + len;
    while (word_len && (data = memmem(data, end - data, word, word_len)) != NULL) {
        data += word_len;
        count++;
    }
    return count;
}

/* Whether a chunk of a stream that passes as it is may pass: a part of an event, or a usage that the tail may cut, is
 * for Python, which keeps enough of it. */
static int may_pass(const uint8_t *data, size_t len) {
    if (len < 2 || data[len - 1] != '\n' || data[len - 2] != '\n')
        return 0;
    return len <= USAGE_BYTES || count_of(data, len, (const uint8_t *)"\"usage\"", 7) == 0;
}

/* Whether the data of a chunk, which has not come whole, has nothing yet that Python would pass on. */
static int may_wait(const uint8_t *data, size_t len, int flags) {
    if (len == 0)
        return 1;
    if (!(flags & EVENTS))
        return 0;
    const char *prefix;
    size_t prefix_len = prefix_of(flags, &prefix);
    if (memcmp(data, prefix, len < prefix_len ? len : prefix_len) != 0)
        return 0;
    return len <= prefix_len || (memchr(data + prefix_len, '\n', len - prefix_len) == NULL &&
                                 memchr(data + prefix_len, '\r', len - prefix_len) == NULL);
}

/* the log of events: each as what differs from the one before, in two parts ---------------------------------------- */
static uint8_t *put_number(uint8_t *at, size_t number) {
    for (; number >= 0x80; number >>= 7)
        *at++ = (uint8_t)(number | 0x80);
    *at++ = (uint8_t)number;
    return at;
}

/* How many bytes two texts have in common from their begin, of at most so many. */
static size_t same_begin(const uint8_t *one, const uint8_t *other, size_t most) {
    size_t at = 0;
    for (uint64_t a, b; at + sizeof a <= most; at += sizeof a) {
        memcpy(&a, one + at, sizeof a);
        memcpy(&b, other + at, sizeof b);
        if (a != b)
            break;
    }
    while (at < most && one[at] == other[at])
        at++;
    return at;
}

/* How many bytes two texts, whose ends are given, have in common from their ends, of at most so many. */
static size_t same_end(const uint8_t *one, const uint8_t *other, size_t most) {
    size_t at = 0;
    for (uint64_t a, b; at + sizeof a <= most; at += sizeof a) {
        memcpy(&a, one - at - sizeof a, sizeof a);
        memcpy(&b, other - at - sizeof b, sizeof b);
        if (a != b)
            break;
    }
    while (at < most && *(one - at - 1) == *(other - at - 1))
        at++;
    return at;
}

static uint8_t *put_part(uint8_t *at, const uint8_t *part, size_t len, const uint8_t *former, size_t former_len) {
    size_t common = len < former_len ? len : former_len, begin = 0, end = 0;
    if (common) {
        begin = same_begin(part, former, common);
        end = same_end(part + len, former + former_len, common - begin);
    }
    size_t middle = len - begin - end;
    at = put_number(at, begin);
    at = put_number(at, end);
    at = put_number(at, middle);
    memcpy(at, part + begin, middle);
    return at + middle;
}

/* There is room for it: LOG_ROOM of its length. An event is never shorter than its numbers. */
#define LOG_ROOM(len) (2 * (len) + 64)

static void keep(Stream *stream, const Event *event) {
    const uint8_t *data = event->data, *last = stream->last.data;
    size_t split = event->ids ? event->ids + 1 : event->len, last_split = stream->last_split;
    uint8_t *at = stream->log.data + stream->log.len;
    at = put_part(at, data, split, last, last_split);
    at = put_part(at, data + split, event->len - split, last ? last + last_split : last, stream->last.len - last_split);
    stream->log.len = at - stream->log.data;
    memcpy(stream->last.data, data, event->len);
    stream->last.len = event->len;
    stream->last_split = split;
}

static void keep_tail(Stream *stream, const uint8_t *data, size_t len) {
    size_t skipped = len > TAIL_BYTES ? len - TAIL_BYTES : 0;
    stream->passed_bytes += skipped;
    for (size_t done = skipped; done < len;) {
        size_t at = stream->passed_bytes % TAIL_BYTES, room = TAIL_BYTES - at;
        size_t step = len - done < room ? len - done : room;
        memcpy(stream->tail + at, data + done, step);
        stream->passed_bytes += step;
        done += step;
    }
}

/* chunks --------------------------------------------------------------------------------------------------------- */
/* The size of the chunk that begins here, and where its data begin; -1: not one as it is usual, -2: it has not come. */
static long size_of(const uint8_t *data, size_t len, size_t *data_at) {
    long size = 0;
    size_t at = 0;
    for (; at < len && at < MAX_SIZE_DIGITS; at++) {
        uint8_t c = data[at];
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0)
            break;
        size = size * 16 + digit;
    }
    if (at == len)
        return -2;
    if (at == 0 || data[at] != '\r')
        return -1;
    if (at + 1 == len)
        return -2;
    if (data[at + 1] != '\n')
        return -1;
    *data_at = at + 2;
    return size;
}

typedef enum { WHOLE, WAITS, UNKNOWN, NO_ROOM } Verdict;

/* Take the whole chunks at the begin of the bytes: fill relay->out from HEADER_BYTES on. Returns what is behind them. */
static Verdict take_chunks(Relay *relay, Stream *stream, const uint8_t *in, size_t len, size_t *taken, size_t *out_len) {
    uint8_t *out = relay->out + HEADER_BYTES;
    size_t at = 0, made = 0, data_at = 0;
    Verdict verdict = WHOLE;
    while (at < len) {
        long found = size_of(in + at, len - at, &data_at);
        if (found == -2) {
            verdict = WAITS;
            break;
        }
        if (found <= 0) { /* the last chunk, or one with an extension */
            verdict = UNKNOWN;
            break;
        }
        size_t size = (size_t)found, left = len - at - data_at;
        const uint8_t *data = in + at + data_at;
        if (left < size + 2) {
            int waits = left < size && size <= REST_BYTES - HEADER_BYTES && may_wait(data, left, stream->flags);
            verdict = waits ? WAITS : UNKNOWN;
            break;
        }
        if (data[size] != '\r' || data[size + 1] != '\n') {
            verdict = UNKNOWN;
            break;
        }
        if (!(stream->flags & EVENTS)) {
            if (!may_pass(data, size)) {
                verdict = UNKNOWN;
                break;
            }
            stream->outputs += count_of(data, size, stream->mark, stream->mark_len);
            memcpy(out + made, in + at, data_at + size + 2);
            made += data_at + size + 2;
            keep_tail(stream, data, size);
        } else {
            int count = events_of(relay->events, data, size, stream->flags);
            if (count == 0) {
                verdict = UNKNOWN;
                break;
            }
            if (stream->flags & KEEP) {
                size_t needed = stream->log.len + LOG_ROOM(size);
                if (needed > stream->log_limit || !reserve(&stream->log, needed) || !reserve(&stream->last, size)) {
                    verdict = NO_ROOM;
                    break;
                }
            }
            for (int n = 0; n < count; n++) {
                const Event *event = &relay->events[n];
                uint8_t *begin = out + made;
                stream->outputs += event->outputs;
                if (stream->flags & KEEP)
                    keep(stream, event);
                if (stream->flags & HIDE_IDS && event->ids) {
                    memcpy(begin, event->data, event->ids);
                    memcpy(begin + event->ids, "null", 4);
                    size_t behind = event->len + 2 - event->ids_end;
                    memcpy(begin + event->ids + 4, event->data + event->ids_end, behind);
                    made += event->ids + 4 + behind;
                } else {
                    memcpy(begin, event->data, event->len + 2);
                    made += event->len + 2;
                }
                keep_tail(stream, begin, out + made - begin);
            }
        }
        stream->chunks++;
        relay->chunks++;
        at += data_at + size + 2;
    }
    *taken = at;
    *out_len = made;
    return verdict;
}

static void give_back(Relay *relay, Stream *stream, int reason, int error) {
    epoll_ctl(relay->epoll, EPOLL_CTL_DEL, stream->instance, NULL);
    stream->returned = 1;
    stream->reason = reason;
    stream->error = error;
    relay->returned[relay->returned_count++] = stream->key;
    if (!relay->noticed) {
        relay->noticed = 1;
        eventfd_write(relay->notice, 1);
    }
}

/* Send what take_chunks has made. Returns whether the client's socket took all of it. */
static int send_out(Relay *relay, Stream *stream, size_t len) {
    uint8_t *begin = relay->out + HEADER_BYTES;
    if (len == 0)
        return 1;
    if (stream->flags & EVENTS) { /* one chunk of all events, as router/http/heads.py makes it */
        static const char digits[] = "0123456789abcdef";
        begin[len] = '\r';
        begin[len + 1] = '\n';
        size_t size = len;
        len += 2;
        *--begin = '\n';
        *--begin = '\r';
        len += 2;
        for (; size; size >>= 4, len++)
            *--begin = (uint8_t)digits[size & 15];
    }
    ssize_t sent;
    do
        sent = send(stream->client, begin, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent == (ssize_t)len)
        return 1;
    /* The transport tries again, and finds out what is wrong, or waits for the client within its bounds. */
    size_t done = sent < 0 ? 0 : (size_t)sent;
    if (!set(&stream->unsent, begin + done, len - done))
        abort(); /* a part of the answer would be lost */
    return 0;
}

/* Bytes have come, of which the first were waiting. */
static void pass_on(Relay *relay, Stream *stream, const uint8_t *in, size_t len) {
    size_t taken, made;
    Verdict verdict = take_chunks(relay, stream, in, len, &taken, &made);
    int whole = send_out(relay, stream, made);
    if (!set(&stream->rest, in + taken, len - taken))
        abort();
    if (!whole)
        give_back(relay, stream, SLOW, 0);
    else if (verdict == UNKNOWN)
        give_back(relay, stream, OTHER, 0);
    else if (verdict == NO_ROOM)
        give_back(relay, stream, FULL, 0);
}

static void receive(Relay *relay, Stream *stream) {
    size_t waiting = stream->rest.len;
    ssize_t came = recv(stream->instance, relay->in + waiting, READ_BYTES, MSG_DONTWAIT);
    if (came < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (came <= 0) {
        give_back(relay, stream, came == 0 ? ENDED : BROKEN, came == 0 ? 0 : errno);
        return;
    }
    if (waiting)
        memcpy(relay->in, stream->rest.data, waiting);
    stream->progressed = 1;
    pass_on(relay, stream, relay->in, waiting + (size_t)came);
}

static Stream *find(Relay *relay, uint64_t key) {
    uint32_t place = (uint32_t)key;
    Stream *stream = place < relay->places_count ? relay->places[place].stream : NULL;
    return stream != NULL && stream->key == key ? stream : NULL;
}

static void lock(Relay *relay) {
    pthread_mutex_lock(&relay->next);
    pthread_mutex_lock(&relay->lock);
    pthread_mutex_unlock(&relay->next);
}

static void unlock(Relay *relay) {
    pthread_mutex_unlock(&relay->lock);
}

static void *run(void *argument) {
    Relay *relay = argument;
    struct epoll_event ready[BATCH];
    for (;;) {
        int count = epoll_wait(relay->epoll, ready, BATCH, -1);
        if (count < 0 && errno != EINTR)
            abort();
        for (int n = 0; n < count; n++) {
            uint64_t key = ready[n].data.u64;
            if (key == STOP)
                return NULL;
            lock(relay);
            Stream *stream = find(relay, key); /* Python may have taken it back since */
            if (stream != NULL && !stream->returned)
                receive(relay, stream);
            unlock(relay);
        }
    }
}

/* Python's side -------------------------------------------------------------------------------------------------- */
static void destroy(Stream *stream) {
    clear(&stream->rest);
    clear(&stream->unsent);
    clear(&stream->log);
    clear(&stream->last);
    free(stream);
}

static int make_places(Relay *relay) {
    uint32_t count = relay->places_count, larger = count ? 2 * count : 16;
    Place *places = realloc(relay->places, larger * sizeof *places);
    if (places == NULL)
        return 0;
    relay->places = places;
    uint64_t *returned = realloc(relay->returned, larger * sizeof *returned);
    if (returned == NULL)
        return 0;
    relay->returned = returned;
    for (uint32_t place = larger; place-- > count;) {
        places[place] = (Place){NULL, relay->first_free};
        relay->first_free = place;
    }
    relay->places_count = larger;
    return 1;
}

/* Take a stream out; it is the caller's. */
static void take_out(Relay *relay, Stream *stream) {
    uint32_t place = (uint32_t)stream->key;
    if (!stream->returned)
        epoll_ctl(relay->epoll, EPOLL_CTL_DEL, stream->instance, NULL);
    relay->places[place] = (Place){NULL, relay->first_free};
    relay->first_free = place;
    relay->streams_count--;
}

static PyObject *bytes_of(const Bytes *bytes) {
    return PyBytes_FromStringAndSize((const char *)bytes->data, (Py_ssize_t)bytes->len);
}

static PyObject *tail_of(const Stream *stream) {
    uint64_t passed = stream->passed_bytes;
    if (passed <= TAIL_BYTES)
        return PyBytes_FromStringAndSize((const char *)stream->tail, (Py_ssize_t)passed);
    char tail[TAIL_BYTES];
    size_t at = passed % TAIL_BYTES;
    memcpy(tail, stream->tail + at, TAIL_BYTES - at);
    memcpy(tail + TAIL_BYTES - at, stream->tail, at);
    return PyBytes_FromStringAndSize(tail, TAIL_BYTES);
}

/* What Python gets of a stream that was taken out, which is destroyed. */
static PyObject *result_of(Stream *stream) {
    PyObject *result = Py_BuildValue(
        "(iiNNNNKK)", stream->returned ? stream->reason : TAKEN, stream->error, bytes_of(&stream->rest),
        bytes_of(&stream->unsent), tail_of(stream), bytes_of(&stream->log), (unsigned long long)stream->chunks,
        (unsigned long long)stream->outputs);
    destroy(stream);
    return result;
}

static void stop_thread(Relay *relay) {
    if (relay->process != 0 && relay->process == getpid()) { /* a forked process has no thread to stop */
        eventfd_write(relay->stop, 1);
        pthread_join(relay->thread, NULL);
    }
    relay->process = 0;
}

static void close_files(Relay *relay) {
    int *files[] = {&relay->epoll, &relay->notice, &relay->stop};
    for (size_t n = 0; n < 3; n++) {
        if (*files[n] >= 0)
            close(*files[n]);
        *files[n] = -1;
    }
}

static int start_thread(Relay *relay) {
    sigset_t all, former;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former); /* signals are for Python's main thread */
    int error = pthread_create(&relay->thread, NULL, run, relay);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    return error;
}

static PyObject *relay_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(named)) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Relay *relay = (Relay *)allocate(type, 0);
    if (relay == NULL)
        return NULL;
    relay->epoll = epoll_create1(EPOLL_CLOEXEC);
    relay->notice = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->first_free = NOWHERE;
    pthread_mutex_init(&relay->lock, NULL);
    pthread_mutex_init(&relay->next, NULL);
    relay->in = malloc(REST_BYTES + READ_BYTES);
    relay->out = malloc(HEADER_BYTES + 2 * (REST_BYTES + READ_BYTES));
    if (relay->in == NULL || relay->out == NULL) {
        Py_DECREF(relay);
        return PyErr_NoMemory();
    }
    struct epoll_event event = {.events = EPOLLIN, .data = {.u64 = STOP}};
    int error = 0;
    if (relay->epoll < 0 || relay->notice < 0 || relay->stop < 0 ||
        epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->stop, &event) < 0)
        error = errno;
    else
        error = start_thread(relay);
    if (error) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(relay);
        return NULL;
    }
    relay->process = getpid();
    return (PyObject *)relay;
}

static PyObject *relay_close(Relay *relay, PyObject *Py_UNUSED(none)) {
    stop_thread(relay);
    for (uint32_t place = 0; place < relay->places_count; place++) {
        Stream *stream = relay->places[place].stream;
        if (stream != NULL) {
            relay->places[place].stream = NULL;
            destroy(stream);
        }
    }
    relay->streams_count = relay->returned_count = relay->places_count = 0;
    relay->first_free = NOWHERE;
    close_files(relay);
    Py_RETURN_NONE;
}

static void relay_dealloc(Relay *relay) {
    PyTypeObject *type = Py_TYPE((PyObject *)relay);
    Py_XDECREF(relay_close(relay, NULL));
    pthread_mutex_destroy(&relay->lock);
    pthread_mutex_destroy(&relay->next);
    free(relay->places);
    free(relay->returned);
    free(relay->in);
    free(relay->out);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(relay);
    Py_DECREF(type);
}

static PyObject *relay_fileno(Relay *relay, PyObject *Py_UNUSED(none)) {
    return PyLong_FromLong(relay->notice);
}

static PyObject *relay_attach(Relay *relay, PyObject *args) {
    int instance, client, flags;
    Py_ssize_t log_limit;
    Py_buffer data;
    const char *mark;
    Py_ssize_t mark_len;
    if (!PyArg_ParseTuple(args, "iiiny*y#", &instance, &client, &flags, &log_limit, &data, &mark, &mark_len))
        return NULL;
    Stream *stream = NULL;
    uint64_t key = 0;
    if (data.len <= READ_BYTES + REST_BYTES && mark_len <= MARK_BYTES && relay->process != 0)
        stream = calloc(1, sizeof *stream);
    if (stream != NULL) {
        stream->instance = instance;
        stream->client = client;
        stream->flags = flags;
        stream->log_limit = (size_t)log_limit;
        memcpy(stream->mark, mark, (size_t)mark_len);
        stream->mark_len = (size_t)mark_len;
        stream->progressed = 1;
        size_t taken, made;
        lock(relay);
        Verdict verdict = take_chunks(relay, stream, data.buf, (size_t)data.len, &taken, &made);
        int usable = stream->chunks && (verdict == WHOLE || verdict == WAITS) &&
                     (relay->first_free != NOWHERE || make_places(relay)) &&
                     set(&stream->rest, (uint8_t *)data.buf + taken, (size_t)data.len - taken);
        if (usable) {
            uint32_t place = relay->first_free;
            relay->streams_made += relay->streams_made == UINT32_MAX ? 2 : 1; /* a key is never 0 */
            key = stream->key = (uint64_t)relay->streams_made << 32 | place;
            struct epoll_event event = {.events = EPOLLIN, .data = {.u64 = key}};
            usable = epoll_ctl(relay->epoll, EPOLL_CTL_ADD, instance, &event) == 0;
        }
        if (usable) {
            Place *place = &relay->places[relay->first_free];
            relay->first_free = place->next_free;
            place->stream = stream;
            relay->streams_count++;
            if (!send_out(relay, stream, made))
                give_back(relay, stream, SLOW, 0);
        } else {
            relay->chunks -= stream->chunks;
            key = 0;
        }
        unlock(relay);
        if (!usable)
            destroy(stream);
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(key);
}

static PyObject *relay_take(Relay *relay, PyObject *argument) {
    uint64_t key = PyLong_AsUnsignedLongLong(argument);
    if (key == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    lock(relay);
    Stream *stream = find(relay, key);
    if (stream != NULL) {
        take_out(relay, stream);
        for (uint32_t n = 0; stream->returned && n < relay->returned_count; n++)
            if (relay->returned[n] == key)
                relay->returned[n] = relay->returned[--relay->returned_count];
    }
    unlock(relay);
    if (stream == NULL)
        Py_RETURN_NONE;
    return result_of(stream);
}

static PyObject *relay_returned(Relay *relay, PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return NULL;
    for (;;) {
        Stream *stream = NULL;
        lock(relay);
        if (relay->returned_count) {
            uint64_t key = relay->returned[relay->returned_count - 1];
            stream = find(relay, key);
            take_out(relay, stream);
            relay->returned_count--;
        } else if (relay->noticed) {
            eventfd_t count;
            eventfd_read(relay->notice, &count);
            relay->noticed = 0;
        }
        unlock(relay);
        if (stream == NULL)
            return list;
        unsigned long long key = stream->key;
        PyObject *pair = Py_BuildValue("(KN)", key, result_of(stream));
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_XDECREF(pair);
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(pair);
    }
}

static PyObject *relay_progressed(Relay *relay, PyObject *argument) {
    uint64_t key = PyLong_AsUnsignedLongLong(argument);
    if (key == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    lock(relay);
    Stream *stream = find(relay, key);
    int progressed = stream != NULL && stream->progressed;
    if (stream != NULL)
        stream->progressed = 0;
    unlock(relay);
    return PyBool_FromLong(progressed);
}

static PyObject *relay_counts(Relay *relay, PyObject *Py_UNUSED(none)) {
    lock(relay);
    unsigned long streams = relay->streams_count;
    unsigned long long chunks = relay->chunks;
    unlock(relay);
    return Py_BuildValue("(kK)", streams, chunks);
}

static PyMethodDef relay_methods[] = {
    {"fileno", (PyCFunction)relay_fileno, METH_NOARGS, NULL},
    {"attach", (PyCFunction)relay_attach, METH_VARARGS, NULL},
    {"take", (PyCFunction)relay_take, METH_O, NULL},
    {"returned", (PyCFunction)relay_returned, METH_NOARGS, NULL},
    {"progressed", (PyCFunction)relay_progressed, METH_O, NULL},
    {"counts", (PyCFunction)relay_counts, METH_NOARGS, NULL},
    {"close", (PyCFunction)relay_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot relay_slots[] = {
    {Py_tp_new, relay_new},
    {Py_tp_dealloc, relay_dealloc},
    {Py_tp_methods, relay_methods},
    {0, NULL},
};

static PyType_Spec relay_spec = {
    .name = "dualmap.router.relay._relay.Relay",
    .basicsize = sizeof(Relay),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = relay_slots,
};

static int add_to(PyObject *module) {
    PyObject *type = PyType_FromSpec(&relay_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "Relay", type);
    Py_DECREF(type);
    static const struct {
        const char *name;
        int value;
    } numbers[] = {{"KEEP", KEEP},         {"HIDE_IDS", HIDE_IDS},   {"HIDE_USAGE", HIDE_USAGE}, {"EVENTS", EVENTS},
                   {"MESSAGES", MESSAGES}, {"RESPONSES", RESPONSES}, {"TAKEN", TAKEN},           {"OTHER", OTHER},
                   {"ENDED", ENDED},       {"BROKEN", BROKEN},       {"SLOW", SLOW},             {"FULL", FULL}};
    for (size_t n = 0; !failed && n < sizeof numbers / sizeof *numbers; n++)
        failed = PyModule_AddIntConstant(module, numbers[n].name, numbers[n].value);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_to}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "dualmap.router.relay._relay",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__relay(void) {
    return PyModuleDef_Init(&module);
}
