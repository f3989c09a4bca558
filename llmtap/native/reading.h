/* System calls on a non-blocking socket (Linux): one read, one send. */
#ifndef LLMTAP_READING_H
#define LLMTAP_READING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    LLMTAP_UNSTAMPED = -1,
    /* Values as in net/stream.py. */
    LLMTAP_READ_BYTES_MAX = 65536,
    LLMTAP_MAPPING_NS = 1000000,
    LLMTAP_LAG_DOUBT_NS = 10000000,
};

/* Return the time of CLOCK_MONOTONIC in ns. */
int64_t llmtap_mono_ns(void);

/*
 * Read by recvmsg(2). With `stamped`, set `wall_ns` to the kernel's receive stamp (SO_TIMESTAMPNS, in ns since 1970);
 * without a stamp, `wall_ns` is not changed.
 */
ssize_t llmtap_receive(int fd, void *to, size_t room, int stamped, int64_t *wall_ns);

/* Look at the next byte by recv(2) with MSG_PEEK: the byte stays unread. */
ssize_t llmtap_peek(int fd);

/* Send by send(2), without a SIGPIPE signal. */
ssize_t llmtap_send(int fd, const void *data, size_t len);

#endif
