/* sse_load: callers of a chat completion service, and what each event cost on its way to them.
 *
 * closed loop   --concurrency N            N callers, each asks again as soon as it has its answer
 * open loop     --rate R                   Poisson arrivals, whatever the answers do; times count from the arrival
 * in step       --concurrency N --in-step  the same, connected beforehand, all beginning at one moment
 * hold          --hold N                   opens N streams that fall silent after a few events, and reads memory
 *
 * For every event: one-way latency (our recv() returned - the server's stamp in the event) and gap error (gap to the
 * stream's previous event here - the same gap at the server). For every stream: is the sequence whole, does it end as it
 * should. For the processes of --pid and their descendants: CPU and memory over the window [warmup, warmup + duration].
 *
 * The steady state is there from the start: callers begin spread over one gap, and the first stream of each has a
 * random share of the full length, so that streams do not end and begin in step later on. With --requests there is no
 * window: so many are asked, and all of them are measured. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "answer.h"
#include "bytes.h"
#include "deadlines.h"
#include "histogram.h"
#include "monotonic.h"
#include "proctree.h"

enum {
    READ_BYTES = 65536,
    LINE_BYTES_LIMIT = 1 << 20,       /* an SSE line; ours have 300 bytes */
    CALLERS_IN_OPEN_LOOP = 4000,      /* arrivals beyond so many open answers are shed, and counted */
    RETRY_AFTER_FAILURE_MS = 20,      /* a target that is down must not be hammered */
    MEMORY_EVERY_MS = 500,
    CONNECTING_MS = 300,              /* before a start in step */
    NO_END_S = 3600,                  /* of a window that ends with its last answer */
    HOLD_OPENED_PER_S = 500,          /* accept queues are 511 long in nginx */
    HOLD_OPENING_LIMIT_S = 60,
    WAKE_UPS_AT_ONCE = 512,
};

static struct {
    const char *host, *path;
    int port;
    const char *model;
    struct bytes headers;
    int concurrency;
    double rate_rps;
    int hold;
    double warmup_s, duration_s, drain_s;
    double ttft_ms, itl_ms;
    long tokens, tokens_per_event, silent_after;
    bool stream, usage, stamp_content, rebuilt, in_step;
    uint64_t requests; /* and no more; 0: as many as the window has room for */
    long body_bytes;
    uint64_t seed;
} plan = {
    .path = "/v1/chat/completions",
    .model = "sim-model",
    .concurrency = 0,
    .warmup_s = 1,
    .duration_s = 5,
    .drain_s = 1,
    .tokens = 100,
    .tokens_per_event = 1,
    .stream = true,
    .seed = 1,
};

struct caller {
    int fd; /* -1: no connection */
    bool connecting, watches_writable;
    bool asking;   /* a request is under way */
    bool reused;   /* on a connection that has served before */
    bool asked_before;
    struct bytes out;
    struct deadline start; /* when to ask next */
    struct caller *next_idle;

    uint64_t request;      /* number of the request, part of its id */
    int64_t origin_ns;     /* from where its times count */
    long tokens;
    long seq_next;         /* the sequence number that should come now */
    long last_seq;         /* of the previous event, -1 before the first */
    int64_t last_sent_ns, last_read_ns;
    int64_t read_ns;       /* when the recv() being digested returned */
    int events_of_read;
    bool done_seen;
    struct bytes line;     /* an SSE line split over reads */
    struct answer answer;
};

static struct {
    struct histogram latency, gap_error, gap, first_event, request;
    uint64_t events, requests, bytes;             /* inside the window */
    uint64_t events_total, requests_total, failed, cut, shed, reconnects;
    uint64_t lost, out_of_order, after_done, wrong_count, no_done, unstamped, broken_http, line_too_long;
    uint64_t reads_with_events, events_sharing_a_read, chunks;
    long asking, asking_max, held;
    char first_error[200];
} seen;

static enum { WARMING, MEASURING, DRAINING } phase;
static struct caller *callers;
static struct caller *idle_callers;
static struct deadlines starts;
static struct sockaddr_in target;
static struct proctree tree;
static FILE *latency_csv;
static int epoll_fd;
static uint64_t requests_made;

