/* A thread that forwards bodies from upstream to client without Python: ARCHITECTURE.md, "The forwarding thread".
 *
 * A loan lends both sockets of one exchange to the thread. While it is lent, nobody else reads, writes, watches or
 * closes them. Only the Python thread that holds the GIL may call the functions below.
 */
#ifndef LLMTAP_FORWARDER_H
#define LLMTAP_FORWARDER_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "reading.h"

enum {
    LLMTAP_FRAME_BYTES = 128, /* FRAME_BYTES in channel/frames.py */
    LLMTAP_LAG_BUCKETS = 16,  /* len(LAG_EDGES_NS) + 1 in channel/status.py */
    /* Size of the waiting frames from which the caller is notified: FLUSH_BYTES in channel/__init__.py. */
    LLMTAP_NOTIFY_BYTES = 128 * 1024,
};

/* Reason why the thread returns a loan. If its field `bytes` is set, the thread has read them from the upstream. */
enum llmtap_reason {
    LLMTAP_RECALLED,       /* the caller called llmtap_recall() */
    LLMTAP_ACTIVITY,       /* the client sent bytes, or a side closed; the thread has not read them */
    LLMTAP_NOT_PLAIN,      /* Python has to parse the bytes; none of them was sent */
    LLMTAP_NOT_PLACED,     /* the stamp cannot be mapped to the monotonic clock; no byte was sent */
    LLMTAP_BLOCKED,        /* the client's socket did not take all bytes; the read is reported */
    LLMTAP_CLIENT_LOST,    /* the send to the client failed */
    LLMTAP_UPSTREAM_LOST,  /* the read from the upstream failed; `error` of the loan is its errno */
    LLMTAP_UPSTREAM_ENDED, /* the read found the end of the connection */
};

enum llmtap_owner { LLMTAP_CALLER, LLMTAP_THREAD, LLMTAP_RETURNED /* until the caller takes the loan */ };

struct llmtap_loan {
    _Atomic int owner; /* enum llmtap_owner */
    /* Input, which the caller sets before it lends the loan. */
    int upstream, client; /* file descriptors */
    int chunked;          /* 1: a chunked body; 0: a body of known length */
    int64_t seq;
    int tapped; /* whether reads are reported; the thread sets 0 when there is no room for a frame */
    /* Remaining bytes of the current chunk (framing.h), or of a body of known length; then it is never 0. */
    int64_t left;
    struct llmtap_received received; /* reads from the upstream so far; the thread adds its own */
    void *object;
    /* Output, which the thread sets for the caller. */
    int64_t forwarded_bytes;
    int64_t unstamped_ns; /* time of the last read without a kernel stamp; 0: every read had one */
    enum llmtap_reason reason;
    int error;
    unsigned char *bytes; /* released by llmtap_lend() and llmtap_loan_clear() */
    size_t size;
    /* With LLMTAP_NOT_PLACED: time of the read of `bytes`, and their kernel stamp. Else now_ns: their mapped stamp. */
    int64_t now_ns, wall_ns;
    _Atomic int64_t last_ns; /* stamp of the last read; the caller may read it at any time */
    /* Neighbours of the loan in the list of lent loans, or in the list of returned loans. */
    struct llmtap_loan *previous, *next;
};

struct llmtap_row {
    int64_t seq;
    int64_t t_ns;
    int64_t extra_ns;
    uint32_t size;
    uint8_t kind;
};

/* Frames, in order. `data` has the data of all frames, one after the other. */
struct llmtap_rows {
    struct llmtap_row *rows;
    char *data;
    size_t n, room, data_bytes, data_room;
    size_t drops; /* number of frames that end the measurement of an exchange */
};

/* Lags: times that received bytes waited in the kernel until the thread read them, and delays of the thread's probes. */
struct llmtap_lags {
    int64_t counts[LLMTAP_LAG_BUCKETS];
    int64_t sum_ns, max_ns;
};

struct llmtap_forwarder_options {
    const int64_t *lag_edges_ns; /* LLMTAP_LAG_BUCKETS - 1 upper bounds, ascending */
    uint8_t data_kind, at_once_kind, drop_kind; /* kinds of frames */
};

struct llmtap_forwarder;

/* Start the thread. Return NULL if that fails; errno has the reason. */
struct llmtap_forwarder *llmtap_forwarder_start(const struct llmtap_forwarder_options *options);

/* End the thread and release its memory, except the loans. The caller owns the loans that are still lent. */
void llmtap_forwarder_stop(struct llmtap_forwarder *forwarder);

/* Return a descriptor that is readable when loans are returned or frames should be collected. */
int llmtap_forwarder_fd(const struct llmtap_forwarder *forwarder);

/* Make the descriptor unreadable. To lose no signal, call this before llmtap_returned() and llmtap_collect(). */
void llmtap_acknowledge(struct llmtap_forwarder *forwarder);

/* Set the offset (monotonic minus wall clock), and the monotonic time since which the wall clock was not set. */
void llmtap_set_clock(struct llmtap_forwarder *forwarder, int64_t offset_ns, int64_t since_ns);

/* Set the maximum size of waiting frames: their data, and LLMTAP_FRAME_BYTES each. Above it, exchanges are dropped. */
void llmtap_set_room(struct llmtap_forwarder *forwarder, int64_t bytes);

/* Return the size of the waiting frames, counted as for llmtap_set_room(). */
int64_t llmtap_frames_size(struct llmtap_forwarder *forwarder);

/* Lend a loan to the thread. Return 0 if that fails: the caller keeps the loan, and errno has the reason. */
int llmtap_lend(struct llmtap_forwarder *forwarder, struct llmtap_loan *loan);

/* Take a loan back now. This waits until the thread has handled its current event. Ignored if the loan is not lent. */
void llmtap_recall(struct llmtap_forwarder *forwarder, struct llmtap_loan *loan);

/* Take the next returned loan. Return NULL if there is none. */
struct llmtap_loan *llmtap_returned(struct llmtap_forwarder *forwarder);

/* Take the frames and lags since the last call. Both are valid until the next call. */
const struct llmtap_rows *llmtap_collect(struct llmtap_forwarder *forwarder, struct llmtap_lags *lags);

/* Drop the waiting frames, and stop reporting reads of all lent loans, because the meter is gone. */
void llmtap_forget(struct llmtap_forwarder *forwarder);

/* Release the bytes of a loan. */
void llmtap_loan_clear(struct llmtap_loan *loan);

#endif
