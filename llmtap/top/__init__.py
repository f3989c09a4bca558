"""The live view of a tap in a terminal, over its admin port's HTTP and nothing else."""
