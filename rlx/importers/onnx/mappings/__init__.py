"""How each op of ONNX becomes ops of rlx: a file for each kind."""
