/* sse_server: an OpenAI-compatible gateway that only keeps time.
 *
 *   POST anything, body with "stream":true   a stream of chat.completion.chunk events
 *   POST anything else                       one chat.completion, with Content-Length
 *   GET  /v1/models                          the one model
 *   GET  /sim/stats[?reset]                  what this server did: counts, how late it sent, CPU
 *   GET  anything else                       {"status":"ok"}
 *
 * Event i of a stream is due at (arrival of the request) + ttft + i * itl. The times are absolute, so a late event
 * does not push back those behind it. With several tokens to an event, the gap between events is as many times as
 * long. A stall moves everything behind it. Usage follows the last token at once, as engines send it. Every event is one HTTP chunk and one send(), and carries the time of that
 * send: "t_ns" and "seq" at the top level of the chunk, and, if asked, inside delta.content as ~seq@t_ns~ for gateways
 * that build the JSON anew and drop what they do not know.
 *
 * One thread, one epoll, one queue of deadlines. Bodies are searched and not parsed: this is the measured system's
 * environment, and it must cost little more than the system calls. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bytes.h"
#include "deadlines.h"
#include "histogram.h"
#include "monotonic.h"

enum {
    REQUEST_BYTES_LIMIT = 8 << 20,  /* a prompt of two million tokens; beyond it the connection is closed */
    BACKLOG_BYTES_LIMIT = 1 << 20,  /* unsent bytes per stream before it pauses: a minute of events at 50/s */
    EVENT_BYTES_LIMIT = 2048,       /* longest event: opening 400 + stamps + TOKENS_PER_EVENT_LIMIT words */
    TOKENS_PER_EVENT_LIMIT = 64,
    EVENTS_PER_TURN_LIMIT = 64,     /* events sent before sockets are looked at again */
    WAKE_UPS_AT_ONCE = 256,
    REQUEST_ID_LIMIT = 96,
    MODEL_LIMIT = 96,
};

static const int64_t SILENCE_NS = 3600 * NS_PER_S;

struct pace {
    double ttft_ms;
    double itl_ms;
    long tokens;
    long tokens_per_event;
    long stall_after;  /* so many events, and the next comes stall_ms later; 0: no stall */
    double stall_ms;
    long silent_after; /* so many events, and then none for an hour; 0: never silent */
    bool stamp_content;
};

struct connection {
    int fd;
    bool closed;            /* fd is gone; memory follows at the end of this turn */
    bool keep_alive;
    bool http_1_0;
    bool watches_writable;
    struct bytes in;
    struct bytes out;       /* what the socket did not take */
    struct deadline next;   /* when the next event of the stream is due */
    struct connection *next_closed;

    bool streaming;
    bool stamp_content;
    long seq;
    long tokens;
    long tokens_per_event;
    long events_of_tokens;
    long events;            /* those, and one more when usage was asked for */
    int64_t arrival_ns;     /* when the kernel had the newest bytes of the request; 0: no stamp */
    int64_t origin_ns;      /* when event 0 is due */
    int64_t gap_ns;         /* between events: itl for each token of one */
    long stall_after;
    int64_t stall_ns;
    long silent_after;
    char request_id[REQUEST_ID_LIMIT];
    char opening[EVENT_BYTES_LIMIT / 4]; /* what all events of this stream begin with */
    size_t opening_len;
};

struct request {
    const char *path;
    size_t path_len;
    bool is_get;
    const char *body;
    size_t body_len;
    struct pace pace;
};

static struct {
    uint64_t requests, streams_complete, streams_abandoned, events, sends_incomplete, rejected;
    long connections, streams_open, streams_open_max;
    struct histogram late; /* sent - due, of paced streams */
} stats;

static struct pace pace_default = {.tokens = 100, .tokens_per_event = 1};
static struct deadlines deadlines;
static struct connection *closed_this_turn;
static FILE *schedule_log;
static int epoll_fd;
static volatile sig_atomic_t stop_wanted;

