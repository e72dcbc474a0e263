"""Benchmarks. Each writes the rows of `cgx_ray.report.result`."""
