"""Shared code of the backends on ONNX Runtime: building graphs, and unpacking weights for them."""
