"""Ray Train: the config of a TorchTrainer, the worker, and the only importer of private Ray names."""
