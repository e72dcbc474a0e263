"""The demo: a byte-level GPT on a network that gets slow half way."""