/* splitmix64; the seed is printed with the result. */
static double random_share(void)
{
    static uint64_t state;
    uint64_t z;

    if (!state)
        state = plan.seed * 0x632BE59BD9B4E019u + 1;
    z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static int64_t poisson_gap_ns(void)
{
    return (int64_t)(-log(1.0 - random_share()) / plan.rate_rps * (double)NS_PER_S);
}

/* ---- one request's end ---------------------------------------------------------------------------------------- */

static void disconnect(struct caller *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->connecting = c->watches_writable = false;
    bytes_free(&c->out);
}

static bool asks_more(void)
{
    return phase != DRAINING && (!plan.requests || requests_made < plan.requests);
}

static void go_on(struct caller *c, int64_t after_ns)
{
    if (!asks_more())
        return;
    if (plan.rate_rps > 0) {
        c->next_idle = idle_callers;
        idle_callers = c;
    } else {
        deadline_set(&starts, &c->start, mono_ns() + after_ns);
    }
}

static void fail(struct caller *c, const char *why)
{
    if (!seen.first_error[0])
        snprintf(seen.first_error, sizeof seen.first_error, "request %llu: %s (status %d, %ld events)",
                 (unsigned long long)c->request, why, c->answer.status, c->seq_next);
    seen.asking -= c->asking; /* it may have been connecting beforehand */
    c->asking = false;
    seen.failed++;
    disconnect(c);
    go_on(c, RETRY_AFTER_FAILURE_MS * NS_PER_MS);
}

/* What is wrong with the stream that has just ended, NULL if nothing is. */
static const char *fault_of_stream(const struct caller *c)
{
    long wanted = (c->tokens + plan.tokens_per_event - 1) / plan.tokens_per_event + (plan.usage ? 1 : 0);

    if (c->seq_next != wanted) {
        seen.wrong_count++;
        return "wrong number of events";
    }
    if (!c->done_seen) {
        seen.no_done++;
        return "no [DONE]";
    }
    return NULL;
}

static void end_of_answer(struct caller *c)
{
    const char *fault = c->answer.status == 200 ? NULL : "status is not 200";

    if (!fault && plan.stream)
        fault = fault_of_stream(c);
    seen.chunks += c->answer.chunks;
    if (fault) {
        fail(c, fault);
        return;
    }
    seen.requests_total++;
    if (phase == MEASURING) {
        seen.requests++;
        histogram_add(&seen.request, c->read_ns - c->origin_ns);
    }
    c->asking = false;
    seen.asking--;
    if (!c->answer.keep_alive)
        disconnect(c);
    go_on(c, 0);
}

/* ---- events --------------------------------------------------------------------------------------------------- */

static void log_latency(const struct caller *c, long seq, int64_t sent_ns)
{
    fprintf(latency_csv, "load-%llu-%llu,%ld,%lld,%lld\n", (unsigned long long)plan.seed,
            (unsigned long long)c->request, seq, (long long)sent_ns, (long long)c->read_ns);
}

static void on_event(struct caller *c, long seq, int64_t sent_ns)
{
    if (seq > c->seq_next)
        seen.lost += (uint64_t)(seq - c->seq_next);
    else if (seq < c->seq_next)
        seen.out_of_order++; /* or a second time */
    if (seq >= c->seq_next)
        c->seq_next = seq + 1;
    if (c->done_seen)
        seen.after_done++;

    seen.events_total++;
    if (c->events_of_read++ > 0)
        seen.events_sharing_a_read++;
    else
        seen.reads_with_events++;
    if (latency_csv)
        log_latency(c, seq, sent_ns);
    if (plan.hold && seq == 0)
        seen.held++;
    if (phase == MEASURING) {
        seen.events++;
        histogram_add(&seen.latency, c->read_ns - sent_ns);
        if (c->last_seq < 0) {
            histogram_add(&seen.first_event, c->read_ns - c->origin_ns);
        } else if (seq == c->last_seq + 1) {
            int64_t gap_ns = c->read_ns - c->last_read_ns;
            int64_t error_ns = gap_ns - (sent_ns - c->last_sent_ns);
            histogram_add(&seen.gap, gap_ns);
            histogram_add(&seen.gap_error, error_ns < 0 ? -error_ns : error_ns);
        }
    }
    c->last_seq = seq;
    c->last_sent_ns = sent_ns;
    c->last_read_ns = c->read_ns;
}

/* The integer behind "key": in [at, end), -1 if there is none. */
static int64_t integer_of(const char *at, const char *end, const char *quoted_key)
{
    const char *found = memmem(at, (size_t)(end - at), quoted_key, strlen(quoted_key));

    if (!found)
        return -1;
    found += strlen(quoted_key);
    while (found < end && (*found == ':' || *found == ' '))
        found++;
    return found < end && *found >= '0' && *found <= '9' ? strtoll(found, NULL, 10) : -1;
}

/* Stamps inside the text, ~seq@t_ns~, of which a gateway may have joined several into one event. */
static int read_content_stamps(struct caller *c, const char *at, const char *end)
{
    int found = 0;

    while ((at = memchr(at, '~', (size_t)(end - at)))) {
        char *after_seq, *after_stamp;
        long seq = strtol(at + 1, &after_seq, 10);
        if (after_seq == ++at || *after_seq != '@')
            continue;
        int64_t sent_ns = strtoll(after_seq + 1, &after_stamp, 10);
        if (*after_stamp != '~')
            continue;
        on_event(c, seq, sent_ns);
        at = after_stamp + 1;
        found++;
    }
    return found;
}

/* A data line is taken as its event: the server sends line and blank line in one piece, so they arrive as one but for
 * the reader who cuts a read exactly between them. `line` ends with a byte that is no digit. */
static void on_line(struct caller *c, const char *line, const char *end)
{
    if (end - line < 6 || memcmp(line, "data:", 5))
        return; /* blank lines, comments, other fields */
    line += line[5] == ' ' ? 6 : 5;
    if (end - line >= 6 && !memcmp(line, "[DONE]", 6)) {
        c->done_seen = true;
        return;
    }
    int64_t sent_ns = integer_of(line, end, "\"t_ns\"");
    int64_t seq = integer_of(line, end, "\"seq\"");
    if (sent_ns > 0 && seq >= 0)
        on_event(c, seq, sent_ns);
    else if (!read_content_stamps(c, line, end))
        seen.unstamped++;
}

static void on_body(void *owner, const char *data, size_t len)
{
    struct caller *c = owner;
    const char *end = data + len;

    if (phase == MEASURING)
        seen.bytes += len;
    if (!plan.stream || c->answer.status != 200)
        return;
    while (data < end) {
        const char *feed = memchr(data, '\n', (size_t)(end - data));
        if (bytes_len(&c->line) == 0 && feed) { /* nearly always: the line is there whole, and is read in place */
            on_line(c, data, feed);
            data = feed + 1;
            continue;
        }
        size_t n = (size_t)((feed ? feed + 1 : end) - data);
        if (bytes_len(&c->line) + n > LINE_BYTES_LIMIT) {
            seen.line_too_long++;
            bytes_consume(&c->line, bytes_len(&c->line));
        } else {
            bytes_append(&c->line, data, n);
        }
        data += n;
        if (feed && bytes_len(&c->line)) {
            on_line(c, bytes_at(&c->line), bytes_at(&c->line) + bytes_len(&c->line) - 1);
            bytes_consume(&c->line, bytes_len(&c->line));
        }
    }
}

/* ---- connections ---------------------------------------------------------------------------------------------- */

static void send_out(struct caller *c)
{
    ssize_t sent = send(c->fd, bytes_at(&c->out), bytes_len(&c->out), MSG_NOSIGNAL);

    if (sent < 0 && errno != EAGAIN) {
        fail(c, "send failed");
        return;
    }
    if (sent > 0)
        bytes_consume(&c->out, (size_t)sent);
    bool wanted = bytes_len(&c->out) > 0;
    if (wanted != c->watches_writable) {
        struct epoll_event interest = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &interest);
        c->watches_writable = wanted;
    }
}

