/* Drives the relay with streams from a file, one after the other, and writes what came of each.
 *
 * A stream is: flags, log limit, length of the mark, number of reads (32 bits each, as the machine has them), the mark,
 * and for each read its length and its bytes. What is written of it: the reason for which it was given back (-1: it is
 * still the relay's), and lengths and bytes of what the client got, the bytes that were not passed on, the end that is
 * kept and the log; then the counts of chunks and of outputs.
 *
 * Each read lies in memory of just its size, as does what waited for it, so that a sanitizer sees every byte too many.
 */
#include "relay.c"

#include <fcntl.h>
#include <stdio.h>

static uint32_t number(FILE *from) {
    uint32_t read;
    if (fread(&read, sizeof read, 1, from) != 1)
        exit(3);
    return read;
}

static uint8_t *bytes(FILE *from, size_t len) {
    uint8_t *read = malloc(len ? len : 1);
    if (read == NULL || (len && fread(read, len, 1, from) != 1))
        exit(3);
    return read;
}

static void put(FILE *to, const void *data, size_t len) {
    uint32_t size = (uint32_t)len;
    if (fwrite(&size, sizeof size, 1, to) != 1 || (len && fwrite(data, len, 1, to) != 1))
        exit(3);
}

/* What the client's socket has. */
static void drain(int from, Bytes *all) {
    for (;;) {
        if (!reserve(all, all->len + READ_BYTES))
            exit(3);
        ssize_t came = recv(from, all->data + all->len, READ_BYTES, MSG_DONTWAIT);
        if (came <= 0)
            return;
        all->len += (size_t)came;
    }
}

static void run_one(Relay *relay, FILE *from, FILE *to) {
    uint32_t flags = number(from), log_limit = number(from), mark_len = number(from), reads = number(from);
    int pair[2];
    if (mark_len > MARK_BYTES || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0)
        exit(3);
    int room = 4 << 20;
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    Stream *stream = calloc(1, sizeof *stream);
    uint8_t *mark = bytes(from, mark_len);
    memcpy(stream->mark, mark, mark_len);
    free(mark);
    stream->mark_len = mark_len;
    stream->instance = -1;
    stream->client = pair[0];
    stream->flags = (int)flags;
    stream->log_limit = log_limit;
    stream->key = 1;
    relay->returned_count = 0;
    Bytes got = {0};
    for (uint32_t n = 0; n < reads; n++) {
        size_t len = number(from), waiting = stream->rest.len;
        uint8_t *read = bytes(from, len);
        if (!stream->returned && len) {
            uint8_t *in = malloc(waiting + len);
            if (waiting)
                memcpy(in, stream->rest.data, waiting);
            memcpy(in + waiting, read, len);
            pass_on(relay, stream, in, waiting + len);
            free(in);
        } else if (len) {
            if (!reserve(&stream->rest, waiting + len))
                exit(3);
            memcpy(stream->rest.data + waiting, read, len);
            stream->rest.len = waiting + len;
        }
        free(read);
        drain(pair[1], &got);
    }
    if (stream->unsent.len) {
        if (!reserve(&got, got.len + stream->unsent.len))
            exit(3);
        memcpy(got.data + got.len, stream->unsent.data, stream->unsent.len);
        got.len += stream->unsent.len;
    }
    int32_t reason = stream->returned ? stream->reason : -1;
    put(to, &reason, sizeof reason);
    put(to, got.data, got.len);
    put(to, stream->rest.data, stream->rest.len);
    uint64_t passed = stream->passed_bytes;
    size_t at = passed % TAIL_BYTES, kept = passed < TAIL_BYTES ? (size_t)passed : TAIL_BYTES;
    uint8_t tail[TAIL_BYTES];
    if (passed <= TAIL_BYTES)
        memcpy(tail, stream->tail, kept);
    else {
        memcpy(tail, stream->tail + at, TAIL_BYTES - at);
        memcpy(tail + TAIL_BYTES - at, stream->tail, at);
    }
    put(to, tail, kept);
    put(to, stream->log.data, stream->log.len);
    put(to, &stream->chunks, sizeof stream->chunks);
    put(to, &stream->outputs, sizeof stream->outputs);
    clear(&got);
    destroy(stream);
    close(pair[0]);
    close(pair[1]);
}

int main(int count, char **names) {
    FILE *from = count == 3 ? fopen(names[1], "rb") : NULL, *to = count == 3 ? fopen(names[2], "wb") : NULL;
    if (from == NULL || to == NULL)
        return 2;
    (void)module_slots, (void)relay_methods;
    Relay *relay = calloc(1, sizeof *relay);
    uint64_t returned[4];
    relay->epoll = relay->stop = -1;
    relay->notice = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    relay->returned = returned;
    /* of the size that relay_new gives it */
    relay->out = malloc(HEADER_BYTES + 2 * (REST_BYTES + READ_BYTES));
    for (uint32_t streams = number(from); streams; streams--)
        run_one(relay, from, to);
    free(relay->out);
    close(relay->notice);
    free(relay);
    return fclose(to) == 0 ? 0 : 3;
}
