"""Facts and services of the operating system, under everything else."""
