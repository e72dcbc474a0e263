"""Helpers of several test files. pytest puts `tests/` on the path (`pythonpath` in pyproject.toml)."""