static void connect_caller(struct caller *c)
{
    struct epoll_event interest = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    int on = 1;

    c->reused = false;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) {
        fail(c, "no socket left");
        return;
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &interest);
    c->connecting = c->watches_writable = true;
    if (connect(c->fd, (struct sockaddr *)&target, sizeof target) && errno != EINPROGRESS)
        fail(c, "connect failed");
}

static void write_request(struct caller *c)
{
    static const char filler[] = "the quick brown fox jumps over the lazy dog ";
    char pace[160], opening[512];
    int pace_len = snprintf(pace, sizeof pace, "sim:ttft=%g,itl=%g,tokens=%ld,silent=%ld,stamp=%d", plan.ttft_ms,
                            plan.itl_ms, c->tokens, plan.silent_after, plan.stamp_content);
    int opening_len = snprintf(opening, sizeof opening,
                               "{\"model\":\"%s\",\"stream\":%s,%s\"max_tokens\":%ld,\"messages\":[{\"role\":\"user\","
                               "\"content\":\"%.*s ",
                               plan.model, plan.stream ? "true" : "false",
                               plan.usage ? "\"stream_options\":{\"include_usage\":true}," : "", c->tokens, pace_len,
                               pace);
    long body_len = opening_len + 4;
    if (body_len < plan.body_bytes)
        body_len = plan.body_bytes;

    char *base = bytes_reserve(&c->out, 2048 + bytes_len(&plan.headers) + (size_t)body_len);
    char *at = base + sprintf(base,
                              "POST %.1000s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\n"
                              "Accept: %s\r\nContent-Length: %ld\r\nx-request-id: load-%llu-%llu\r\n"
                              "x-sim-ttft-ms: %g\r\nx-sim-itl-ms: %g\r\nx-sim-tokens: %ld\r\n"
                              "x-sim-silent-after: %ld\r\n%s",
                              plan.path, plan.host, plan.port, plan.stream ? "text/event-stream" : "application/json",
                              body_len, (unsigned long long)plan.seed, (unsigned long long)c->request, plan.ttft_ms,
                              plan.itl_ms, c->tokens, plan.silent_after,
                              plan.stamp_content ? "x-sim-stamp: content\r\n" : "");
    at = put_bytes(at, bytes_at(&plan.headers), bytes_len(&plan.headers));
    at = PUT_LITERAL(at, "\r\n");
    at = put_bytes(at, opening, (size_t)opening_len);
    for (long i = opening_len; i < body_len - 4; i++)
        *at++ = filler[(size_t)i % (sizeof filler - 1)];
    at = PUT_LITERAL(at, "\"}]}");
    bytes_added(&c->out, (size_t)(at - base));
}