static void on_signal(int number)
{
    (void)number;
    stop_wanted = 1;
}

/* ---- connections ---------------------------------------------------------------------------------------------- */

static void end_stream(struct connection *c)
{
    if (!c->streaming)
        return;
    c->streaming = false;
    stats.streams_open--;
    deadline_cancel(&deadlines, &c->next);
}

static void close_connection(struct connection *c)
{
    if (c->closed)
        return;
    if (c->streaming)
        stats.streams_abandoned++;
    end_stream(c);
    close(c->fd);
    c->closed = true;
    stats.connections--;
    /* Later wake-ups of this same turn may still point here. */
    c->next_closed = closed_this_turn;
    closed_this_turn = c;
}

static void free_closed_connections(void)
{
    while (closed_this_turn) {
        struct connection *c = closed_this_turn;
        closed_this_turn = c->next_closed;
        bytes_free(&c->in);
        bytes_free(&c->out);
        free(c);
    }
}

static void watch_writable(struct connection *c, bool wanted)
{
    if (c->watches_writable == wanted)
        return;
    c->watches_writable = wanted;
    struct epoll_event interest = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &interest);
}

static void close_when_sent(struct connection *c)
{
    if (bytes_len(&c->out) == 0 && !c->keep_alive && !c->streaming)
        close_connection(c);
}

/* Sends now what the socket takes and keeps the rest, in order. */
static void deliver(struct connection *c, const char *data, size_t len)
{
    if (c->closed)
        return;
    if (bytes_len(&c->out) == 0) {
        ssize_t sent = send(c->fd, data, len, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) {
                close_connection(c);
                return;
            }
            sent = 0;
        }
        data += sent;
        len -= (size_t)sent;
        if (len == 0)
            return;
        stats.sends_incomplete++;
    }
    bytes_append(&c->out, data, len);
    watch_writable(c, true);
}

static bool answer_next_request(struct connection *c);

/* ---- streams -------------------------------------------------------------------------------------------------- */

/* A paced stream whose reader is slow goes on into the backlog up to its limit, as an engine would; an unpaced one
 * waits for the socket, or it would only fill memory. */
static void plan_next_event(struct connection *c)
{
    size_t unsent = bytes_len(&c->out);

    if (unsent && (c->gap_ns == 0 || unsent > BACKLOG_BYTES_LIMIT)) {
        deadline_cancel(&deadlines, &c->next);
        return;
    }
    /* Unpaced streams go to the back of the queue, so that each has its turn. */
    long place = c->seq < c->events_of_tokens ? c->seq : c->events_of_tokens - 1;
    int64_t due_ns = c->gap_ns ? c->origin_ns + place * c->gap_ns : mono_ns();
    if (c->stall_after && place >= c->stall_after)
        due_ns += c->stall_ns;
    if (c->silent_after && c->seq >= c->silent_after)
        due_ns += SILENCE_NS;
    deadline_set(&deadlines, &c->next, due_ns);
}

/* Delivers one HTTP chunk made of the bytes from payload to end. There must be 8 free bytes before, and 2 behind. */
static void deliver_chunk(struct connection *c, char *payload, char *end, const char *then)
{
    char size[8];
    char *size_end = put_number(size, (uint64_t)(end - payload), 16);

    if (!c->http_1_0) {
        size_end = put_bytes(size_end, "\r\n", 2);
        payload -= size_end - size;
        memcpy(payload, size, (size_t)(size_end - size));
        end = PUT_LITERAL(end, "\r\n");
        end = put_bytes(end, then, strlen(then));
    }
    deliver(c, payload, (size_t)(end - payload));
}

