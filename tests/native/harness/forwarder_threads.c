/* Lends streams to the forwarding thread and takes them back at random: ./forwarder_threads STEPS SEED

   The main thread does what the relay's event loop does. Each client must get the bytes of its upstream in order, and
   the frames must hold the same bytes. Run under ThreadSanitizer and under AddressSanitizer. */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "forwarder.h"

enum { STREAMS = 12, BODY_MAX = 1 << 20, PIECE_MAX = 200000, DATA = 8, DROP = 14, ROOM = 1 << 22, WAIT_MS = 30000 };

#define CHECK(what)                                                                          \
    do {                                                                                     \
        if (!(what)) {                                                                       \
            fprintf(stderr, "line %d, step %ld: %s\n", __LINE__, step, #what);               \
            abort();                                                                         \
        }                                                                                    \
    } while (0)

/* A reader of chunks, byte by byte: what Python's scanner does. */
struct machine {
    int64_t left, length; /* left: of the chunk with its CR LF */
    int in_line, in_extension;
};

struct stream {
    int far_up, near_up, near_down, far_down;
    unsigned char *body;
    size_t made, sent, passed, received, reported; /* bytes: of the body, to the relay, to the client, at the client */
    size_t kept_at, kept_to;                       /* of the body: not taken by the client's socket */
    struct machine machine;
    struct llmtap_loan loan;
    int is_lent, was_tapped, measured, over;
};

static long step;
static uint64_t state;
static struct llmtap_forwarder *forwarder;
static struct stream streams[STREAMS];
static int64_t seqs;
static long lends, reasons[LLMTAP_UPSTREAM_ENDED + 1], drops, forgets;

static uint32_t next(uint32_t below) {
    state ^= state << 13; /* xorshift64 */
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)((state >> 16) % below) : 0;
}

static void feed(struct machine *m, const unsigned char *data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (m->left) {
            m->left--;
        } else if (data[i] == '\n') {
            m->left = m->length + 2;
            m->length = m->in_line = m->in_extension = 0;
        } else {
            m->in_line = 1;
            if (data[i] == ';' || data[i] == '\r') m->in_extension = 1;
            if (!m->in_extension) m->length = 16 * m->length + (data[i] <= '9' ? data[i] - '0' : data[i] - 'a' + 10);
        }
    }
}

static void open_stream(struct stream *s) {
    int up[2], down[2], small = 8192;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, up));
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, down));
    if (next(2)) setsockopt(down[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    unsigned char *body = s->body ? s->body : malloc(BODY_MAX);
    *s = (struct stream){.far_up = up[0], .near_up = up[1], .near_down = down[0], .far_down = down[1], .body = body};
    s->measured = 1;
    s->loan.seq = ++seqs;
}

static struct stream *by_seq(int64_t seq) {
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].loan.seq == seq) return &streams[i];
    return NULL;
}

static void collect(void) {
    struct llmtap_lags lags;
    const struct llmtap_rows *frames = llmtap_collect(forwarder, &lags);
    const char *data = frames->data;
    for (size_t i = 0; i < frames->n; i++) {
        const struct llmtap_row *row = &frames->rows[i];
        struct stream *s = by_seq(row->seq);
        CHECK(s);
        CHECK(row->kind == DATA || row->kind == DROP);
        if (row->kind == DROP) {
            s->measured = 0;
            drops++;
        } else {
            CHECK(s->measured && row->size && row->extra_ns >= 0);
            CHECK(s->reported + row->size <= s->sent);
            CHECK(!memcmp(data, s->body + s->reported, row->size));
            s->reported += row->size;
        }
        data += row->size;
    }
}

/* Forward bytes as the event loop does. */
static void pass(struct stream *s, const unsigned char *data, size_t size) {
    CHECK(!memcmp(data, s->body + s->passed, size));
    CHECK(s->kept_at == s->kept_to);
    feed(&s->machine, data, size);
    ssize_t taken = send(s->near_down, data, size, MSG_NOSIGNAL);
    if (taken < 0 && errno != EAGAIN) s->over = 1;
    s->kept_at = s->passed + (size_t)(taken < 0 ? 0 : taken);
    s->passed += size;
    s->kept_to = s->passed;
    if (s->measured) CHECK(s->reported + size == s->passed);
    s->reported = s->passed;
}