static void put_question(struct caller *c)
{
    answer_begin(&c->answer);
    bytes_consume(&c->line, bytes_len(&c->line));
    bytes_consume(&c->out, bytes_len(&c->out));
    write_request(c);
    if (c->fd < 0) {
        connect_caller(c);
        return;
    }
    c->reused = true;
    send_out(c);
}

static void ask(struct caller *c, int64_t origin_ns)
{
    c->request = requests_made++;
    c->origin_ns = origin_ns;
    c->tokens = plan.tokens;
    if (!c->asked_before && plan.rate_rps <= 0 && !plan.hold && !plan.in_step)
        c->tokens = 1 + (long)(random_share() * (double)plan.tokens);
    c->asked_before = true;
    c->seq_next = 0;
    c->last_seq = -1;
    c->done_seen = false;
    c->asking = true;
    if (++seen.asking > seen.asking_max)
        seen.asking_max = seen.asking;
    put_question(c);
}

static void on_closed(struct caller *c)
{
    if (!c->asking) {
        disconnect(c); /* a kept-alive connection, let go by the peer */
        return;
    }
    if (answer_closed(&c->answer)) {
        end_of_answer(c);
        return;
    }
    /* The peer may have let go just as we asked: as any HTTP client does, ask again, once, on a new connection. */
    if (c->reused && c->answer.place == IN_HEAD && c->answer.held == 0) {
        seen.reconnects++;
        disconnect(c);
        put_question(c);
        return;
    }
    seen.broken_http++;
    fail(c, "closed before its end");
}

