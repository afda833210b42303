"""The part of pytorch_tests that runs within PyTorch's tests."""