static char *put_usage(char *at, long tokens)
{
    at = PUT_LITERAL(at, ",\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":");
    at = put_decimal(at, (uint64_t)tokens);
    at = PUT_LITERAL(at, ",\"total_tokens\":");
    at = put_decimal(at, (uint64_t)tokens + 16);
    return PUT_LITERAL(at, "}");
}

static char *put_choice(char *at, const struct connection *c, int64_t t_ns)
{
    at = PUT_LITERAL(at, ",\"choices\":[{\"index\":0,\"delta\":{");
    if (c->seq == 0)
        at = PUT_LITERAL(at, "\"role\":\"assistant\",");
    at = PUT_LITERAL(at, "\"content\":\"");
    long first = c->seq * c->tokens_per_event;
    for (long i = first; i < first + c->tokens_per_event && i < c->tokens; i++) {
        at = PUT_LITERAL(at, " word");
        at = put_decimal(at, (uint64_t)i);
    }
    if (c->stamp_content) {
        at = PUT_LITERAL(at, " ~");
        at = put_decimal(at, (uint64_t)c->seq);
        at = PUT_LITERAL(at, "@");
        at = put_decimal(at, (uint64_t)t_ns);
        at = PUT_LITERAL(at, "~");
    }
    at = PUT_LITERAL(at, "\"},\"logprobs\":null,\"finish_reason\":");
    at = c->seq == c->events_of_tokens - 1 ? PUT_LITERAL(at, "\"stop\"") : PUT_LITERAL(at, "null");
    return PUT_LITERAL(at, "}]");
}

static void log_event(const struct connection *c, int64_t t_ns, int64_t due_ns)
{
    char line[REQUEST_ID_LIMIT + 100];
    char *at = put_bytes(line, c->request_id, strlen(c->request_id));

    at = PUT_LITERAL(at, ",");
    at = put_decimal(at, (uint64_t)c->seq);
    at = PUT_LITERAL(at, ",");
    at = put_decimal(at, (uint64_t)t_ns);
    at = PUT_LITERAL(at, ",");
    at = put_decimal(at, (uint64_t)due_ns);
    at = PUT_LITERAL(at, ",");
    at = put_decimal(at, (uint64_t)c->arrival_ns);
    at = PUT_LITERAL(at, "\n");
    fwrite(line, 1, (size_t)(at - line), schedule_log);
}

static void send_done(struct connection *c)
{
    char room[64];
    char *payload = room + 8;

    deliver_chunk(c, payload, PUT_LITERAL(payload, "data: [DONE]\n\n"), "0\r\n\r\n");
    if (c->closed)
        return;
    stats.streams_complete++;
    end_stream(c);
    close_when_sent(c);
    while (answer_next_request(c)) /* one may have come while the stream ran */
        ;
}

static void send_event(struct connection *c)
{
    static char room[EVENT_BYTES_LIMIT + 16];
    char *payload = room + 8;
    int64_t due_ns = c->gap_ns ? c->next.due_ns : 0;
    int64_t t_ns = mono_ns();
    char *at = put_bytes(payload, c->opening, c->opening_len);

    at = put_decimal(at, (uint64_t)t_ns);
    at = PUT_LITERAL(at, ",\"seq\":");
    at = put_decimal(at, (uint64_t)c->seq);
    at = c->seq < c->events_of_tokens ? put_choice(at, c, t_ns) : put_usage(at, c->tokens);
    at = PUT_LITERAL(at, "}\n\n");

    deliver_chunk(c, payload, at, "");
    if (c->closed)
        return;
    if (due_ns)
        histogram_add(&stats.late, t_ns - due_ns);
    if (schedule_log)
        log_event(c, t_ns, due_ns);
    stats.events++;
    c->seq++;
    if (c->seq == c->events)
        send_done(c);
    else
        plan_next_event(c);
}

static void begin_stream(struct connection *c, const struct pace *pace, const char *model, bool usage)
{
    char head[512];
    int len = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\n"
                       "Content-Type: text/event-stream; charset=utf-8\r\n"
                       "Cache-Control: no-cache\r\n"
                       "x-request-id: %s\r\n"
                       "%s%s\r\n",
                       c->request_id, c->http_1_0 ? "" : "Transfer-Encoding: chunked\r\n",
                       c->keep_alive ? "" : "Connection: close\r\n");

    c->opening_len = (size_t)snprintf(c->opening, sizeof c->opening,
                                      "data: {\"id\":\"chatcmpl-sim%llu\",\"object\":\"chat.completion.chunk\","
                                      "\"created\":1760000000,\"model\":\"%s\",\"t_ns\":",
                                      (unsigned long long)stats.requests, model);
    c->seq = 0;
    c->tokens = pace->tokens > 0 ? pace->tokens : 1;
    c->tokens_per_event = pace->tokens_per_event;
    c->events_of_tokens = (c->tokens + c->tokens_per_event - 1) / c->tokens_per_event;
    c->events = c->events_of_tokens + (usage ? 1 : 0);
    c->gap_ns = (int64_t)(pace->itl_ms * (double)NS_PER_MS) * c->tokens_per_event;
    c->stall_after = pace->stall_after;
    c->stall_ns = (int64_t)(pace->stall_ms * (double)NS_PER_MS);
    c->origin_ns = mono_ns() + (int64_t)(pace->ttft_ms * (double)NS_PER_MS);
    c->silent_after = pace->silent_after;
    c->stamp_content = pace->stamp_content;
    c->streaming = true;
    if (++stats.streams_open > stats.streams_open_max)
        stats.streams_open_max = stats.streams_open;
    deliver(c, head, (size_t)len);
    if (!c->closed)
        deadline_set(&deadlines, &c->next, c->origin_ns);
}