static void on_readable(struct caller *c)
{
    static char data[READ_BYTES];

    ssize_t got = recv(c->fd, data, sizeof data, 0);
    c->read_ns = mono_ns();
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        on_closed(c);
        return;
    }
    if (!c->asking) { /* an answer to nothing */
        seen.broken_http++;
        disconnect(c);
        return;
    }
    c->events_of_read = 0;
    size_t taken = answer_feed(&c->answer, data, (size_t)got, on_body, c);
    if (c->answer.place == ANSWER_BROKEN || taken < (size_t)got) {
        seen.broken_http++;
        fail(c, "broken HTTP framing");
    } else if (c->answer.place == ANSWER_COMPLETE) {
        end_of_answer(c);
    }
}

static void on_wake_up(struct caller *c, uint32_t events)
{
    if (c->fd >= 0 && c->connecting && events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
        int error = 0;
        socklen_t len = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
        c->connecting = false;
        if (error && !c->asking) {
            disconnect(c); /* it will ask, and say so, by itself */
            return;
        }
        if (error) {
            fail(c, strerror(error));
            return;
        }
        send_out(c);
    } else if (c->fd >= 0 && c->asking && events & EPOLLOUT) {
        send_out(c);
    }
    if (c->fd >= 0 && !c->connecting && events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        on_readable(c);
}

/* ---- the run -------------------------------------------------------------------------------------------------- */

struct run {
    int64_t measure_ns, drain_ns, end_ns; /* when each phase begins, and the end; 0 while not known */
    int64_t arrival_ns;                   /* open loop: the next one */
    int64_t memory_ns;
    int64_t self_cpu_ns;
};

static int64_t self_cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * NS_PER_S + t.tv_nsec;
}

static void begin_measuring(struct run *run)
{
    proctree_find_descendants(&tree);
    proctree_read(&tree);
    proctree_mark_cpu(&tree);
    if (!plan.hold) /* a hold compares with before */
        proctree_mark_memory(&tree);
    run->self_cpu_ns = self_cpu_ns();
    run->measure_ns = mono_ns(); /* the walk above took a while; what it delayed is not of the window */
    run->drain_ns = run->measure_ns + (int64_t)(plan.duration_s * (double)NS_PER_S);
    phase = MEASURING;
}

static void begin_draining(struct run *run)
{
    proctree_read(&tree);
    run->drain_ns = mono_ns();
    run->end_ns = run->drain_ns + (plan.hold ? 0 : (int64_t)(plan.drain_s * (double)NS_PER_S));
    run->self_cpu_ns = self_cpu_ns() - run->self_cpu_ns;
    phase = DRAINING;
    /* Processes born inside the window. Only now: finding them takes time that is not the target's. */
    proctree_find_descendants(&tree);
    proctree_read(&tree);
}

static void start_what_is_due(struct run *run)
{
    struct deadline *first;

    while (asks_more() && (first = deadline_first(&starts)) && first->due_ns <= mono_ns()) {
        deadline_cancel(&starts, first);
        ask(DEADLINE_OWNER(first, struct caller, start), mono_ns());
    }
    while (asks_more() && plan.rate_rps > 0 && run->arrival_ns <= mono_ns()) {
        struct caller *c = idle_callers;
        if (c) {
            idle_callers = c->next_idle;
            ask(c, run->arrival_ns);
        } else {
            seen.shed++;
        }
        run->arrival_ns += poisson_gap_ns();
    }
}

/* Moves to the next phase when it is time; returns when something must happen next, 0 at the end. */
static int64_t advance(struct run *run, int64_t now_ns)
{
    if (phase == WARMING && (now_ns >= run->measure_ns || (plan.hold && seen.held + (long)seen.failed >= plan.hold)))
        begin_measuring(run);
    if (phase == MEASURING && (now_ns >= run->drain_ns || (!asks_more() && seen.asking == 0)))
        begin_draining(run);
    if (phase == DRAINING && (now_ns >= run->end_ns || seen.asking == 0))
        return 0;
    if (phase == MEASURING && now_ns >= run->memory_ns) {
        proctree_read_memory(&tree);
        run->memory_ns = now_ns + MEMORY_EVERY_MS * NS_PER_MS;
    }

    int64_t next_ns = phase == WARMING ? run->measure_ns : phase == MEASURING ? run->drain_ns : run->end_ns;
    struct deadline *first = deadline_first(&starts);
    if (phase == MEASURING && run->memory_ns < next_ns)
        next_ns = run->memory_ns;
    if (asks_more() && first && first->due_ns < next_ns)
        next_ns = first->due_ns;
    if (asks_more() && plan.rate_rps > 0 && run->arrival_ns < next_ns)
        next_ns = run->arrival_ns;
    return next_ns;
}

