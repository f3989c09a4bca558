"""Watch the machine, the processes and the server during a run."""
