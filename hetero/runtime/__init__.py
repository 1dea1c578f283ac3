"""The engine: executes an `ExecutionPlan` on the devices of one model."""
