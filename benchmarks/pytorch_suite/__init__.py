"""The part of pytorch_tests.py that runs within PyTorch's tests."""
