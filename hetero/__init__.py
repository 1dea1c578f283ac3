"""hetero: LLM inference that splits every matmul between the GPU and the NPU of one chip."""
