/* One read and one send of a socket that does not block. Linux. */
#ifndef LLMTAP_READING_H
#define LLMTAP_READING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    LLMTAP_UNSTAMPED = -1,
    /* net/stream.py */
    LLMTAP_READ_BYTES_MAX = 65536,
    LLMTAP_MAPPING_NS = 1000000,
    LLMTAP_LAG_DOUBT_NS = 10000000,
};

/* CLOCK_MONOTONIC, in ns. */
int64_t llmtap_mono_ns(void);

/*
 * recvmsg(2). With `stamped`, `wall_ns` is set to the kernel's receive stamp (SO_TIMESTAMPNS, in ns since the epoch);
 * it stays as it is if there is none.
 */
ssize_t llmtap_receive(int fd, void *to, size_t room, int stamped, int64_t *wall_ns);

/* recv(2) of one byte, which stays to be read. */
ssize_t llmtap_peek(int fd);

/* send(2), without SIGPIPE. */
ssize_t llmtap_send(int fd, const void *data, size_t len);

#endif
