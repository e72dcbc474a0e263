"""Records of runs and of measurements, and how commands and benches show them."""