static void run_to_the_end(struct run *run)
{
    struct epoll_event woken[WAKE_UPS_AT_ONCE];
    int64_t next_ns;

    while ((next_ns = advance(run, mono_ns())) != 0) {
        struct timespec wait = timespec_of_ns(next_ns - mono_ns());
        int n = epoll_pwait2(epoll_fd, woken, WAKE_UPS_AT_ONCE, &wait, NULL);
        for (int i = 0; i < n; i++)
            on_wake_up(woken[i].data.ptr, woken[i].events);
        start_what_is_due(run);
    }
    for (struct caller *c = callers; c < callers + plan.concurrency; c++)
        seen.cut += c->asking;
}

static void plan_starts(struct run *run)
{
    int64_t now_ns = mono_ns();
    double spread_ms = plan.hold ? plan.hold * 1e3 / HOLD_OPENED_PER_S : plan.itl_ms;

    for (int i = 0; i < plan.concurrency; i++) {
        callers[i].fd = -1;
        if (plan.rate_rps > 0)
            go_on(&callers[i], 0);
        else if (plan.in_step) {
            connect_caller(&callers[i]);
            deadline_set(&starts, &callers[i].start, now_ns + CONNECTING_MS * NS_PER_MS);
        } else if (plan.hold)
            deadline_set(&starts, &callers[i].start, now_ns + (int64_t)(spread_ms * 1e6 * i / plan.concurrency));
        else
            deadline_set(&starts, &callers[i].start, now_ns + (int64_t)(spread_ms * 1e6 * random_share()));
    }
    if (plan.rate_rps > 0)
        run->arrival_ns = now_ns + poisson_gap_ns();
    run->measure_ns = now_ns + (int64_t)((plan.hold ? HOLD_OPENING_LIMIT_S : plan.warmup_s) * (double)NS_PER_S);
}

/* ---- the result ----------------------------------------------------------------------------------------------- */

static void write_histogram(const char *name, const struct histogram *h)
{
    printf(",\"%s\":", name);
    histogram_write_json(h, stdout);
}

static bool write_result(const struct run *run)
{
    double window_s = (double)(run->drain_ns - run->measure_ns) / (double)NS_PER_S;
    uint64_t below_zero = seen.latency.below_zero;
    bool whole = !seen.failed && !seen.lost && !seen.out_of_order && !seen.after_done && !seen.broken_http &&
                 !seen.line_too_long && !below_zero && (plan.rebuilt || !seen.unstamped);
#define COUNT(name, value) printf("\"" name "\":%llu,", (unsigned long long)(value))

    printf("{\"mode\":\"%s\",\"concurrency\":%d,\"rate_rps\":%g,\"itl_ms\":%g,\"ttft_ms\":%g,\"tokens\":%ld,"
           "\"stream\":%s,\"seed\":%llu,\"window_s\":%.4f,",
           plan.hold ? "hold" : plan.rate_rps > 0 ? "open" : "closed", plan.concurrency, plan.rate_rps, plan.itl_ms,
           plan.ttft_ms, plan.tokens, plan.stream ? "true" : "false", (unsigned long long)plan.seed, window_s);
    COUNT("events", seen.events);
    COUNT("requests", seen.requests);
    COUNT("bytes", seen.bytes);
    printf("\"events_per_s\":%.1f,\"requests_per_s\":%.1f,", (double)seen.events / window_s,
           (double)seen.requests / window_s);
    COUNT("requests_total", seen.requests_total);
    COUNT("failed", seen.failed);
    COUNT("cut_at_end", seen.cut);
    COUNT("shed", seen.shed);
    COUNT("reconnects", seen.reconnects);
    COUNT("asking_max", seen.asking_max);
    COUNT("held", seen.held);
    printf("\"integrity\":{\"ok\":%s,", whole ? "true" : "false");
    COUNT("events_total", seen.events_total);
    COUNT("lost", seen.lost);
    COUNT("out_of_order", seen.out_of_order);
    COUNT("after_done", seen.after_done);
    COUNT("wrong_count", seen.wrong_count);
    COUNT("no_done", seen.no_done);
    COUNT("unstamped", seen.unstamped);
    COUNT("broken_http", seen.broken_http);
    COUNT("line_too_long", seen.line_too_long);
    printf("\"latency_below_zero\":%llu},\"framing\":{", (unsigned long long)below_zero);
    COUNT("reads_with_events", seen.reads_with_events);
    COUNT("events_sharing_a_read", seen.events_sharing_a_read);
    printf("\"http_chunks\":%llu}", (unsigned long long)seen.chunks);
    write_histogram("latency_us", &seen.latency);
    write_histogram("gap_error_us", &seen.gap_error);
    write_histogram("gap_us", &seen.gap);
    write_histogram("first_event_us", &seen.first_event);
    write_histogram("request_us", &seen.request);
    printf(",\"client_cpu_share\":%.4f", (double)run->self_cpu_ns / 1e9 / window_s);
    if (tree.count) {
        printf(",\"target\":");
        proctree_write_json(&tree, seen.events, seen.requests, stdout);
    }
    printf(",\"first_error\":\"%s\"}\n", seen.first_error);
    return whole;
#undef COUNT
}

