"""NPU graphs ahead of time: jobs, limits, the compilation, calibrated weights."""