static void settle(struct stream *s) {
    struct llmtap_loan *loan = &s->loan;
    CHECK(atomic_load(&loan->owner) == LLMTAP_CALLER);
    s->is_lent = 0;
    reasons[loan->reason]++;
    size_t forwarded = (size_t)loan->forwarded_bytes;
    feed(&s->machine, s->body + s->passed, forwarded);
    s->passed += forwarded;
    CHECK(!s->machine.in_line && s->machine.left == loan->left);
    collect();
    if (!loan->tapped) s->measured = 0;
    if (s->measured) CHECK(s->reported == s->passed);
    s->reported = s->passed;
    s->kept_at = s->kept_to = s->passed;
    switch (loan->reason) {
    case LLMTAP_BLOCKED:
        s->kept_at = s->passed - loan->size;
        CHECK(!memcmp(loan->bytes, s->body + s->kept_at, loan->size));
        break;
    case LLMTAP_NOT_PLAIN:
    case LLMTAP_NOT_PLACED:
        pass(s, loan->bytes, loan->size);
        break;
    case LLMTAP_CLIENT_LOST:
    case LLMTAP_UPSTREAM_LOST:
    case LLMTAP_UPSTREAM_ENDED:
        s->over = 1;
        break;
    default:
        break;
    }
}

static void take_returned(void) {
    llmtap_acknowledge(forwarder);
    struct llmtap_loan *loan;
    while ((loan = llmtap_returned(forwarder))) settle(loan->object);
    collect();
}

static void recall(struct stream *s) {
    if (!s->is_lent) return;
    llmtap_recall(forwarder, &s->loan);
    settle(s);
}

static void close_stream(struct stream *s) {
    recall(s);
    close(s->far_up);
    close(s->near_up);
    close(s->near_down);
    close(s->far_down);
    llmtap_loan_clear(&s->loan);
}

static void lend(struct stream *s) {
    if (s->is_lent || s->over || s->machine.in_line || s->kept_at < s->kept_to) return;
    s->loan.upstream = s->near_up;
    s->loan.client = s->near_down;
    s->loan.chunked = 1;
    s->loan.left = s->machine.left;
    s->loan.tapped = s->measured;
    s->loan.object = s;
    s->is_lent = 1;
    lends++;
    CHECK(llmtap_lend(forwarder, &s->loan));
}

/* One turn of the event loop for a stream that it has. */
static void work(struct stream *s) {
    static unsigned char buffer[65536];
    if (s->is_lent || s->over) return;
    if (s->kept_at < s->kept_to) {
        ssize_t taken = send(s->near_down, s->body + s->kept_at, s->kept_to - s->kept_at, MSG_NOSIGNAL);
        if (taken > 0) s->kept_at += (size_t)taken;
        else if (taken < 0 && errno != EAGAIN) s->over = 1;
        return;
    }
    ssize_t got = recv(s->near_up, buffer, sizeof buffer, 0);
    if (got > 0) pass(s, buffer, (size_t)got);
    else if (!got || errno != EAGAIN) s->over = 1;
    char byte;
    ssize_t said = recv(s->near_down, &byte, 1, 0);
    if (!said || (said < 0 && errno != EAGAIN)) s->over = 1;
}

static void make(struct stream *s) {
    size_t room = BODY_MAX - s->made, size = next(8) ? 1 + next(600) : 1 + next(PIECE_MAX);
    if (room < size + 40) return;
    char *at = (char *)s->body + s->made;
    int line = sprintf(at, next(20) ? "%zx\r\n" : "%zx;a=b\r\n", size);
    for (size_t i = 0; i < size; i++) at[line + (int)i] = (char)('a' + (s->made + i) % 23);
    memcpy(at + line + size, "\r\n", 2);
    s->made += (size_t)line + size + 2;
}

