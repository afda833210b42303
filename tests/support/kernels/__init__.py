"""Problems for the package's kernels, and implementations of the tests' own."""
