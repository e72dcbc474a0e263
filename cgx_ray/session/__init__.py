"""Put the engine behind a model: `attach` and what it needs. Imports no Ray."""
