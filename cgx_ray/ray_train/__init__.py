"""Ray Train: config, backend and worker. The only package that imports private Ray names."""
