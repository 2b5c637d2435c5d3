"""The benchmark suite: ``python -m benchmarks``. How its figures are taken: CONTRIBUTING.md."""
