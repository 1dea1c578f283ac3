"""Self-tests: a driver's native code runs in a child process first, and compiles only there.

`runner` tries drivers and levels, `cases` is what it runs, `results` what it records; `supervisor`
is the parent's side and `worker` the child's; `compiler` brings programs from the `store` or from a
child; `run_folder` is where this process's driver keeps its own cache.
"""
