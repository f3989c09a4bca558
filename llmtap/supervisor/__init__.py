"""The parent process of `proxy`, `meter` and `watch`: starts, restarts, reloads and stops their processes."""