/* ---- requests ------------------------------------------------------------------------------------------------- */

static void reply_json(struct connection *c, const char *body, int body_len)
{
    char answer[4096];
    int len = snprintf(answer, sizeof answer,
                       "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
                       "x-request-id: %s\r\n%s\r\n%.*s",
                       body_len, c->request_id, c->keep_alive ? "" : "Connection: close\r\n", body_len, body);

    deliver(c, answer, (size_t)len);
    if (!c->closed)
        close_when_sent(c);
}

static void answer_get(struct connection *c, const struct request *r)
{
    char body[2048];
    int len;

    if (r->path_len >= 10 && !memcmp(r->path, "/sim/stats", 10)) {
        struct rusage used;
        getrusage(RUSAGE_SELF, &used);
        len = snprintf(body, sizeof body,
                       "{\"requests\":%llu,\"streams_complete\":%llu,\"streams_abandoned\":%llu,\"streams_open\":%ld,"
                       "\"streams_open_max\":%ld,\"connections\":%ld,\"events\":%llu,\"sends_incomplete\":%llu,"
                       "\"rejected\":%llu,\"late_us\":{\"p50\":%.1f,\"p99\":%.1f,\"max\":%.1f},\"cpu_s\":%.3f}\n",
                       (unsigned long long)stats.requests, (unsigned long long)stats.streams_complete,
                       (unsigned long long)stats.streams_abandoned, stats.streams_open, stats.streams_open_max,
                       stats.connections, (unsigned long long)stats.events,
                       (unsigned long long)stats.sends_incomplete, (unsigned long long)stats.rejected,
                       histogram_quantile_ns(&stats.late, 0.5) / 1e3, histogram_quantile_ns(&stats.late, 0.99) / 1e3,
                       (double)stats.late.max_ns / 1e3,
                       (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
        if (memmem(r->path, r->path_len, "?reset", 6)) {
            long connections = stats.connections, open = stats.streams_open;
            memset(&stats, 0, sizeof stats);
            stats.connections = connections;
            stats.streams_open = stats.streams_open_max = open;
        }
    } else if (r->path_len >= 10 && !memcmp(r->path, "/v1/models", 10)) {
        len = snprintf(body, sizeof body,
                       "{\"object\":\"list\",\"data\":[{\"id\":\"sim-model\",\"object\":\"model\","
                       "\"created\":1760000000,\"owned_by\":\"sim\"}]}\n");
    } else {
        len = snprintf(body, sizeof body, "{\"status\":\"ok\"}\n");
    }
    reply_json(c, body, len);
}

/* The text behind "key": in a JSON text, blanks skipped; NULL when the key is not there. Good enough for the bodies
 * our own client and the usual SDKs write; a prompt that quotes the key would fool it. */
static const char *after_key(const char *json, size_t len, const char *quoted_key)
{
    const char *end = json + len;
    const char *at = memmem(json, len, quoted_key, strlen(quoted_key));

    if (!at)
        return NULL;
    at += strlen(quoted_key);
    while (at < end && strchr(" \t\r\n:", *at) && *at)
        at++;
    return at < end ? at : NULL;
}

static bool flag_set(const char *json, size_t len, const char *quoted_key)
{
    const char *value = after_key(json, len, quoted_key);
    return value && json + len - value >= 4 && !memcmp(value, "true", 4);
}

static void copy_model(const struct request *r, char *model)
{
    const char *value = after_key(r->body, r->body_len, "\"model\"");
    const char *end = NULL;

    strcpy(model, "sim-model");
    if (value && *value == '"')
        end = memchr(value + 1, '"', (size_t)(r->body + r->body_len - value - 1));
    if (end && end - value - 1 < MODEL_LIMIT) {
        memcpy(model, value + 1, (size_t)(end - value - 1));
        model[end - value - 1] = 0;
    }
}

static void answer_post(struct connection *c, const struct request *r)
{
    char model[MODEL_LIMIT];
    char body[1024];
    int len;

    copy_model(r, model);
    if (flag_set(r->body, r->body_len, "\"stream\"")) {
        begin_stream(c, &r->pace, model, flag_set(r->body, r->body_len, "\"include_usage\""));
        return;
    }
    len = snprintf(body, sizeof body,
                   "{\"id\":\"chatcmpl-sim%llu\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"%s\","
                   "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Answered at once, by a "
                   "program that has read nothing of what you wrote.\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
                   "\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":14,\"total_tokens\":30}}",
                   (unsigned long long)stats.requests, model);
    reply_json(c, body, len);
}

/* Pacing written into the prompt, for gateways that forward no unknown header:
 * sim:ttft=0,itl=20,tokens=100,silent=0,stamp=1 */
static void read_pace_from_body(struct pace *pace, const char *body, size_t len)
{
    char text[160];
    const char *found = memmem(body, len, "sim:", 4);
    const char *value;

    if (!found)
        return;
    size_t left = len - (size_t)(found - body);
    size_t n = left < sizeof text - 1 ? left : sizeof text - 1;
    memcpy(text, found, n);
    text[n] = 0;
    if ((value = strstr(text, "ttft=")))
        pace->ttft_ms = atof(value + 5);
    if ((value = strstr(text, "itl=")))
        pace->itl_ms = atof(value + 4);
    if ((value = strstr(text, "tokens=")))
        pace->tokens = atol(value + 7);
    if ((value = strstr(text, "silent=")))
        pace->silent_after = atol(value + 7);
    if ((value = strstr(text, "stamp=")))
        pace->stamp_content = atoi(value + 6) != 0;
}

struct head {
    size_t len;
    size_t content_length;
    bool chunked;
    const char *ttft, *itl, *tokens, *silent, *stamp; /* values of the x-sim headers; atof and atol stop at the line end */
};

static void read_head_field(struct connection *c, struct head *head, const char *name, size_t name_len,
                            const char *value, size_t value_len)
{
#define IS(text) (name_len == sizeof(text) - 1 && !strncasecmp(name, text, sizeof(text) - 1))
    if (IS("content-length"))
        head->content_length = strtoul(value, NULL, 10);
    else if (IS("transfer-encoding"))
        head->chunked = value_len >= 7 && !strncasecmp(value, "chunked", 7);
    else if (IS("connection") && value_len >= 5 && !strncasecmp(value, "close", 5))
        c->keep_alive = false;
    else if (IS("x-sim-ttft-ms"))
        head->ttft = value;
    else if (IS("x-sim-itl-ms"))
        head->itl = value;
    else if (IS("x-sim-tokens"))
        head->tokens = value;
    else if (IS("x-sim-silent-after"))
        head->silent = value;
    else if (IS("x-sim-stamp"))
        head->stamp = value;
    else if (IS("x-request-id") && value_len < REQUEST_ID_LIMIT) {
        memcpy(c->request_id, value, value_len);
        c->request_id[value_len] = 0;
    }
#undef IS
}

/* Reads the head at the front of c->in. False while it is not there whole. */
static bool read_head(struct connection *c, struct head *head, struct request *r)
{
    char *start = bytes_at(&c->in);
    char *blank = memmem(start, bytes_len(&c->in), "\r\n\r\n", 4);

    if (!blank)
        return false;
    head->len = (size_t)(blank - start) + 4;

    char *line_end = memmem(start, head->len, "\r\n", 2);
    char *path = memchr(start, ' ', (size_t)(line_end - start));
    r->is_get = !memcmp(start, "GET", 3);
    r->path = path ? path + 1 : line_end;
    char *path_end = memchr(r->path, ' ', (size_t)(line_end - r->path));
    r->path_len = (size_t)((path_end ? path_end : line_end) - r->path);
    c->http_1_0 = path_end && line_end - path_end == 9 && !memcmp(path_end, " HTTP/1.0", 9);
    c->keep_alive = !c->http_1_0;
    snprintf(c->request_id, sizeof c->request_id, "sim-%llu", (unsigned long long)stats.requests + 1);

    for (char *line = line_end + 2; line < blank + 2; line = line_end + 2) {
        line_end = memmem(line, (size_t)(blank + 2 - line), "\r\n", 2);
        char *colon = memchr(line, ':', (size_t)(line_end - line));
        if (!colon)
            continue;
        char *value = colon + 1;
        while (value < line_end && *value == ' ')
            value++;
        read_head_field(c, head, line, (size_t)(colon - line), value, (size_t)(line_end - value));
    }
    return true;
}

/* Joins the chunks of a body in place. Returns the bytes they took on the wire, 0 while the last one is missing. */
static size_t join_chunks(char *wire, size_t wire_len, char *joined, size_t *joined_len)
{
    size_t at = 0;

    *joined_len = 0;
    for (;;) {
        char *line_end = memmem(wire + at, wire_len - at, "\r\n", 2);
        if (!line_end)
            return 0;
        size_t size = strtoul(wire + at, NULL, 16);
        at = (size_t)(line_end + 2 - wire);
        if (size > wire_len - at || wire_len - at - size < 2)
            return 0;
        memcpy(joined + *joined_len, wire + at, size);
        *joined_len += size;
        at += size + 2;
        if (size == 0)
            return at;
    }
}

/* Answers the request at the front of c->in, if it is there whole. */
static bool answer_next_request(struct connection *c)
{
    struct head head = {0};
    struct request r = {.pace = pace_default};
    char *joined = NULL;
    size_t taken;

    if (c->closed || c->streaming || bytes_len(&c->in) < 16 || !read_head(c, &head, &r))
        return false;

    char *body = bytes_at(&c->in) + head.len;
    size_t body_here = bytes_len(&c->in) - head.len;
    if (head.chunked) {
        joined = malloc(body_here + 1);
        size_t wire_len = joined ? join_chunks(body, body_here, joined, &r.body_len) : 0;
        r.body = joined;
        taken = wire_len ? head.len + wire_len : 0;
    } else {
        r.body = body;
        r.body_len = head.content_length;
        taken = body_here >= head.content_length ? head.len + head.content_length : 0;
    }
    if (taken) {
        read_pace_from_body(&r.pace, r.body, r.body_len);
        if (head.ttft)
            r.pace.ttft_ms = atof(head.ttft);
        if (head.itl)
            r.pace.itl_ms = atof(head.itl);
        if (head.tokens)
            r.pace.tokens = atol(head.tokens);
        if (head.silent)
            r.pace.silent_after = atol(head.silent);
        if (head.stamp)
            r.pace.stamp_content = !strncasecmp(head.stamp, "content", 7);
        stats.requests++;
        if (r.is_get)
            answer_get(c, &r);
        else
            answer_post(c, &r);
        bytes_consume(&c->in, taken);
    }
    free(joined);
    return taken > 0;
}

/* ---- the loop ------------------------------------------------------------------------------------------------- */

static void accept_all(int listener)
{
    int on = 1;

    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        struct connection *c = calloc(1, sizeof *c);
        struct epoll_event interest = {.events = EPOLLIN, .data.ptr = c};
        if (!c || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &interest)) {
            free(c);
            close(fd);
            continue;
        }
        c->fd = fd;
        c->keep_alive = true;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        stats.connections++;
    }
}

