/* Preloaded into a player: on SIGUSR1 it forks a child that inherits what it has open, and that stays. */
#include <signal.h>
#include <unistd.h>

static void fork_child(int signal_number) {
    (void)signal_number;
    if (fork() == 0) {
        static const char line[] = "forked\n";
        if (write(STDOUT_FILENO, line, sizeof line - 1) < 0) {
            _exit(1);
        }
        for (;;) {
            pause();
        }
    }
}

__attribute__((constructor)) static void arm(void) { signal(SIGUSR1, fork_child); }
