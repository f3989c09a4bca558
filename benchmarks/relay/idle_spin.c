/* idle_spin CPU...: keeps the listed CPUs from going idle.
 *
 * On a virtual machine a halted CPU is given back to the host, and waking it can take milliseconds. That is the host's
 * latency, not the proxy's, so while we measure something always runs. It runs at SCHED_IDLE: any other thread takes
 * the CPU from it at once. It ends with its parent, so a killed benchmark leaves nothing spinning. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void end_with_parent(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) /* it died before we asked */
        _exit(0);
}

static void occupy(int cpu)
{
    cpu_set_t only;
    struct sched_param none = {0};

    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    if (sched_setaffinity(0, sizeof only, &only) || sched_setscheduler(0, SCHED_IDLE, &none)) {
        perror("idle_spin");
        _exit(1);
    }
    for (;;)
        __asm__ volatile("" ::: "memory"); /* no `pause`: hypervisors may take it as a reason to deschedule us */
}

int main(int argc, char **argv)
{
    pid_t self = getpid();
    sigset_t wakers;
    int number;

    if (argc < 2) {
        fprintf(stderr, "usage: idle_spin CPU [CPU...]\n");
        return 2;
    }
    end_with_parent(getppid());
    setpgid(0, 0); /* so that the signal to all, at the end, is to ours alone */
    for (int i = 1; i < argc; i++) {
        pid_t child = fork();
        if (child < 0) {
            perror("fork");
            return 1;
        }
        if (child == 0) {
            end_with_parent(self);
            occupy(atoi(argv[i]));
        }
    }
    /* Asleep until told to end, or until a child ends, which it does only when it failed. The children go first and are
     * waited for: under a container's init that reaps nothing they would stay behind as zombies. */
    sigemptyset(&wakers);
    sigaddset(&wakers, SIGTERM);
    sigaddset(&wakers, SIGINT);
    sigaddset(&wakers, SIGCHLD);
    sigprocmask(SIG_BLOCK, &wakers, NULL);
    sigwait(&wakers, &number);
    signal(SIGTERM, SIG_IGN);
    kill(0, SIGTERM);
    while (wait(NULL) > 0)
        ;
    return number == SIGCHLD;
}
