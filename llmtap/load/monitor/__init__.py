"""Monitoring during a load run: the host, the processes, the GPUs and the server's metrics."""