/* The kernel's receive stamp of a message, on our clock; 0 when it has none. The kernel stamps with CLOCK_REALTIME: the
 * difference of both clocks is read here, so a step of that clock before this moment does no harm. */
static int64_t arrival_of(struct msghdr *message)
{
    struct timespec real, stamp;

    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part))
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_TIMESTAMPNS) {
            memcpy(&stamp, CMSG_DATA(part), sizeof stamp);
            clock_gettime(CLOCK_REALTIME, &real);
            return mono_ns() - (ns_of_timespec(real) - ns_of_timespec(stamp));
        }
    return 0;
}

static void on_readable(struct connection *c)
{
    enum { READ_BYTES = 16384 };

    char control[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec room = {.iov_base = bytes_reserve(&c->in, READ_BYTES), .iov_len = READ_BYTES};
    struct msghdr message = {
        .msg_iov = &room, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(c->fd, &message, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        close_connection(c);
        return;
    }
    bytes_added(&c->in, (size_t)got);
    if (!c->streaming)
        c->arrival_ns = arrival_of(&message);
    while (answer_next_request(c))
        ;
    if (!c->closed && bytes_len(&c->in) > REQUEST_BYTES_LIMIT) {
        stats.rejected++;
        close_connection(c);
    }
}

static void on_writable(struct connection *c)
{
    ssize_t sent = send(c->fd, bytes_at(&c->out), bytes_len(&c->out), MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN)
        return;
    if (sent < 0) {
        close_connection(c);
        return;
    }
    bytes_consume(&c->out, (size_t)sent);
    if (bytes_len(&c->out) == 0)
        watch_writable(c, false);
    if (!c->streaming)
        close_when_sent(c);
    else if (!c->next.place)
        plan_next_event(c);
}

static void send_due_events(void)
{
    for (int sent = 0; sent < EVENTS_PER_TURN_LIMIT; sent++) {
        struct deadline *first = deadline_first(&deadlines);
        if (!first || first->due_ns > mono_ns())
            return;
        send_event(DEADLINE_OWNER(first, struct connection, next));
    }
}

static void serve(int listener)
{
    struct epoll_event woken[WAKE_UPS_AT_ONCE];
    int64_t housekeeping_ns = mono_ns();

    while (!stop_wanted) {
        struct deadline *first = deadline_first(&deadlines);
        int64_t wait_ns = NS_PER_S;
        int64_t now_ns = mono_ns();
        if (first && first->due_ns - now_ns < wait_ns)
            wait_ns = first->due_ns - now_ns;
        struct timespec wait = timespec_of_ns(wait_ns);

        int n = epoll_pwait2(epoll_fd, woken, WAKE_UPS_AT_ONCE, &wait, NULL);
        for (int i = 0; i < n; i++) {
            struct connection *c = woken[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            if (!c->closed && woken[i].events & EPOLLOUT)
                on_writable(c);
            if (!c->closed && woken[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                on_readable(c);
        }
        send_due_events();
        free_closed_connections();
        if (schedule_log && mono_ns() - housekeeping_ns > NS_PER_S) {
            housekeeping_ns = mono_ns();
            fflush(schedule_log);
        }
    }
    if (schedule_log)
        fclose(schedule_log);
}

static int listen_on(const char *address, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    socklen_t len = sizeof at;
    int on = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (inet_pton(AF_INET, address, &at.sin_addr) != 1 || bind(fd, (struct sockaddr *)&at, sizeof at) ||
        listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&at, &len)) {
        perror("sse_server: listen");
        exit(1);
    }
    /* Whoever started us with --port 0 reads here where we are. */
    printf("{\"listening\":\"%s:%d\"}\n", address, ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

static void usage(void)
{
    fputs("usage: sse_server [--address 127.0.0.1] [--port 9000, 0 = any] [--ttft-ms 0] [--itl-ms 0] [--tokens 100]\n"
          "                  [--tokens-per-event 1] [--stall-after EVENTS --stall-ms MS]\n"
          "                  [--stamp-content] [--schedule-log FILE] [--with-parent]\n"
          "\n"
          "  per request: headers x-sim-ttft-ms, x-sim-itl-ms, x-sim-tokens, x-sim-silent-after: N,\n"
          "  x-sim-stamp: content, or the text sim:ttft=..,itl=..,tokens=..,silent=N,stamp=1 in the body\n"
          "  --schedule-log   one line per event: request_id,seq,t_ns (sent),due_ns (0: unpaced),\n"
          "                   arrival_ns (the kernel had the request)\n"
          "  --with-parent    end when the process that started this one ends\n",
          stderr);
    exit(2);
}

int main(int argc, char **argv)
{
    enum { ADDRESS = 1, PORT, TTFT, ITL, TOKENS, TOKENS_PER_EVENT, STALL_AFTER, STALL_MS, STAMP_CONTENT,
           SCHEDULE_LOG, WITH_PARENT };
    static const struct option options[] = {
        {"address", required_argument, NULL, ADDRESS},
        {"port", required_argument, NULL, PORT},
        {"ttft-ms", required_argument, NULL, TTFT},
        {"itl-ms", required_argument, NULL, ITL},
        {"tokens", required_argument, NULL, TOKENS},
        {"tokens-per-event", required_argument, NULL, TOKENS_PER_EVENT},
        {"stall-after", required_argument, NULL, STALL_AFTER},
        {"stall-ms", required_argument, NULL, STALL_MS},
        {"stamp-content", no_argument, NULL, STAMP_CONTENT},
        {"schedule-log", required_argument, NULL, SCHEDULE_LOG},
        {"with-parent", no_argument, NULL, WITH_PARENT},
        {0},
    };
    const char *address = "127.0.0.1";
    int port = 9000, choice;

    while ((choice = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (choice) {
        case ADDRESS: address = optarg; break;
        case PORT: port = atoi(optarg); break;
        case TTFT: pace_default.ttft_ms = atof(optarg); break;
        case ITL: pace_default.itl_ms = atof(optarg); break;
        case TOKENS: pace_default.tokens = atol(optarg); break;
        case TOKENS_PER_EVENT: pace_default.tokens_per_event = atol(optarg); break;
        case STALL_AFTER: pace_default.stall_after = atol(optarg); break;
        case STALL_MS: pace_default.stall_ms = atof(optarg); break;
        case STAMP_CONTENT: pace_default.stamp_content = true; break;
        case WITH_PARENT: prctl(PR_SET_PDEATHSIG, SIGTERM); break;
        case SCHEDULE_LOG:
            schedule_log = fopen(optarg, "w");
            if (!schedule_log) {
                perror(optarg);
                return 1;
            }
            setvbuf(schedule_log, NULL, _IOFBF, 1 << 20);
            fputs("request_id,seq,t_ns,due_ns,arrival_ns\n", schedule_log);
            break;
        default: usage();
        }
    if (optind != argc || pace_default.tokens_per_event < 1 ||
        pace_default.tokens_per_event > TOKENS_PER_EVENT_LIMIT)
        usage();

    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1); /* the default rounds every wait up by 50 us */
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    int listener = listen_on(address, port);
    if (schedule_log) { /* what it accepts inherits this */
        int on = 1;
        setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    }
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &interest);
    serve(listener);
    return 0;
}
