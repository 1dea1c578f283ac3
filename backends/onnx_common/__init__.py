"""What the backends on ONNX Runtime share: building graphs, and unpacking weights for them."""
