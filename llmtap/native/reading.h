/* System calls on a non-blocking socket (Linux): one read, one send. */
#ifndef LLMTAP_READING_H
#define LLMTAP_READING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    LLMTAP_UNSTAMPED = -1,
    /* Same values as in net/stream.py, which explains them. */
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

/* What was read from a connection, for llmtap_came_at_once(). Zero for a new connection. */
struct llmtap_received {
    int64_t bytes, reads;
    /* Number of reads and of TCP segments when llmtap_came_at_once() last compared both. */
    int64_t compared_reads;
    uint32_t compared_segments;
    int at_once;   /* result of the last comparison */
    int is_unsure; /* whether a read since that comparison possibly left bytes in the socket */
};

/* Count a read that put `size` bytes into a buffer of `room` bytes. */
void llmtap_add_read(struct llmtap_received *received, size_t size, size_t room);

/*
 * Return whether the bytes of the last read possibly belong to several events, and all arrived at once, in one TCP
 * segment; 0 if that is not known. The kernel's count of segments (TCP_INFO) shows it: if it grew by one for each read,
 * no read had bytes of two segments. Bytes of a body possibly belong to several events if more than the line end of
 * an HTTP chunk follows a blank line, or if no blank line ends an event.
 */
int llmtap_came_at_once(struct llmtap_received *received, int fd, const unsigned char *data, size_t data_bytes);

/* Return whether a packet of the connection arrived before an earlier one; also 1 if that is not known. */
int llmtap_out_of_order(int fd);

/* Look at the next byte by recv(2) with MSG_PEEK: the byte stays unread. */
ssize_t llmtap_peek(int fd);

/* Send by send(2), without a SIGPIPE signal. */
ssize_t llmtap_send(int fd, const void *data, size_t len);

#endif
