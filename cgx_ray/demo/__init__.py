"""The demo: a byte-level GPT on a network that slows down."""
