"""Kernels for gradient compression: `ops` checks and dispatches, `reference` is the specification."""
