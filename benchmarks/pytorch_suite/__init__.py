"""Parts of pytorch_tests.py: what runs within PyTorch's tests, and why some do not pass."""
