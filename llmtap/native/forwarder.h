/* A thread that forwards bodies from upstream to client without Python: ARCHITECTURE.md, "The forwarding thread".
 *
 * A loan lends both sockets of one exchange to the thread. While it is lent, nobody else reads, writes, watches or
 * closes them. All functions but the thread itself are for one caller at a time: the one that holds the GIL.
 */
#ifndef LLMTAP_FORWARDER_H
#define LLMTAP_FORWARDER_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LLMTAP_FRAME_BYTES = 128,          /* channel/frames.py */
    LLMTAP_LAG_BUCKETS = 16,           /* len(LAG_EDGES_NS) + 1 */
    LLMTAP_NOTIFY_BYTES = 128 * 1024,  /* of frames: the caller is notified; FLUSH_BYTES of channel/__init__.py */
};

/* Why a loan is returned. Its bytes, if any, were read from the upstream. */
enum llmtap_reason {
    LLMTAP_RECALLED,       /* the caller wanted it */
    LLMTAP_ACTIVITY,       /* the client sent something, or a side closed: nothing of it was read */
    LLMTAP_NOT_PLAIN,      /* the bytes have to be parsed; none was sent */
    LLMTAP_NOT_PLACED,     /* the stamp cannot be mapped to the monotonic clock; no byte was sent */
    LLMTAP_BLOCKED,        /* the client's socket did not take the bytes; the frame is reported */
    LLMTAP_CLIENT_LOST,    /* the send failed */
    LLMTAP_UPSTREAM_LOST,  /* the read failed: `error` */
    LLMTAP_UPSTREAM_ENDED, /* the read found the end of the connection */
};

enum llmtap_owner { LLMTAP_CALLER, LLMTAP_THREAD, LLMTAP_RETURNED /* the caller's, and not taken yet */ };

struct llmtap_loan {
    _Atomic int owner; /* enum llmtap_owner */
    /* Set by the caller. */
    int upstream, client; /* file descriptors */
    int chunked;          /* else: a body of known length */
    int64_t seq;
    int tapped;   /* reads are reported; the thread ends this if there is no room for a frame */
    int64_t left; /* as in framing.h, or bytes of the body; never 0 for a body of known length */
    void *object;
    /* Result, for the caller. */
    int64_t forwarded_bytes;
    enum llmtap_reason reason;
    int error;
    unsigned char *bytes; /* released by llmtap_lend() and llmtap_loan_clear() */
    size_t size;
    int64_t now_ns, wall_ns; /* of the bytes: LLMTAP_NOT_PLACED; else now_ns is their stamp */
    _Atomic int64_t last_ns; /* stamp of the last read; at any time */
    /* The thread's. */
    struct llmtap_loan *previous, *next;
};

struct llmtap_row {
    int64_t seq;
    int64_t t_ns;
    int64_t extra_ns;
    uint32_t size;
    uint8_t kind;
};

/* Frames, in order, with their data joined. */
struct llmtap_rows {
    struct llmtap_row *rows;
    char *data;
    size_t n, room, data_bytes, data_room;
    size_t drops; /* number of frames that end the measurement of an exchange */
};

/* How long reads waited in the kernel, and how late the thread's probes were. */
struct llmtap_lags {
    int64_t counts[LLMTAP_LAG_BUCKETS];
    int64_t sum_ns, max_ns;
};

struct llmtap_forwarder_options {
    const int64_t *lag_edges_ns; /* LLMTAP_LAG_BUCKETS - 1 */
    uint8_t data_kind, drop_kind;
};

struct llmtap_forwarder;

/* Start the thread; NULL: errno says why there is none. */
struct llmtap_forwarder *llmtap_forwarder_start(const struct llmtap_forwarder_options *options);

/* End the thread and release everything but the loans. Those that are lent become the caller's. */
void llmtap_forwarder_stop(struct llmtap_forwarder *forwarder);

/* Descriptor that is readable when loans are returned or frames should be collected. */
int llmtap_forwarder_fd(const struct llmtap_forwarder *forwarder);

/* Make the descriptor unreadable; then take loans and frames. */
void llmtap_acknowledge(struct llmtap_forwarder *forwarder);

/* Monotonic minus wall clock, and the monotonic time since which the wall clock was not set. */
void llmtap_set_clock(struct llmtap_forwarder *forwarder, int64_t offset_ns, int64_t since_ns);

/* Memory of frames from which on exchanges are dropped: their data, and LLMTAP_FRAME_BYTES for each. */
void llmtap_set_room(struct llmtap_forwarder *forwarder, int64_t bytes);

/* Memory of the frames that wait. */
int64_t llmtap_frames_size(struct llmtap_forwarder *forwarder);

/* Lend a loan to the thread. 0: the caller keeps it, and errno says why. */
int llmtap_lend(struct llmtap_forwarder *forwarder, struct llmtap_loan *loan);

/* Take a loan back now; waits for the thread, which needs one event's time. No effect on a loan that is not lent. */
void llmtap_recall(struct llmtap_forwarder *forwarder, struct llmtap_loan *loan);

/* Take the next returned loan; NULL: there is none. */
struct llmtap_loan *llmtap_returned(struct llmtap_forwarder *forwarder);

/* Take the frames and lags since the last call. Both are valid until the next call. */
const struct llmtap_rows *llmtap_collect(struct llmtap_forwarder *forwarder, struct llmtap_lags *lags);

/* Drop the frames that wait, and report no more of the loans that are lent: the meter is gone. */
void llmtap_forget(struct llmtap_forwarder *forwarder);

/* Release the bytes of a loan. */
void llmtap_loan_clear(struct llmtap_loan *loan);

#endif
