"""Emulated networks on one Linux machine."""