static void send_some(struct stream *s) {
    if (s->made == s->sent) make(s);
    size_t size = s->made - s->sent;
    if (next(4) == 0) size = next((uint32_t)size + 1);
    ssize_t taken = size ? send(s->far_up, s->body + s->sent, size, MSG_NOSIGNAL) : 0;
    if (taken > 0) s->sent += (size_t)taken;
}

static void receive_some(struct stream *s) {
    static unsigned char buffer[300000];
    ssize_t got = recv(s->far_down, buffer, 1 + next(sizeof buffer - 1), 0);
    if (got <= 0) return;
    CHECK(s->received + (size_t)got <= s->sent);
    CHECK(!memcmp(buffer, s->body + s->received, (size_t)got));
    s->received += (size_t)got;
}

/* Let all streams come to rest: each client has all that its upstream sent. */
static void come_to_rest(void) {
    for (int waited_ms = 0;; waited_ms++) {
        int at_rest = 1;
        for (int i = 0; i < STREAMS; i++) {
            struct stream *s = &streams[i];
            work(s);
            receive_some(s);
            if (!s->over && s->received < s->sent) at_rest = 0;
        }
        take_returned();
        if (at_rest) return;
        CHECK(waited_ms < WAIT_MS);
        struct pollfd wait = {llmtap_forwarder_fd(forwarder), POLLIN, 0};
        poll(&wait, 1, 1);
    }
}

static void do_step(void) {
    struct stream *s = &streams[next(STREAMS)];
    switch (next(64)) {
    case 0:
        recall(s);
        break;
    case 1:
        send(s->far_down, "x", 1, MSG_NOSIGNAL);
        break;
    case 2:
        llmtap_set_room(forwarder, next(50) ? ROOM : 2000);
        break;
    case 3:
        if (next(20)) break;
        forgets++;
        llmtap_forget(forwarder);
        for (int i = 0; i < STREAMS; i++)
            if (streams[i].is_lent) streams[i].measured = 0;
        break;
    case 4:
        if (next(4) || s->over) break;
        shutdown(next(2) ? s->far_up : s->far_down, next(2) ? SHUT_RDWR : SHUT_WR);
        break;
    case 5:
        llmtap_set_clock(forwarder, next(1000), 0);
        break;
    case 6:
        CHECK(llmtap_frames_size(forwarder) >= 0);
        collect();
        break;
    case 7:
    case 8:
        take_returned();
        break;
    default:
        if (next(3)) send_some(s);
        if (next(3)) receive_some(s);
        work(s);
        if (!next(4)) lend(s);
    }
    if (s->over || BODY_MAX - s->made < PIECE_MAX + 100) {
        close_stream(s);
        open_stream(s);
    }
}

int main(int argc, char **argv) {
    int64_t edges[LLMTAP_LAG_BUCKETS - 1];
    for (int i = 0; i < LLMTAP_LAG_BUCKETS - 1; i++) edges[i] = 1000 << i;
    struct llmtap_forwarder_options options = {edges, DATA, DROP};
    if (argc != 3) return 2;
    state = strtoull(argv[2], NULL, 10) * 2 + 1;
    forwarder = llmtap_forwarder_start(&options);
    CHECK(forwarder);
    llmtap_set_room(forwarder, ROOM);
    for (int i = 0; i < STREAMS; i++) open_stream(&streams[i]);
    long steps = strtol(argv[1], NULL, 10);
    for (step = 0; step < steps; step++) {
        do_step();
        if (step % 5000 == 4999) come_to_rest();
    }
    come_to_rest();
    int stops_lent = 0;
    for (int i = 0; i < STREAMS; i++) {
        lend(&streams[i]);
        stops_lent += streams[i].is_lent;
    }
    CHECK(stops_lent);
    llmtap_forwarder_stop(forwarder);
    for (int i = 0; i < STREAMS; i++) {
        CHECK(atomic_load(&streams[i].loan.owner) == LLMTAP_CALLER);
        streams[i].is_lent = 0;
        close_stream(&streams[i]);
        free(streams[i].body);
    }
    printf("lends %ld, drops %ld, forgets %ld, reasons", lends, drops, forgets);
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) printf(" %ld", reasons[i]);
    printf("\n");
    return 0;
}