/* ---- the command line ----------------------------------------------------------------------------------------- */

static void usage(void)
{
    fputs("usage: sse_load --url http://127.0.0.1:PORT/PATH (--concurrency N | --rate R | --hold N)\n"
          "  what is asked for   --itl-ms 0 --ttft-ms 0 --tokens 100 --no-stream --usage --body-bytes 0 --model sim-model\n"
          "                      --header 'name: value' (again for more) --stamp-content --rebuilt\n"
          "  how long            --warmup-s 1 --duration-s 5 (of the hold, too) --drain-s 1, or --requests N\n"
          "  --tokens-per-event  as the server has it, 1 otherwise: how many events make a whole answer\n"
          "  --in-step           closed loop: connected beforehand, and all begin at one moment\n"
          "  what is watched     --pid P[,P...] (with all their descendants) --latency-csv FILE\n"
          "  --stamp-content     asks for stamps in the text, for gateways that build the JSON anew\n"
          "  --rebuilt           events without a stamp are no fault: the gateway adds some of its own\n"
          "  --seed 1\n"
          "The result is one JSON object on stdout. Exit 1 if any stream was not whole.\n",
          stderr);
    exit(2);
}

static void read_url(char *url)
{
    static char host[64];
    int at = 0;

    if (sscanf(url, "http://%63[^:/]:%d%n", host, &plan.port, &at) != 2 ||
        inet_pton(AF_INET, host, &target.sin_addr) != 1)
        usage();
    plan.host = host;
    if (url[at])
        plan.path = url + at;
    target.sin_family = AF_INET;
    target.sin_port = htons((uint16_t)plan.port);
}

