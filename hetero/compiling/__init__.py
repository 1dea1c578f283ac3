"""NPU graphs ahead of time: what is compiled, its limits, the bundle, calibrated weights."""
