#include "reading.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define NS_PER_S 1000000000
#define CHUNK_END_BYTES 2 /* CR LF, as in net/tcp_info.py */
/* Offsets of fields in Linux's struct tcp_info, which are not in the headers of every C library. */
enum { BYTES_RECEIVED_AT = 128, DATA_SEGS_IN_AT = 152, RCV_OOOPACK_AT = 224, TCP_INFO_BYTES = 228 };
#ifndef SO_TIMESTAMPNS
#define SO_TIMESTAMPNS 35 /* Linux asm-generic/socket.h; not in every C library's headers */
#endif

int64_t llmtap_mono_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

ssize_t llmtap_receive(int fd, void *to, size_t room, int stamped, int64_t *wall_ns) {
    union {
        struct cmsghdr header; /* not read; gives the buffer the alignment of a header */
        char bytes[64];
    } control;
    struct iovec part = {.iov_base = to, .iov_len = room};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!stamped) return recv(fd, to, room, MSG_DONTWAIT);
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT);
    if (size <= 0) return size;
    struct cmsghdr *found = CMSG_FIRSTHDR(&message);
    if (found && found->cmsg_level == SOL_SOCKET && found->cmsg_type == SO_TIMESTAMPNS &&
        found->cmsg_len == CMSG_LEN(sizeof(struct timespec))) {
        struct timespec stamp;
        memcpy(&stamp, CMSG_DATA(found), sizeof stamp);
        *wall_ns = (int64_t)stamp.tv_sec * NS_PER_S + stamp.tv_nsec;
    }
    return size;
}

void llmtap_add_read(struct llmtap_received *received, size_t size, size_t room) {
    received->bytes += (int64_t)size;
    received->reads++;
    if (size == room) received->is_unsure = 1;
}

/* Copy a field of the kernel's tcp_info. Return 0 if the kernel does not have it, or the connection is gone. */
static int get_field(const char *info, socklen_t info_bytes, size_t at, void *field, size_t size) {
    if (at + size > info_bytes) return 0;
    memcpy(field, info + at, size);
    return 1;
}

static int has_several(const unsigned char *data, size_t size) {
    const unsigned char *end = data + size, *line = memchr(data, '\n', size);
    while (line) {
        const unsigned char *next = line + 1;
        if (next < end && *next == '\r') next++;
        if (next < end && *next == '\n') return end - next - 1 > CHUNK_END_BYTES;
        line = next < end ? memchr(next, '\n', (size_t)(end - next)) : NULL;
    }
    return 1;
}

int llmtap_came_at_once(struct llmtap_received *received, int fd, const unsigned char *data, size_t data_bytes) {
    char info[TCP_INFO_BYTES];
    socklen_t size = sizeof info;
    int64_t bytes;
    uint32_t segments;
    if (!has_several(data, data_bytes)) return 0;
    if (received->reads == received->compared_reads) return received->at_once;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) ||
        !get_field(info, size, BYTES_RECEIVED_AT, &bytes, sizeof bytes) ||
        !get_field(info, size, DATA_SEGS_IN_AT, &segments, sizeof segments))
        return 0;
    /* More bytes have arrived since the last read: their segments would be counted, too, so the answer is unknown. */
    if (bytes != received->bytes) return 0;
    int64_t grown = (uint32_t)(segments - received->compared_segments);
    received->at_once = !received->is_unsure && grown == received->reads - received->compared_reads;
    received->compared_segments = segments;
    received->compared_reads = received->reads;
    received->is_unsure = 0;
    return received->at_once;
}

int llmtap_out_of_order(int fd) {
    char info[TCP_INFO_BYTES];
    socklen_t size = sizeof info;
    uint32_t packets;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) ||
        !get_field(info, size, RCV_OOOPACK_AT, &packets, sizeof packets))
        return 1;
    return packets > 0;
}

ssize_t llmtap_peek(int fd) {
    char byte;
    return recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
}

ssize_t llmtap_send(int fd, const void *data, size_t len) { return send(fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL); }
