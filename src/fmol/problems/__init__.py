"""Problems with known or checkable answers, for tests and benchmarks."""
