#define _GNU_SOURCE
#include "proctree.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ssize_t read_small_file(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, text, room - 1);
    close(fd);
    if (n >= 0)
        text[n] = 0;
    return n;
}

/* The fields of /proc/PID/stat behind the name, which may itself hold blanks and parentheses. */
static bool read_stat(pid_t pid, pid_t *parent, int64_t *ticks_ns)
{
    char path[64], text[1024];
    int ppid;
    unsigned long user, system;

    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (read_small_file(path, text, sizeof text) <= 0)
        return false;
    char *behind_name = strrchr(text, ')');
    if (!behind_name || sscanf(behind_name + 2, "%*c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &ppid, &user,
                               &system) != 3)
        return false;
    *parent = ppid;
    *ticks_ns = (int64_t)(user + system) * (1000000000 / sysconf(_SC_CLK_TCK));
    return true;
}

static void read_schedstat(struct process *p)
{
    char path[64 + 256], text[128];
    pid_t pid = p->pid;

    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    if (!tasks)
        return;
    p->sched_ns = p->wait_ns = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        if (!isdigit((unsigned char)task->d_name[0]))
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, task->d_name);
        if (read_small_file(path, text, sizeof text) > 0) {
            char *second;
            p->sched_ns += strtoll(text, &second, 10);
            p->wait_ns += strtoll(second, NULL, 10);
        }
    }
    closedir(tasks);
}

static long read_rss_kb(pid_t pid)
{
    char path[64], text[128];
    long pages = 0;

    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    if (read_small_file(path, text, sizeof text) > 0)
        sscanf(text, "%*d %ld", &pages);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* The command line as one line of text that needs no escaping in JSON. */
static void read_command(pid_t pid, char *command)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    ssize_t n = read_small_file(path, command, COMMAND_LIMIT);
    for (ssize_t i = 0; i < n; i++)
        if (command[i] == '"' || command[i] == '\\' || !isprint((unsigned char)command[i]))
            command[i] = ' ';
    if (n <= 0)
        command[0] = 0;
}

static struct process *find(struct proctree *t, pid_t pid)
{
    for (int i = 0; i < t->count; i++)
        if (t->processes[i].pid == pid)
            return &t->processes[i];
    return NULL;
}

static void add(struct proctree *t, pid_t pid)
{
    if (t->count == PROCTREE_LIMIT || find(t, pid))
        return;
    struct process *p = &t->processes[t->count++];
    *p = (struct process){.pid = pid};
    read_command(pid, p->command);
}

void proctree_add_root(struct proctree *t, pid_t pid)
{
    add(t, pid);
    t->roots = t->count;
}

void proctree_find_descendants(struct proctree *t)
{
    /* Children mostly have higher numbers than their parents and are met after them; a second walk finds the rest. */
    for (int walk = 0; walk < 2; walk++) {
        DIR *proc = opendir("/proc");
        if (!proc)
            return;
        for (struct dirent *entry; (entry = readdir(proc));) {
            pid_t pid = atoi(entry->d_name), parent;
            int64_t ticks_ns;
            if (pid > 0 && read_stat(pid, &parent, &ticks_ns) && find(t, parent))
                add(t, pid);
        }
        closedir(proc);
    }
}

void proctree_read_memory(struct proctree *t)
{
    for (int i = 0; i < t->count; i++) {
        struct process *p = &t->processes[i];
        p->rss_kb = read_rss_kb(p->pid);
        if (p->rss_kb > p->rss_kb_max)
            p->rss_kb_max = p->rss_kb;
    }
}

void proctree_read(struct proctree *t)
{
    proctree_read_memory(t);
    for (int i = 0; i < t->count; i++) {
        struct process *p = &t->processes[i];
        pid_t parent;
        int64_t ticks_ns;
        p->gone = !read_stat(p->pid, &parent, &ticks_ns);
        if (p->gone)
            continue; /* what it had spent when last seen stays */
        p->ticks_ns = ticks_ns;
        read_schedstat(p);
    }
}

void proctree_mark_cpu(struct proctree *t)
{
    for (int i = 0; i < t->count; i++) {
        struct process *p = &t->processes[i];
        p->sched_ns_start = p->sched_ns;
        p->wait_ns_start = p->wait_ns;
        p->ticks_ns_start = p->ticks_ns;
    }
}

void proctree_mark_memory(struct proctree *t)
{
    for (int i = 0; i < t->count; i++)
        t->processes[i].rss_kb_start = t->processes[i].rss_kb_max = t->processes[i].rss_kb;
}

static double share_us(double cpu_s, uint64_t among)
{
    return among ? cpu_s * 1e6 / (double)among : 0.0;
}

void proctree_write_json(const struct proctree *t, uint64_t events, uint64_t requests, FILE *out)
{
    double sched_s = 0, ticks_s = 0, wait_s = 0;
    long rss_kb = 0, rss_kb_start = 0;

    fprintf(out, "{\"processes\":[");
    for (int i = 0; i < t->count; i++) {
        const struct process *p = &t->processes[i];
        double cpu_s = (double)(p->sched_ns - p->sched_ns_start) / 1e9;
        sched_s += cpu_s;
        ticks_s += (double)(p->ticks_ns - p->ticks_ns_start) / 1e9;
        wait_s += (double)(p->wait_ns - p->wait_ns_start) / 1e9;
        rss_kb += p->rss_kb;
        rss_kb_start += p->rss_kb_start;
        fprintf(out,
                "%s{\"pid\":%d,\"command\":\"%s\",\"gone\":%s,\"cpu_s\":%.6f,\"rss_kb_start\":%ld,\"rss_kb\":%ld,"
                "\"rss_kb_max\":%ld}",
                i ? "," : "", p->pid, p->command, p->gone ? "true" : "false", cpu_s, p->rss_kb_start, p->rss_kb,
                p->rss_kb_max);
    }
    bool has_sched = sched_s > 0;
    double cpu_s = has_sched ? sched_s : ticks_s;
    fprintf(out,
            "],\"cpu_source\":\"%s\",\"cpu_s\":%.6f,\"cpu_s_ticks\":%.2f,\"cpu_wait_s\":%.6f,"
            "\"us_per_event\":%.3f,\"us_per_request\":%.3f,\"rss_kb_start\":%ld,\"rss_kb\":%ld}",
            has_sched ? "schedstat" : "stat", cpu_s, ticks_s, wait_s, share_us(cpu_s, events), share_us(cpu_s, requests),
            rss_kb_start, rss_kb);
}