static void read_options(int argc, char **argv)
{
    enum { URL = 1, CONCURRENCY, RATE, HOLD, ITL, TTFT, TOKENS, NO_STREAM, USAGE, BODY_BYTES, MODEL, HEADER,
           STAMP_CONTENT, REBUILT, WARMUP, DURATION, DRAIN, PID, LATENCY_CSV, SEED, REQUESTS, IN_STEP,
           TOKENS_PER_EVENT };
    static const struct option options[] = {
        {"url", required_argument, NULL, URL},
        {"concurrency", required_argument, NULL, CONCURRENCY},
        {"rate", required_argument, NULL, RATE},
        {"hold", required_argument, NULL, HOLD},
        {"itl-ms", required_argument, NULL, ITL},
        {"ttft-ms", required_argument, NULL, TTFT},
        {"tokens", required_argument, NULL, TOKENS},
        {"no-stream", no_argument, NULL, NO_STREAM},
        {"usage", no_argument, NULL, USAGE},
        {"body-bytes", required_argument, NULL, BODY_BYTES},
        {"model", required_argument, NULL, MODEL},
        {"header", required_argument, NULL, HEADER},
        {"stamp-content", no_argument, NULL, STAMP_CONTENT},
        {"rebuilt", no_argument, NULL, REBUILT},
        {"warmup-s", required_argument, NULL, WARMUP},
        {"duration-s", required_argument, NULL, DURATION},
        {"drain-s", required_argument, NULL, DRAIN},
        {"pid", required_argument, NULL, PID},
        {"latency-csv", required_argument, NULL, LATENCY_CSV},
        {"seed", required_argument, NULL, SEED},
        {"requests", required_argument, NULL, REQUESTS},
        {"in-step", no_argument, NULL, IN_STEP},
        {"tokens-per-event", required_argument, NULL, TOKENS_PER_EVENT},
        {0},
    };
    int choice;

    while ((choice = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (choice) {
        case URL: read_url(optarg); break;
        case CONCURRENCY: plan.concurrency = atoi(optarg); break;
        case RATE: plan.rate_rps = atof(optarg); break;
        case HOLD: plan.hold = atoi(optarg); break;
        case ITL: plan.itl_ms = atof(optarg); break;
        case TTFT: plan.ttft_ms = atof(optarg); break;
        case TOKENS: plan.tokens = atol(optarg); break;
        case NO_STREAM: plan.stream = false; break;
        case USAGE: plan.usage = true; break;
        case BODY_BYTES: plan.body_bytes = atol(optarg); break;
        case MODEL: plan.model = optarg; break;
        case HEADER:
            bytes_append(&plan.headers, optarg, strlen(optarg));
            bytes_append(&plan.headers, "\r\n", 2);
            break;
        case STAMP_CONTENT: plan.stamp_content = true; break;
        case REBUILT: plan.rebuilt = true; break;
        case WARMUP: plan.warmup_s = atof(optarg); break;
        case DURATION: plan.duration_s = atof(optarg); break;
        case DRAIN: plan.drain_s = atof(optarg); break;
        case PID:
            for (char *pid = strtok(optarg, ","); pid; pid = strtok(NULL, ","))
                proctree_add_root(&tree, atoi(pid));
            break;
        case LATENCY_CSV:
            latency_csv = fopen(optarg, "w");
            if (!latency_csv) {
                perror(optarg);
                exit(1);
            }
            setvbuf(latency_csv, NULL, _IOFBF, 1 << 20);
            fputs("request_id,seq,t_send_ns,t_recv_ns\n", latency_csv);
            break;
        case SEED: plan.seed = strtoull(optarg, NULL, 10); break;
        case REQUESTS: plan.requests = strtoull(optarg, NULL, 10); break;
        case IN_STEP: plan.in_step = true; break;
        case TOKENS_PER_EVENT: plan.tokens_per_event = atol(optarg); break;
        default: usage();
        }
    if (plan.requests) {
        plan.warmup_s = 0;
        plan.duration_s = NO_END_S;
    }
    if (optind != argc || !plan.port || plan.tokens < 1 || plan.tokens_per_event < 1 ||
        (plan.concurrency > 0) + (plan.rate_rps > 0) + (plan.hold > 0) != 1)
        usage();
    if (plan.rate_rps > 0)
        plan.concurrency = CALLERS_IN_OPEN_LOOP;
    if (plan.hold) {
        plan.concurrency = plan.hold;
        /* More than one event before the silence: some gateways hold one back until they have the next. */
        plan.tokens = 1000;
        plan.silent_after = 5;
        plan.itl_ms = 10;
        plan.ttft_ms = 0;
    }
}

int main(int argc, char **argv)
{
    struct run run = {0};
    struct rlimit files;

    read_options(argc, argv);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1);
    signal(SIGPIPE, SIG_IGN);

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    callers = calloc((size_t)plan.concurrency, sizeof *callers);
    if (!callers) {
        perror("callers");
        return 1;
    }
    proctree_find_descendants(&tree);
    proctree_read(&tree);
    proctree_mark_memory(&tree); /* the target before we touch it */
    plan_starts(&run);
    run_to_the_end(&run);
    if (latency_csv)
        fclose(latency_csv);
    return write_result(&run) ? 0 : 1;
}
